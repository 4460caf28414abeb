"""The folder that an agent's files lie in: paths a model gives lead into it, or nowhere.

A path is walked from the root's own descriptor, one name at a time, and each folder is opened with O_NOFOLLOW from the
one before it. Links are read and followed here, never by the system: `..` ends at the root, and a link that leads
outside is refused, whatever it is made of and whenever it was put there. Between looking at a name and opening it the
name may be exchanged; then the open fails and the name is looked at again.

Hard links and mounts cannot be told from files of the folder: who can make them there has access to both sides.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ds4.errors import ArgumentError

MAX_LINKS = 40  # as the kernel; names that are exchanged under our eyes count as links
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# without O_NONBLOCK, opening a named pipe would wait for its other end
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
# how looking at a name's link or opening its folder fails when it has become something else
_EXCHANGED = (errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EINVAL)
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class Place:
    """Where a path leads: `name` in the folder open as `folder`, or that folder itself where `name` is "".

    `path` is relative to the root, without links and `..`; `info` is None where nothing is. The descriptor is open as
    long as the walk's context.
    """

    folder: int
    name: str
    path: str
    info: os.stat_result | None


class Root:
    """A folder that is not left. Every method raises ArgumentError, a sentence, for a path that does not do."""

    def __init__(self, folder: str | Path) -> None:
        self.path = os.path.realpath(folder)
        """The folder's real path."""
        self._spelled = os.path.abspath(folder)
        try:
            self._fd = os.open(self.path, FOLDER)
        except OSError as error:
            raise ArgumentError(f"the root {folder} is no folder that can be opened: {error.strerror}.") from None
        self._close = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        """Gives the descriptor back; the root is of no use afterwards."""
        self._close()

    def resolve(self, path: str) -> str:
        """The real path of what is there now. To read or write it, use the other methods: they cannot be raced."""
        with self.walk(path) as place:
            if place.info is None:
                raise ArgumentError(f"{place.path} does not exist.")
            return os.path.normpath(os.path.join(self.path, place.path))

    @contextlib.contextmanager
    def walk(self, path: str, make_folders: bool = False) -> Iterator[Place]:
        """Follows a path; its last name need not exist. `make_folders`: nor the folders before it, they are made."""
        if not path or "\0" in path or not _is_text(path):
            raise ArgumentError('a path is text without NUL bytes, such as "src/main.c"; "." is the folder itself.')
        todo = self._names(path)[::-1]
        folders = [self._fd]
        names: list[str] = []
        steps = 0
        try:
            while todo:
                name = todo.pop()
                if name == ".":
                    continue
                if name == "..":
                    if not names:
                        raise self._outside(path)
                    os.close(folders.pop())
                    names.pop()
                    continue
                info = _look(name, folders[-1], path)
                kind = stat.S_IFMT(info.st_mode) if info is not None else None
                make = kind is None and make_folders and bool(todo) and not {".", ".."} & set(todo)
                if kind not in (stat.S_IFLNK, stat.S_IFDIR) and not make:
                    if todo:
                        what = "does not exist" if info is None else "is no folder"
                        raise ArgumentError(f"{'/'.join([*names, name])} {what}.")
                    yield Place(folders[-1], name, "/".join([*names, name]), info)
                    return
                try:
                    if kind == stat.S_IFLNK:
                        target = os.readlink(name, dir_fd=folders[-1])
                        todo += self._names(target, path)[::-1]
                        steps += 1
                        while names and target.startswith("/"):
                            os.close(folders.pop())
                            names.pop()
                    elif make:
                        os.mkdir(name, dir_fd=folders[-1])
                        todo.append(name)
                    else:
                        folders.append(os.open(name, FOLDER, dir_fd=folders[-1]))
                        names.append(name)
                except OSError as error:
                    if error.errno not in (*_EXCHANGED, errno.EEXIST):
                        raise _sentence(path, error) from None
                    todo.append(name)
                    steps += 1
                if steps > MAX_LINKS:
                    raise ArgumentError(f"{path} leads through more than {MAX_LINKS} links; name the file itself.")
            yield Place(folders[-1], "", "/".join(names) or ".", os.fstat(folders[-1]))
        finally:
            for fd in folders[1:]:
                os.close(fd)

    def open(self, path: str) -> tuple[BinaryIO, str]:
        """A regular file for reading, and its path relative to the root."""
        with self.walk(path) as place:
            need_file(place)
            try:
                return open_file(place.name, place.folder), place.path
            except OSError as error:
                raise _sentence(place.path, error) from None

    def replace(self, path: str, data: bytes) -> tuple[str, bool]:
        """Puts a file in place whole or not at all: temporary file in its folder, fsync, rename. Its mode is kept.

        Missing folders are made. Returns its path relative to the root, and whether it is new.
        """
        with self.walk(path, make_folders=True) as place:
            if place.info is not None:
                need_file(place)
                if not place.info.st_mode & 0o222:
                    raise ArgumentError(f"{place.path} is read-only; write another file.")
            try:
                _replace(place, data)
            except OSError as error:
                raise _sentence(place.path, error) from None
            return place.path, place.info is None

    def _names(self, path: str, shown: str = "") -> list[str]:
        """The names of a path or of a link's target, from the root on or from where the walk is; a "." at the end
        where it must be a folder. `shown`: the path to name in errors, where it is another."""
        names = [name for name in path.split("/") if name not in ("", ".")]
        if path.startswith("/"):
            for root in (self.path, self._spelled):
                head = [name for name in root.split("/") if name]
                if names[: len(head)] == head:
                    names = names[len(head) :]
                    break
            else:
                raise self._outside(shown or path)
        return [*names, "."] if path.endswith(("/", "/.")) else names

    def _outside(self, path: str) -> ArgumentError:
        return ArgumentError(
            f"{path} leads out of the folder {self.path}; only files in it can be used, with paths relative to it."
        )


def open_file(name: str, folder: int) -> BinaryIO:
    """A regular file of an open folder. Raises OSError; never waits and follows no link."""
    fd = os.open(name, _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _look(name: str, folder: int, path: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _sentence(path, error) from None


def need_file(place: Place) -> None:
    """Raises ArgumentError unless a regular file is there."""
    if place.info is None:
        raise ArgumentError(f"{place.path} does not exist.")
    if not stat.S_ISREG(place.info.st_mode):
        kind = KINDS.get(stat.S_IFMT(place.info.st_mode), "no regular file")
        raise ArgumentError(f"{place.path} is {kind}; name a regular file.")


def _replace(place: Place, data: bytes) -> None:
    old = place.info
    temporary = f".ds4-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o666 if old is None else 0o600, dir_fd=place.folder)
    try:
        with os.fdopen(fd, "wb") as file:
            if old is not None:
                with contextlib.suppress(PermissionError):  # only root may give files away
                    os.fchown(fd, old.st_uid, old.st_gid)
                os.fchmod(fd, old.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
    except BaseException:
        os.unlink(temporary, dir_fd=place.folder)
        raise
    os.fsync(place.folder)


def _is_text(path: str) -> bool:
    """Whether it can be a name in UTF-8: no lone surrogates."""
    return path.isascii() or path.encode("utf-8", "ignore").decode() == path


def _sentence(path: str, error: OSError) -> ArgumentError:
    return ArgumentError(f"{path} cannot be used: {error.strerror}.")
