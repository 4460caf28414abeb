"""Other engines beside ours: each in a process of its own (`bench_worker.py`), stopped while it is not its turn."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error, UnsupportedError

PACKAGES = {"llama.cpp": ("llama_cpp", "llama-cpp-python"), "ik_llama.cpp": ("ik_llama_cpp", "ik-llama-cpp-python")}
TESTS = ("pp", "tg", "truncate")  # what a peer can be measured with
_WORKER = Path(__file__).with_name("bench_worker.py")
_TAIL = 300


class Refused(Ds4Error):
    """The peer has no way to do what a test asks for."""


def require(name: str) -> None:
    """Raises UnsupportedError when the peer's package is not installed."""
    module, package = PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        raise UnsupportedError(f"--vs {name} needs its Python package: pip install {package}")


class Peer:
    """A peer that has the model open. A context manager; the end of the block ends the process.

    SIGSTOP, not a wait policy of OpenMP: a policy that lets its threads sleep at once would also slow it down while it
    is measured.
    """

    def __init__(self, name: str) -> None:
        require(name)
        self.name = name
        self.version = ""
        self.settings: list[str] = []
        self._errors = tempfile.TemporaryFile()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=environment,
        )  # fmt: skip

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()  # a stopped process, too
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with suppress(OSError):  # a request that it has not read
                stream.close()

    def open(self, path: Path, tokens: Sequence[int], threads: int, ctx: int, kv_dtype: str) -> None:
        """Loads a GGUF file; `tokens` are those of all runs. Raises Ds4Error with what the peer says."""
        answer = self._ask(
            do="open", path=os.fspath(path), tokens=list(tokens), threads=threads, ctx=ctx, kv_dtype=kv_dtype
        )
        self.version, self.settings = answer["version"], answer["settings"]

    def run(self, test: str, size: int, depth: int, setting: int) -> tuple[float, int | None]:
        """(seconds, the most likely next token where the test computes one). Raises Refused."""
        answer = self._ask(do="run", test=test, size=size, depth=depth, setting=setting)
        if "refused" in answer:
            raise Refused(f"{self.name}: {answer['refused']}")
        return answer["seconds"], answer.get("top")

    def _ask(self, **request: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.send_signal(signal.SIGCONT)
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise Ds4Error(f"{self.name} has ended by itself: {self._last_words()}")
        process.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # it has stopped, or ended, before this goes on
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Ds4Error(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL))
        return self._errors.read().decode("utf-8", "replace").strip() or "it has said nothing"
