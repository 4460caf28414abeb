"""The C core without Python: the programs in tests/c are built from csrc alone and run; the header stands by itself."""

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CC = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-DDS4_TEST", f"-I{ROOT / 'csrc'}"]
ENV = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CFLAGS")}  # the compiler runs without sanitizers

pytestmark = pytest.mark.skipif(shutil.which(CC[0]) is None, reason="needs a C compiler")


def build(*arguments):
    done = subprocess.run([*CC, *map(str, arguments)], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The whole core, compiled once."""
    folder = tmp_path_factory.mktemp("core")
    sources = sorted((ROOT / "csrc").rglob("*.c"))
    built = [folder / ("_".join(s.relative_to(ROOT).parts) + ".o") for s in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda s, o: build(*FLAGS, "-c", s, "-o", o), sources, built))
    return built


@pytest.mark.parametrize("program", sorted((ROOT / "tests" / "c").glob("*.c")), ids=lambda p: p.stem)
def test_program(program, objects, tmp_path):
    build(*FLAGS, program, *objects, "-lm", "-o", tmp_path / program.stem)
    done = subprocess.run([tmp_path / program.stem], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("standard", ["c11", "c++17"])
def test_the_header_stands_by_itself(standard, tmp_path):
    source = tmp_path / ("user.cc" if "++" in standard else "user.c")
    source.write_text('#include "ds4.h"\nint main(void) { ds4_error e; e.status = DS4_OK; return e.status; }\n')
    probe = [*CC, "-fsyntax-only", "-x", "c++" if "++" in standard else "c", "/dev/null"]
    if subprocess.run(probe, env=ENV, capture_output=True).returncode:
        pytest.skip("this compiler has no C++")
    build(
        f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'csrc'}", "-fsyntax-only", source
    )
