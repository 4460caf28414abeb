"""The registry: what a TOML may say, and which file a name or a path means."""

import hashlib
from pathlib import Path

import pytest

from ds4 import chat_formats, models
from ds4.compaction.policy import CompactionPolicy
from ds4.errors import ArgumentError, FileFormatError
from ds4.sampling import Sampling


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home"


GOOD = f"""
title = "Toy"
licence = "MIT"
file = "toy.gguf"
size = 3
sha256 = "{hashlib.sha256(b"abc").hexdigest()}"
[source]
kind = "url"
url = "https://example.org/toy.gguf"
"""


def write(home, text, name="toy"):
    path = home / "models" / f"{name}.toml"
    path.write_text(text)
    return path


def test_every_built_in_toml_is_valid():
    folder = Path(models.__file__).resolve().parent.parent / "models"
    for path in folder.glob("*.toml"):
        model = models.load(path.stem)
        assert model.path.parent == models.home() / "weights" / model.name


def test_built_in_tomls_name_formats_and_defaults_that_exist():
    for name in models.names():
        model = models.load(name)
        assert model.chat_format is None or model.chat_format in chat_formats.names()
        Sampling(**model.defaults)
        CompactionPolicy.from_mapping(model.compaction)


def test_gemma_is_joined_from_the_packages_that_the_references_were_made_with():
    model = models.load("gemma3-270m")
    assert model.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert [part.member[-6:] for part in model.source.parts] == ["part00", "part01", "part02", "part03"]


def test_smollm2_is_the_file_that_the_references_were_made_with():
    model = models.load("smollm2-135m")
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (model.size, model.chat_format, model.licence) == (98_362_432, "chatml", "Apache-2.0")


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("DS4_HOME", str(tmp_path))
    assert models.home() == tmp_path
    monkeypatch.delenv("DS4_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert models.home() == tmp_path / "x" / "ds4"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification: ignore it
    assert models.home() == Path.home() / ".cache" / "ds4"


def test_resolve(home, tmp_path, monkeypatch):
    write(home, GOOD)
    assert "toy" in models.names()
    with pytest.raises(ArgumentError, match="fetch it with `ds4 pull toy`"):
        models.resolve("toy")
    path = models.load("toy").path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"ab")  # a file that is cut is not there
    with pytest.raises(ArgumentError, match="ds4 pull toy"):
        models.resolve("toy")
    path.write_bytes(b"abc")
    assert models.resolve("toy") == path
    assert models.describe("toy").title == models.describe(path).title == "Toy"
    assert models.describe(tmp_path) is None

    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    assert models.resolve("toy") == path  # the name wins, a path is written as one
    assert models.resolve("./toy") == Path("toy")
    assert models.resolve(tmp_path / "toy") == tmp_path / "toy"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("zzz", "known names: .*smollm2-135m"),
        ("nowhere.gguf", "no file or folder 'nowhere.gguf'"),
        ("./zzz", "no file or folder"),
        ("../models/smollm2-135m", "no file or folder"),
        ("", "known names"),
    ],
)
def test_resolve_of_nothing(what, message):
    with pytest.raises(ArgumentError, match=message):
        models.resolve(what)


def test_a_user_toml_wins(home):
    write(home, GOOD, "smollm2-135m")
    assert models.load("smollm2-135m").title == "Toy"
    assert models.names().count("smollm2-135m") == 1


PYPI = '[source]\nkind = "pypi"\n[[source.parts]]\npackage = "p"\nversion = "1"\nmember = "m"'
HUB = f'[source]\nkind = "huggingface"\nrepo = "a/b"\nrevision = "{"a" * 40}"'
FOLDER = 'title = "T"\nlicence = "MIT"\n'
HEAD, URL = GOOD.split("[source]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "not valid TOML"),
        (GOOD.replace('title = "Toy"', ""), "'title' is missing"),
        (GOOD.replace('"Toy"', "7"), "'title' has to be text, not 7"),
        (GOOD.replace('"Toy"', '" "'), "'title' has to be text"),
        ("colour = 1\n" + GOOD, "unknown key 'colour'; known here: title"),
        (GOOD + "colour = 1\n", r"\[source\] unknown key 'colour'; known here: kind, url"),
        (GOOD.replace("size = 3", "size = 0"), "'size' has to be a whole number above 0, not 0"),
        (GOOD.replace("size = 3", "size = true"), "'size' has to be"),
        (GOOD.replace("size = 3", "size = 3.0"), "'size' has to be"),
        (GOOD.replace("size = 3", f"size = {1 << 62}"), "'size' has to be"),
        (GOOD.replace("toy.gguf", "../toy.gguf", 1), "does not look like a file"),
        (GOOD.replace("toy.gguf", ".lock", 1), "does not look like a file"),
        (GOOD.replace('sha256 = "', 'sha256 = "x'), "does not look like a sha256"),
        (GOOD.replace("https:", "ftp:"), "does not look like a url"),
        (HEAD, "'kind' is missing"),
        (HEAD + '[source]\nkind = "torrent"', "kind = 'torrent' is unknown; known: pypi, huggingface, url"),
        ("source = 1\n" + HEAD, r"\[source\] has to be a table"),
        (HEAD + '[source]\nkind = "pypi"', "needs one or more"),
        (HEAD + PYPI + "\ncolour = 1", "unknown key 'colour'; known here: package"),
        (HEAD + PYPI.replace('"p"', '"-r"'), "does not look like a package"),
        (HEAD + PYPI.replace('"1"', '"1 --pre"'), "does not look like a version"),
        (FOLDER + PYPI, "fetches one file, so 'file', 'size' and 'sha256' are needed"),
        (FOLDER + HUB, "'patterns' has to be a list of one or more texts"),
        (FOLDER + HUB + "\npatterns = []", "'patterns' has to be a list"),
        (HEAD + HUB + '\npatterns = ["x"]', "unknown key 'patterns'"),
        (FOLDER + HUB.replace("a" * 40, "main") + '\npatterns = ["x"]', "does not look like a revision"),
        (FOLDER + HUB + '\npatterns = ["x"]\n[source.sha256]\nx = "12"', "does not look like a x"),
        (GOOD + "[defaults]\nheat = 1", r"\[defaults\] unknown key 'heat'; known here: temperature"),
        (GOOD + '[defaults]\ntop_k = "many"', "'top_k' has to be a number"),
        (GOOD + '[compaction]\nrequest = "long"', "does not look like a request"),
        (GOOD + "[compaction]\nsummary_penalty = 1.1", "'summary_penalty' has to be true or false, not 1.1"),
        (GOOD + "[compaction]\nctx = 1", r"\[compaction\] unknown key 'ctx'; known here: request, summary_penalty"),
    ],
)
def test_a_wrong_toml_is_refused_with_its_place(home, text, message):
    path = write(home, text)
    with pytest.raises(FileFormatError, match=message) as e:
        models.load("toy")
    assert str(path) in str(e.value)


def test_all_kinds_of_source(home):
    write(home, HEAD + PYPI)
    assert models.load("toy").source == models.PypiSource((models.Part("p", "1", "m", 0),))
    write(home, HEAD + HUB)
    assert models.load("toy").path.name == "toy.gguf"
    write(home, FOLDER + HUB + '\npatterns = ["*.json"]')
    model = models.load("toy")
    assert model.path.name == "a" * 40 and not model.present
    model.path.mkdir(parents=True)
    assert model.present
    write(home, GOOD + "[defaults]\ntemperature = 0.5\ntop_k = 40")
    assert models.load("toy").defaults == {"temperature": 0.5, "top_k": 40}
    write(home, GOOD + '[compaction]\nrequest = "short"\nsummary_penalty = true')
    assert models.load("toy").compaction == {"request": "short", "summary_penalty": True}
