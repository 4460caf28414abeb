"""Memory and CPUs that a process may use."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.memory import size_text, usable_cpus, usable_memory

GB = 1 << 30
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def test_no_more_than_the_machine_has():
    """Control groups are tested on made-up trees in tests/c/limits.c."""
    assert 0 < usable_memory() <= PHYSICAL
    assert 0 < usable_cpus() <= CPUS


def test_rlimits_and_affinity_count():
    code = "from ds4.memory import *; print(usable_memory(), usable_cpus())"

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (GB, GB))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    cwd = Path(__file__).resolve().parent.parent
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # a sanitizer does not live with so little
    out = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limit, cwd=cwd, env=env, check=True, capture_output=True
    )
    memory, cpus = map(int, out.stdout.split())
    assert memory <= GB
    assert cpus == 1 or not hasattr(os, "sched_setaffinity")


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98.4 MB"),
        (1_500_000_000, "1.5 GB"),
        (999_600, "1 MB"),
        (5e15, "5000 TB"),
    ],
)
def test_size_text(n, text):
    assert size_text(n) == text
