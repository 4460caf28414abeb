"""The conversations of this user: where they lie, what is in them, whether their files are sound.

Reading them needs no lock and changes nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import snapshot_check
from .errors import ArgumentError, StoreError
from .log import Scan, log_files, referred, scan
from .nodes import Node
from .sealed import Damage, make_folder, sync_folder
from .spill import Spill, damages, folder_name
from .store import SNAPSHOT, VERSION, in_use, new_id, take_lock
from .transcript import State, Transcript

TITLE = 60  # characters
_DELETED = ".deleted-"


@dataclass(frozen=True)
class Summary:
    """A conversation in a list. `id`: the name of its folder; `nodes`, `tokens`: of its surface; `changed`: seconds
    since the epoch; `damage`: what keeps some of it, or all, from being read."""

    id: str
    path: Path
    title: str
    nodes: int
    tokens: int
    changed: float
    snapshot_bytes: int
    damage: Damage | None
    in_use: bool


def data_home() -> Path:
    """The folder of conversations: $DS4_HOME/conversations, else ds4/conversations in the XDG data folder. It may not
    exist yet."""
    chosen = os.environ.get("DS4_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute() / "conversations"
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share") / "ds4" / "conversations"


def new_path() -> Path:
    """Where a new conversation of this user belongs. The folder of conversations is made, for its owner only."""
    root = data_home()
    root.parent.mkdir(parents=True, exist_ok=True)
    make_folder(root)
    return root / new_id()


def conversations(root: Path | None = None) -> list[Summary]:
    """All conversations in a folder, the one that was changed last first. One that cannot be opened is there, too."""
    root = root if root is not None else data_home()
    found = [_summary(path) for path in _folders(root)]
    return sorted(found, key=lambda one: (-one.changed, one.id))


def find(name: str, root: Path | None = None) -> Path:
    """The conversation whose folder has this name, or the only one whose name begins so. Raises ArgumentError."""
    root = root if root is not None else data_home()
    names = [path.name for path in _folders(root)]
    matching = [name] if name in names else sorted(n for n in names if name and n.startswith(name))
    if len(matching) == 1:
        return root / matching[0]
    if matching:
        raise ArgumentError(f"{len(matching)} conversations begin with {name!r}: {_listed(matching)}; give more of it.")
    raise ArgumentError(f"there is no conversation {name[:200]!r} in {root}; `ds4 sessions list` shows all.")


def _folders(root: Path) -> list[Path]:
    """Folders of conversations in a folder; links and foreign ones are left out."""
    try:
        entries = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [Path(entry.path) for entry in entries if not entry.name.startswith(".")]
    return sorted(path for path in paths if log_files(path))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(frozen=True)
class Read:
    """A conversation as it lies on disk: what its log leads to, and what is wrong with the log."""

    path: Path
    state: State
    scan: Scan

    @property
    def damage(self) -> Damage | None:
        """What keeps some of it, or all, from being read."""
        empty = not self.state.seq and self.scan.live is None
        return Damage(log_files(self.path)[0], 1, "there is nothing in it") if empty else self.scan.live

    @property
    def title(self) -> str:
        """The first line of the first human message, cut."""
        first = next((node.text for _, node in sorted(self.state.nodes.items()) if node.human), "")
        line = " ".join(first.split())
        return line if len(line) <= TITLE else line[: TITLE - 3] + "..."

    @property
    def spill(self) -> Spill:
        """Its spill, for reading."""
        found = Spill(self.path / "spill" / folder_name(self.state.id))
        found.origins.update(self.state.origins)
        return found


def read(path: Path) -> Read:
    """Reads the conversation in a folder as far as it can be read. Raises StoreError when there is none at all."""
    if not log_files(path):
        raise StoreError(f"{path} holds no conversation.")
    found, state = scan(path), State()
    fault = state.apply_all(found.events)
    if fault is not None:
        found.cut(state.seq, fault)
    elif found.events and found.events[0].get("version") != VERSION:
        raise StoreError(f"{path} was written by another version of ds4: this one reads version {VERSION}.")
    return Read(path, state, found)


def info(path: Path) -> dict[str, Any]:
    """What the conversation in a folder was made with. Raises StoreError when its log cannot tell."""
    one = read(path)
    if one.state.seq == 0:
        raise StoreError(f"{path} cannot be opened: {one.damage}.")
    return one.state.info


def _summary(path: Path) -> Summary:
    nodes = tokens = 0
    title, changed, snapshot_bytes = "", 0.0, 0
    try:
        one = read(path)
        title, nodes, tokens, damage = one.title, len(one.state.surface), one.state.size, one.damage
    except StoreError as error:
        damage = Damage(log_files(path)[0], 1, str(error))
    with suppress(OSError):
        changed = max((path / name).lstat().st_mtime for name in log_files(path))
    with suppress(OSError):
        snapshot_bytes = (path / SNAPSHOT).lstat().st_size
    return Summary(path.name, path, title, nodes, tokens, changed, snapshot_bytes, damage, in_use(path))


def history(of: State | Transcript) -> list[tuple[Node, bool]]:
    """Every node of the present line of history as it first came, and whether it is on the surface."""
    there = {node.number for node in of.surface}
    return [(node, node.number in there) for node in of.history()]


def verify(path: Path) -> list[Damage]:
    """What is wrong with the files of a conversation: its log, also where a later file goes on behind the damage, its
    spill and its snapshot, by file and line. Raises StoreError when there is none."""
    busy = in_use(path)
    one = read(path)
    found = list(one.scan.damages) or [damage for damage in (one.damage,) if damage is not None]
    last = log_files(path)[-1]
    if busy and found and found[-1].file == last and found[-1].cut:
        found.pop()  # its writer is in the middle of that line
    spills = {folder_name(one.state.id): referred(one.scan.events)} if one.state.seq else {}
    for name, numbers in spills.items() or ((entry.name, {}) for entry in (path / "spill").glob("session-*")):
        for damage in damages(path / "spill" / name, numbers):
            found.append(Damage(f"spill/{name}/{damage.file}", damage.line, damage.what))
    snapshot = path / SNAPSHOT
    if os.path.lexists(snapshot) and (fault := snapshot_check.fault(snapshot)) is not None:
        found.append(Damage(SNAPSHOT, 0, fault))
    return found


def delete(path: Path) -> None:
    """Removes a conversation with all its files. Raises StoreBusy while a process has it open, StoreError when there is
    none, OSError when the system refuses."""
    if path.is_symlink() or not log_files(path):
        raise StoreError(f"{path} holds no conversation.")
    lock, refused = take_lock(path)
    try:
        if refused is not None:
            raise refused
        gone = path.parent / f"{_DELETED}{secrets.token_hex(6)}"
        os.rename(path, gone)  # at once: a half-deleted conversation is never listed
        sync_folder(path.parent)
        shutil.rmtree(gone)
        for entry in os.scandir(path.parent):  # what an earlier call could not finish
            if entry.name.startswith(_DELETED) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)
