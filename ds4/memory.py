"""What this process may use: memory and CPUs, after control groups (v1 and v2), limits and affinity."""

from __future__ import annotations

from .core import lib


def size_text(n: float) -> str:
    """Bytes for people: "512 B", "98.4 MB", "1.50 GB" (powers of 1000, as on file listings of models)."""
    if n < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        n /= 1000
        if n < 999.5 or unit == "TB":
            break
    return f"{n:.3g} {unit}" if n < 100 else f"{n:.0f} {unit}"


def usable_memory() -> int:
    """Bytes this process may use: the least of physical memory, its control groups' limits and its own rlimits."""
    return int(lib.ds4_usable_memory())


def usable_cpus() -> int:
    """CPUs this process may use: its affinity mask, bounded by its control groups' quotas (rounded up); at least 1."""
    return int(lib.ds4_usable_cpus())
