"""A warm decode step takes no memory from the system and gives none back: what it works in belongs to the engine.

A child process counts the calls of malloc, free and their kin that come from the core, by the address of the caller.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nosanitize,  # the sanitizers replace the same functions
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD and glibc"),
]
HERE = Path(__file__).parent
CC = shlex.split(os.environ.get("CC", "cc"))

COUNTER = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
void __libc_free(void *);
static uintptr_t low, high;
static unsigned long seen;
uintptr_t last_caller;
void count_between(uintptr_t from, uintptr_t to) { low = from, high = to; }
unsigned long count_seen(void) { return __atomic_exchange_n(&seen, 0, __ATOMIC_SEQ_CST); }
static void look(void *caller) {
  if ((uintptr_t)caller < low || (uintptr_t)caller >= high) return;
  __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
  last_caller = (uintptr_t)caller - low;
}
#define LOOK look(__builtin_return_address(0))
void *malloc(size_t n) { LOOK; return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { LOOK; return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { LOOK; return __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n) { LOOK; return __libc_memalign(a, n); }
void free(void *p) { if (p) LOOK; __libc_free(p); }
void *mmap(void *p, size_t n, int prot, int flags, int fd, off_t at) {
  LOOK; return (void *)syscall(SYS_mmap, p, n, prot, flags, fd, at);
}
int munmap(void *p, size_t n) { LOOK; return (int)syscall(SYS_munmap, p, n); }
"""

CHILD = """
import ctypes, re, sys
from oracle import make_engine, some_tokens
from ds4 import sampling
from ds4.core import ffi, lib, os
from ds4.errors import ArgumentError

counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
counter.count_between.argtypes = [ctypes.c_size_t] * 2
core = [line.split()[0].split("-") for line in open("/proc/self/maps") if "/ds4/_core" in line]
counter.count_between(min(int(a, 16) for a, _ in core), max(int(b, 16) for _, b in core))

def seen():
    return counter.count_seen()

def where():
    return hex(ctypes.c_size_t.in_dll(counter, "last_caller").value)

toy, kv_dtype, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = make_engine(toy=toy, kv_dtype=kv_dtype, threads=2)
sessions = [engine.session() for _ in range(n)]
prompt = some_tokens(70)
for s in sessions:
    s.eval(prompt)
options = sampling.Sampling(temperature=0.8, top_p=0.9, repetition=1.1, seed=5, logit_bias={3: 1.0})
scratch = sampling.np.empty(sampling.SCRATCH * engine.vocab, "u1")
bad = []
for step in range(150):
    pages = engine.ledger()["pages_used"]
    seen()
    if n == 1:
        sessions[0].eval([step % 512])
        sampling.sample(sessions[0].logits, options, prompt, 70 + step, scratch=scratch)
    else:
        engine.eval_batch([(s, [step % 512]) for s in sessions])
    count = seen()
    # the first steps warm up; with a new page may come memory for it, and tables and logs that grow
    if count and step > 2 and engine.ledger()["pages_used"] == pages:
        bad.append((70 + step, count, where()))
# a refused call takes nothing, however many segments it has
seen()
try:
    engine.eval_batch([(sessions[0], [1])] * 10_000)
except ArgumentError:
    assert not seen(), where()
else:
    raise AssertionError("one session twice in a batch")
# the count counts: a session's first page
with engine.session() as fresh:
    seen()
    fresh.eval(prompt)
    assert seen() > 0, "nothing is counted"
print(bad)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    if shutil.which(CC[0]) is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTER)
    command = [*CC, "-O1", "-shared", "-fPIC", "-o", "counter.so", "counter.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this C library has no __libc_malloc: {done.stderr[:200]}")
    return folder / "counter.so"


CASES = [
    ("plain", "f32"),
    ("plain", "f16"),
    ("plain", "q8_0"),
    ("both", "f16"),
    ("wide", "f16"),
    ("gemma3", "f16"),
    ("qwen3_moe", "f16"),
    ("deepseek_v4", "f16"),
    ("deepseek_v4", "q8_0"),
]


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize(("toy", "kv_dtype"), CASES)
def test_a_warm_decode_step_takes_no_memory(counter, toy, kv_dtype, sessions):
    if toy in ("both", "wide") and os.environ.get("DS4_CORE") != "test":
        pytest.skip("needs the test build of the core: DS4_CORE=test")
    env = os.environ | {"LD_PRELOAD": str(counter), "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    arguments = [sys.executable, "-c", CHILD, toy, kv_dtype, str(sessions)]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", "calls of malloc and free in decode steps: (position, calls, from where)"
