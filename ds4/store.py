"""Where a conversation is kept: a folder of its own, or memory.

    <path>/log-000001.jsonl      the events of its transcript, sealed lines (ds4.sealed), only ever appended to
    <path>/log-000002.jsonl      goes on behind the last good line of an earlier file, when the rest of it is damaged
    <path>/spill/session-*/      raw nodes of compacted spans (ds4.spill)
    <path>/kv.ds4                a snapshot of the session: an accelerator, never needed
    <path>/lock                  locked (flock) while a process has the conversation open

An event counts from the moment its line is whole in the file. It is written with one call and made durable before
`append` returns. A line that a crash has cut is not repaired: nothing is rewritten in place, the next event opens the
next file, whose first line says behind which line of which file it goes on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import StoreBusy, StoreError
from .log import LOG, MAX_FILES, Place, Scan, log_files, log_name, referred, scan
from .sealed import (
    MAX_LINE,
    Damage,
    make_folder,
    open_regular,
    place,
    plain,
    seal,
    sync_folder,
    write_all,
    write_temporary,
)
from .spill import Spill, folder_name

VERSION = 1
SNAPSHOT = "kv.ds4"
_COPIES = re.compile(r"\.copies-[0-9a-f]{8}\.tmp")  # says that spill files are copies for a fork that has no log yet
_TEMPORARY = re.compile(r"\.(?:copies|log-[0-9]{6,9})-[0-9a-f]{8}\.tmp")
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_TRIES, _PAUSE = 4, 0.01  # a listing looks at locks for an instant, too


def new_id() -> str:
    """An id for a conversation, also fit for its folder's name: when it began, and a random part."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


class MemoryStore:
    """A conversation in memory. Everything is gone when it ends."""

    path: Path | None = None
    failed: str | None = None
    """Why nothing is written any more, as a sentence; the conversation goes on in memory."""
    damage: Damage | None = None
    """What could not be read when it was opened; everything before it was."""

    def __init__(self, info: Mapping[str, Any] | None = None) -> None:
        self.id = new_id()
        self.spill = Spill()
        self._lines: list[bytes] = []
        self._sum = ""
        first = _first(self.id, info or {})
        self.info: dict[str, Any] = first["info"]
        self.append(first)

    @property
    def persistent(self) -> bool:
        """Whether what is appended lasts."""
        return self.path is not None and self.failed is None

    @property
    def snapshot(self) -> Path | None:
        """Where a snapshot of the session belongs."""
        return self.path / SNAPSHOT if self.path is not None else None

    def append(self, event: Mapping[str, Any]) -> None:
        line, self._sum = seal(event, self._sum)
        self._lines.append(line)

    def events(self) -> Iterator[dict[str, Any]]:
        """All events, from the first on."""
        for line in self._lines:
            event = json.loads(line)
            del event["sum"]
            yield event

    def reject(self, index: int, what: str) -> None:
        """What the transcript says when it cannot make sense of event `index`: only those before it count."""
        raise StoreError(f"event {index + 1} of a conversation in memory: {what}.")

    def close(self) -> None:
        """Safe to call twice."""

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Store(MemoryStore):
    """A conversation in a folder, locked for this process until `close`. Made by `create` and `open`.

    Appending never raises for what the system refuses: `failed` then says so, and the conversation goes on in memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id, self.info = "", {}
        self.spill = Spill()
        self._lines = []
        self._sum = ""
        self._opened: list[dict[str, Any]] | None = None
        self._count = 0  # events on disk
        self._scan = Scan()
        self._fd: int | None = None
        self._lock: int | None = None
        self._closed = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        info: Mapping[str, Any] | None = None,
        *,
        events: Sequence[Mapping[str, Any]] = (),
        spill: Spill | None = None,
    ) -> Store:
        """A new conversation in a folder that does not exist or is empty. `info` is kept in its first event, `events`
        follow it and `spill` is copied: it begins with all of them or does not exist.

        Raises StoreError when there is something else, StoreBusy when another process is making one there. When the
        system refuses to write, the conversation is in memory and `failed` says so.
        """
        store = cls(Path(path).absolute())
        assert store.path is not None
        store.id = store.path.name if _ID.fullmatch(store.path.name) else new_id()
        store.spill = Spill(store.path / "spill" / folder_name(store.id))
        made = [_first(store.id, info or {}), *events]
        store.info = dict(made[0]["info"])
        try:
            store._make(made, spill)
        except OSError as error:
            store._fail(error)
            if spill is not None:
                store.spill = spill.copy()
            for event in made:
                MemoryStore.append(store, event)
        except BaseException:
            store.close()
            raise
        _stores.add(store)
        return store

    def _make(self, events: Sequence[Mapping[str, Any]], spill: Spill | None) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(self.path)
        try:
            make_folder(self.path)
            self._fill(events, spill)
        except OSError:
            if new and not log_files(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _fill(self, events: Sequence[Mapping[str, Any]], spill: Spill | None) -> None:
        assert self.path is not None and self.spill.folder is not None
        self._take_lock()
        names = os.listdir(self.path)
        if any(LOG.fullmatch(name) for name in names):
            raise StoreError(f"{self.path} holds a conversation already: open it, or choose another folder.")
        if any(_COPIES.fullmatch(name) for name in names) and "spill" in names:
            shutil.rmtree(self.path / "spill")
            names.remove("spill")
        if any(name != "lock" and not _TEMPORARY.fullmatch(name) for name in names):
            raise StoreError(f"{self.path} is not empty and holds no conversation: choose another folder.")
        os.chmod(self.path, 0o700)
        self._tidy()
        if spill is not None and spill.numbers():
            write_temporary(self.path, "copies", ())
            spill.copy_to(self.spill.folder)
        lines = []
        for event in events:
            line, self._sum = seal(event, self._sum)
            lines.append(line)
            self._scan.places.append(Place(log_name(1), len(lines), self._sum, len(lines)))
        place(write_temporary(self.path, "log-000001", lines), self.path / log_name(1))
        self._scan.tail, self._scan.next_file, self._count = log_name(1), 2, len(lines)
        with suppress(OSError):
            self._tidy()

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether a folder holds a conversation."""
        return bool(log_files(Path(path)))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """The conversation in a folder. What lies behind a damaged line is left out, and `damage` names it.

        Raises StoreError when there is none, or none that can be read; StoreBusy when it is in use.
        """
        store = cls(Path(path).absolute())
        assert store.path is not None
        if not log_files(store.path):
            raise StoreError(f"{store.path} holds no conversation: check the path; `ds4 sessions list` shows yours.")
        try:
            try:
                store._take_lock()
            except OSError as error:
                store._fail(error)
            store._read()
        except BaseException:
            store.close()
            raise
        _stores.add(store)
        return store

    def _read(self) -> None:
        assert self.path is not None
        self._scan = found = scan(self.path)
        if not found.events:
            raise StoreError(f"{self.path} cannot be opened: {found.live or 'its log is empty'}.")
        first = found.events[0]
        if first.get("type") != "conversation" or not isinstance(first.get("id"), str):
            raise StoreError(f"{self.path} cannot be opened: its log does not begin as the log of a conversation.")
        if first.get("version") != VERSION:
            raise StoreError(f"{self.path} was written by another version of ds4: this one reads version {VERSION}.")
        if not isinstance(first.get("info"), dict):
            raise StoreError(f"{self.path} cannot be opened: its log does not say what the conversation was made with.")
        self.id, self.info, self.damage = first["id"], first["info"], found.live
        self.spill = Spill(self.path / "spill" / folder_name(self.id))
        self._opened, self._count, self._sum = found.events, len(found.events), found.places[-1].sum
        if self.failed is None:
            try:
                self._tidy()
                self.spill.recover(referred(found.events))
            except OSError as error:
                self._fail(error)
        else:
            self.spill.to_memory()

    def append(self, event: Mapping[str, Any]) -> None:
        """One event, durable when this returns. Nothing is raised when the system refuses: see `failed`."""
        if self._closed:
            raise StoreError(f"{self.path} is closed: open the conversation again.")
        if self.failed is None:
            try:
                self._write(event)
                return
            except OSError as error:
                self._fail(error)
        super().append(event)

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self.path is not None
        before, sum, new = b"", self._sum, None
        if self._fd is None:
            if self._scan.tail is not None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._fd = os.open(self.path / self._scan.tail, flags)
            else:
                new, last = log_name(self._scan.next_file), self._scan.places[-1]
                if self._scan.next_file > MAX_FILES:
                    raise OSError(errno.EFBIG, f"no log file can follow {log_name(MAX_FILES)}")
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL
                self._fd = os.open(self.path / new, flags, 0o600)
                before, sum = seal({"type": "continue", "after": last.file, "lines": last.line}, sum)
        if os.fstat(self._fd).st_nlink == 0:
            raise OSError(errno.ENOENT, "its log was deleted while it was open")
        line, sum = seal(event, sum)
        if len(line) > MAX_LINE:
            raise OSError(errno.EFBIG, f"an event of {len(line)} bytes is larger than a line of the log may be")
        write_all(self._fd, before + line)
        os.fsync(self._fd)
        if new is not None:
            sync_folder(self.path)
        self._sum, self._count = sum, self._count + 1

    def _fail(self, error: OSError) -> None:
        self.failed = (
            f"{self.path} cannot be written ({error.strerror or error}): the conversation goes on in memory only, and "
            "what comes from now on is lost when it ends; mend that and open it again to go on from what is saved."
        )
        self.spill.to_memory()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def events(self) -> Iterator[dict[str, Any]]:
        """All events, from the first on: those on disk, then those that only memory has."""
        assert self.path is not None
        opened, self._opened = self._opened, None
        if opened is None and self._count:
            opened = scan(self.path).events
            if len(opened) < self._count:
                raise StoreError(
                    f"the log of {self.path} was changed while it was open: `ds4 sessions verify` says how."
                )
        yield from (opened or [])[: self._count]
        yield from super().events()

    def reject(self, index: int, what: str) -> None:
        """Only the events before `index` count: what the transcript says when it cannot make sense of one."""
        if index == 0:
            raise StoreError(f"{self.path} cannot be opened: {what}.")
        self.damage = self._scan.cut(index, what)
        self._sum, self._count = self._scan.places[-1].sum, index

    def close(self) -> None:
        """Lets others open it. Safe to call twice."""
        self._closed = True
        for fd in (self._fd, self._lock):
            if fd is not None:
                os.close(fd)
        self._fd = self._lock = None

    def _take_lock(self) -> None:
        assert self.path is not None
        self._lock, refused = take_lock(self.path)
        if refused is not None:
            raise refused

    def _tidy(self) -> None:
        """Removes what making the first log file has left, here or in a process that died over it."""
        assert self.path is not None
        for name in os.listdir(self.path):
            if _TEMPORARY.fullmatch(name):
                os.unlink(self.path / name)

    def _forked(self) -> None:
        """In the child of os.fork: the conversation stays the parent's."""
        for fd in (self._fd, self._lock):
            if fd is not None:
                os.close(fd)
        self._fd = self._lock = None
        self.failed = f"{self.path} belongs to the process that this one was forked from: here it is in memory only."
        self.spill.to_memory()


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store._forked()


os.register_at_fork(after_in_child=_after_fork)


def _first(id: str, info: Mapping[str, Any]) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"seq": 1, "type": "conversation", "version": VERSION, "id": id, "created": created, "info": plain(info)}


def take_lock(path: Path) -> tuple[int | None, OSError | None]:
    """Locks the conversation in a folder: the descriptor that holds the lock until it is closed, and why this process
    may not write there (a lock that can only be read is taken all the same). Raises StoreBusy when it is taken."""
    file, refused, fd = path / "lock", None, None
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        refused = error
        with suppress(OSError):
            fd = open_regular(file)
    if fd is None:
        return None, refused
    try:
        if not _locked(fd):
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise StoreBusy(f"{path} is in use by {who}: close it there first.")
        if refused is None and os.fstat(fd).st_nlink == 1:  # else it may be another file besides
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # such as a full disk: who holds the lock is only for messages, that it is held is not
        refused = error
    except BaseException:
        os.close(fd)
        raise
    return fd, refused


def _locked(fd: int) -> bool:
    """Takes the lock, without waiting for it."""
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(_PAUSE)
    return False


def in_use(path: Path) -> bool:
    """Whether a process has the conversation open now."""
    try:
        fd = open_regular(path / "lock")
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
