"""What this process may use: memory and CPUs, after control groups (v1 and v2), limits and affinity."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def size_text(n: float) -> str:
    """Bytes for people: "512 B", "98.4 MB", "1.50 GB" (powers of 1000, as on file listings of models)."""
    if n < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        n /= 1000
        if n < 999.5 or unit == "TB":
            break
    return f"{n:.3g} {unit}" if n < 100 else f"{n:.0f} {unit}"


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes this process may use: the least of physical memory, its control groups' limits and its own rlimits."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _read(folder / name)
            if value.isdecimal():
                limits.append(int(value))
    return min(limits)


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may use: its affinity mask, bounded by its control groups' quotas (rounded up); at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and all(w.isdecimal() for w in words) and int(words[1]) > 0:
            count = min(count, -(-int(words[0]) // int(words[1])))
    return max(count, 1)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and its parents, in every hierarchy that may limit `controller`.

    /proc/self/cgroup has lines `id:controllers:path` (no controllers: v2); /proc/self/mountinfo says where a hierarchy
    is mounted and which of its folders is the root of the mount: inside a container that is often the group itself.
    """
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            paths["cgroup2" if controllers == "" else "cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (after.split(" ", 2) + ["", ""])[:3]
        if kind not in paths or (kind == "cgroup" and controller not in options.split()[-1].split(",")):
            continue
        mount_root, mount = before.split(" ")[3:5]
        path = paths[kind]
        inside = path.removeprefix(mount_root.rstrip("/")) if path.startswith(mount_root) else ""
        top = root / mount.lstrip("/")
        folder = top / inside.strip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        while folder != top:
            yield folder
            folder = folder.parent
        yield top
