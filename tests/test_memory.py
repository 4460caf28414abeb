"""Memory and CPUs that a process may use, on made-up /proc and /sys trees."""

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


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw master:3 - cgroup cgroup rw,memory\n"
)
V1_GROUPS = "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n0::/\n"


def test_without_groups(tmp_path):
    assert 0 < usable_memory(tmp_path) <= PHYSICAL
    assert usable_cpus(tmp_path) == CPUS


def test_v2_takes_the_least_of_the_group_and_its_parents(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mountinfo": V2,
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "1073741824\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
    }
    tree(tmp_path, files)
    assert usable_memory(tmp_path) == GB
    assert usable_cpus(tmp_path) == 1


@pytest.mark.skipif(CPUS < 2, reason="a quota above one CPU shows only with two")
def test_a_quota_is_rounded_up(tmp_path):
    tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": "100001 100000"})
    assert usable_cpus(tmp_path) == 2


@pytest.mark.parametrize("root", ["/", "/docker/a"])
def test_v1_on_the_host_and_inside_a_container(tmp_path, root):
    inside = "docker/a/" if root == "/" else ""
    files = {
        "proc/self/cgroup": V1_GROUPS,
        "proc/self/mountinfo": V1.format(root=root),
        f"sys/fs/cgroup/memory/{inside}memory.limit_in_bytes": "2147483648\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    tree(tmp_path, files)
    assert usable_memory(tmp_path) == min(2 * GB, PHYSICAL)
    assert usable_cpus(tmp_path) == 1


def test_odd_trees_limit_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/../../elsewhere\n",
        "proc/self/mountinfo": V2,
        "sys/fs/cgroup/memory.max": "what\n",
        "sys/fs/cgroup/cpu.max": "0 0\n",
    }
    tree(tmp_path, files)
    assert usable_memory(tmp_path) == usable_memory(tmp_path / "none")
    assert usable_cpus(tmp_path) == CPUS


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
