"""The sdist is complete, one wheel serves every Python from 3.10 on, and an installed ds4 needs no compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nosanitize]
ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache")


def setup(folder, *args, **env):
    """setup.py of `folder`, started from another directory, without what would go out to an index."""
    env = {**os.environ, "DS4_BUILD_TEST": "", **env}
    command = [sys.executable, str(folder / "setup.py"), "-q", *args]
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked source distribution of a clean copy."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
    done = setup(folder / "tree", "sdist", "-d", str(folder))
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("ds4-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "out", filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(
            folder / "out"
        )
    (unpacked,) = (folder / "out").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = setup(sdist, "bdist_wheel", "-d", str(folder))
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_sdist_has_all_sources(sdist):
    for folder in ("csrc", "kernels", "models", "ds4", "tests/c"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".c", ".h", ".cu", ".metal", ".toml", ".py"):
                assert (sdist / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert (sdist / "LICENSE").exists() and not list(sdist.rglob("*.so"))


def test_wheel(wheel):
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(n).decode() for n in names if n.endswith("dist-info/METADATA"))
        scripts = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert "ds4 = ds4.cli:main" in scripts
    assert {f"ds4/_models/{p.name}" for p in (ROOT / "models").glob("*.toml")} < names
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "ds4").rglob("*.py")} < names
    assert not [n for n in names if "_core_test" in n or n.startswith(("tests/", "csrc/"))]
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: MIT" in metadata
    for extra in ("test", "bench", "dev", "hf"):
        assert f"Provides-Extra: {extra}" in metadata


def test_the_installed_package_needs_no_compiler_and_no_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import ds4, ds4.models as m; print(ds4.__file__, m.load('smollm2-135m').size)"
    env = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "site" / "ds4" / "__init__.py"), "98362432"], done.stderr


@pytest.mark.parametrize("env", [{"PATH": "/nowhere"}, {"CC": "no-such-cc"}])
def test_without_a_compiler_one_sentence_says_so(sdist, env):
    done = setup(sdist, "build_ext", **env)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ds4 needs a C compiler and ") and "apt-get install gcc" in done.stderr


def test_a_changed_header_is_noticed(sdist, wheel):
    (built,) = (sdist / "build" / "core").rglob("kv.o")
    first = built.stat().st_mtime_ns
    assert setup(sdist, "build_ext").returncode == 0
    assert built.stat().st_mtime_ns == first  # the wheel has compiled it already
    os.utime(sdist / "csrc" / "internal.h")
    assert setup(sdist, "build_ext").returncode == 0
    assert built.stat().st_mtime_ns > first
