"""What the machine can do: bytes read and multiply-adds a second, bytes written durably. What a figure of `ds4 bench`
is compared with."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds4.memory import size_text, usable_cpus

if TYPE_CHECKING:
    from ds4.cli.output import Output

READ = 1 << 30  # bytes that are read to measure memory
PASSES = 4
_PART = 1 << 25
_SQUARE, _PRODUCTS = 1024, 6


@dataclass(frozen=True)
class Roofs:
    """What the machine can do: bytes read and float32 multiply-adds, each a second."""

    threads: int
    read: float
    macs: float


def measure_roofs(threads: int, out: Output) -> Roofs:
    """The best of a few passes: `threads` threads read a gigabyte that no cache holds (numpy's maximum of bytes); a
    product of float32 matrices by numpy, whose library uses all CPUs."""
    memory = np.ones(READ, np.uint8)
    parts = [memory[i : i + _PART] for i in range(0, READ, _PART)]
    steps, read = 0, 0.0
    with out.progress("reading memory, multiplying", "steps", phase="roofs") as report:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(PASSES):
                start = time.perf_counter()
                for _ in pool.map(np.max, parts):
                    steps += 1
                    report(steps, PASSES * len(parts) + _PRODUCTS)
                read = max(read, READ / (time.perf_counter() - start))
        macs, square = 0.0, np.ones((_SQUARE, _SQUARE), np.float32)
        for i in range(_PRODUCTS):
            start = time.perf_counter()
            square @ square
            macs = max(macs, _SQUARE**3 / (time.perf_counter() - start))
            report(steps + i + 1, steps + _PRODUCTS)
    return Roofs(threads, read, macs * min(1.0, threads / usable_cpus()))


def roofs_text(roofs: Roofs) -> str:
    """How the roofs were measured, and what was found."""
    return (
        f"bandwidth: {size_text(roofs.read)}/s, {roofs.threads} threads reading {size_text(READ)} (numpy's maximum "
        f"of bytes, best of {PASSES}); multiply-adds: {roofs.macs / 1e9:.3g} G/s (numpy's float32 product)"
    )


def write_durably(path: Path, data: bytes) -> None:
    """The least that a durable file costs: write, fsync, and fsync of the folder for its name."""
    with open(path, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def machine() -> str:
    """The processor's name where the system tells it, and the CPUs this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {usable_cpus()} CPUs"


def busy(load: float) -> list[str]:
    """A sentence when others compute on this machine, too. `load`: from before anything was measured."""
    cpus = usable_cpus()
    if load <= cpus / 2:
        return []
    return [
        f"others compute on this machine (load {load:.1f} on {cpus} CPUs): figures will be low, and those of engines "
        "whose threads spin lowest; measure on a quiet one"
    ]
