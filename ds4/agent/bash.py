"""The tools `bash` and `job`: shell commands in the root folder, with a time limit, capped output, background jobs.

Each command leads a session and process group of its own. When it ends, whatever it has left in the group is killed,
so that nothing runs unseen; what shall outlive the call is a background job. A process that makes itself a session of
its own (a daemon) is out of reach.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
import weakref
from typing import Literal

from ds4.agent.sandbox import Root
from ds4.agent.tools import Result, Tool, tool, visible
from ds4.errors import ArgumentError
from ds4.memory import size_text

POLL = 0.05  # seconds between two looks at the cancel event and the clock
GRACE = 0.5  # seconds that a command has to end after SIGTERM
DRAIN = 0.25  # seconds that output is waited for when a command has ended, but not the processes it started
EARLY = 0.2  # seconds in which a background job that fails at once is told as a result
MAX_SECONDS = 600
MAX_JOBS = 8
KEPT = 16  # jobs that have ended whose output can still be read


class Output:
    """The head and the tail of a stream, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        """The next piece."""
        with self._lock:
            self._size += len(data)
            room = max(0, self._half - len(self._head))
            self._head += data[:room]
            self._tail += data[room:]
            del self._tail[: -self._half]

    def text(self) -> str:
        """As text, with a line that says what is left out between head and tail."""
        with self._lock:
            head, tail = bytes(self._head), bytes(self._tail)
            left_out = self._size - len(head) - len(tail)
        if not left_out:
            return (head + tail).decode("utf-8", "replace")
        # both cuts may lie inside a character
        before = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
        after = tail.lstrip(bytes(range(0x80, 0xC0))).decode("utf-8", "replace")
        return f"{before}\n[... {size_text(left_out)} left out ...]\n{after}"


class Job:
    """A command. A thread of its own starts it, reads its output and notices its end: Ctrl-C cannot come between the
    start and the moment from which the command can be killed, for it only interrupts the main thread."""

    def __init__(self, command: str, folder: str, limit: int) -> None:
        self.command = command
        self.output = Output(limit)
        self.ended = threading.Event()
        self.code: int | None = None
        """Exit code, 128 + n after signal n; None while it runs."""
        self.left_behind = False
        """Whether processes that it had started were still there at its end."""
        self.told = False
        """Whether the model knows that it has ended."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self._begun = threading.Event()
        self._unwanted = False  # it was killed before it began
        self._start, self._seconds = time.monotonic(), 0.0
        # held to start, signal and reap: a number is signalled only while it is surely ours
        self._lock = threading.Lock()

    def start(self) -> None:
        """Runs it. Raises what kept it from starting."""
        threading.Thread(target=self._run, daemon=True).start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    @property
    def seconds(self) -> float:
        """Since it began, or how long it took."""
        return self._seconds if self.ended.is_set() else time.monotonic() - self._start

    def state(self) -> str:
        """As in "running for 3 s" or "exit code 0"."""
        if not self.ended.is_set():
            return f"running for {self.seconds:.0f} s"
        return f"exit code {self.code}"

    def kill(self) -> None:
        """Kills it with all its processes, at once."""
        self._signal(signal.SIGKILL)
        self.ended.wait(2 * GRACE)

    def stop(self) -> None:
        """Asks it to end, and kills it when it does not."""
        self._signal(signal.SIGTERM)
        if not self.ended.wait(GRACE):
            self.kill()

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._process is None:
                self._unwanted = True
            elif self.code is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def _run(self) -> None:
        try:
            with self._lock:
                if self._unwanted:
                    self.ended.set()
                    return
                self._process = subprocess.Popen(
                    [shutil.which("bash") or "/bin/sh", "-c", self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=_environment(),
                    start_new_session=True,
                )
        except Exception as error:
            self._error = error
            self.ended.set()
        finally:
            self._begun.set()
        if self._process is not None:
            self._follow(self._process)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe, selectors.DefaultSelector() as selector:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
            is_open = True
            while is_open and not _has_exited(process):
                is_open = self._read(pipe.fileno(), selector)
            if not is_open:
                _has_exited(process, wait=True)
            is_open = is_open and self._drain(pipe.fileno(), selector)
            self.left_behind = is_open
            with self._lock:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                self.code = code if code >= 0 else 128 - code
            if is_open:  # what is still in the pipe; a daemon may hold it open for ever
                self._drain(pipe.fileno(), selector)
        self._seconds = time.monotonic() - self._start
        self.ended.set()

    def _drain(self, fd: int, selector: selectors.BaseSelector) -> bool:
        """Takes what comes within a moment; whether more may come."""
        end, is_open = time.monotonic() + DRAIN, True
        while is_open and time.monotonic() < end:
            is_open = self._read(fd, selector)
        return is_open

    def _read(self, fd: int, selector: selectors.BaseSelector) -> bool:
        """Takes a piece when one comes soon; whether more may come."""
        if not selector.select(POLL):
            return True
        data = os.read(fd, 1 << 16)
        self.output.add(data)
        return bool(data)


def _has_exited(process: subprocess.Popen[bytes], wait: bool = False) -> bool:
    """Whether a command is over. It is not reaped yet: its number stays taken, and so does that of its group."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: the number may be given anew, in theory
        if wait:
            process.wait()
        return process.poll() is not None
    options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
    try:
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:  # the program ignores SIGCHLD
        return True


class Jobs:
    """The background jobs of one agent. `close` kills them; so does the end of the program."""

    def __init__(self, root: Root, limit: int = 16_000) -> None:
        """`limit`: bytes of output kept of each command."""
        self.root = root
        self._limit = limit
        self._jobs: dict[int, Job] = {}
        self._next = 1
        self._close = weakref.finalize(self, _kill_all, self._jobs)

    def new(self, command: str) -> Job:
        """A job that is neither started nor in the list."""
        return Job(command, self.root.path, self._limit)

    def keep(self, job: Job) -> int:
        """Puts a job in the list and returns its number; the oldest that have ended are forgotten."""
        ended = [number for number, one in self._jobs.items() if one.ended.is_set()]
        for number in ended[:-KEPT]:
            del self._jobs[number]
        number, self._next = self._next, self._next + 1
        self._jobs[number] = job
        return number

    def running(self) -> list[int]:
        """Numbers of the jobs that run."""
        return [number for number, job in self._jobs.items() if not job.ended.is_set()]

    def get(self, number: int) -> Job:
        """A job by its number. Raises ArgumentError."""
        if number not in self._jobs:
            known = ", ".join(map(str, self._jobs)) or "none"
            raise ArgumentError(f"there is no job {number}; jobs are: {known}.")
        return self._jobs[number]

    def note(self) -> str | None:
        """One paragraph that restates what the model has to know of its jobs when a compaction has dropped it: those
        that run, and those whose end it has not seen. None without any."""
        lines = [
            f"job {number} ({job.state()}): {_one_line(job.command)}"
            for number, job in self._jobs.items()
            if not job.told
        ]
        if not lines:
            return None
        return f"Background jobs: {'; '.join(lines)}. The tool job shows their output or stops them."

    def close(self) -> None:
        """Kills all that run. Afterwards there are no jobs; new ones can be started."""
        _kill_all(self._jobs)
        self._jobs.clear()


def _kill_all(jobs: dict[int, Job]) -> None:
    for job in jobs.values():
        job.kill()


def bash_tools(jobs: Jobs, seconds: float = 60) -> list[Tool]:
    """The tools `bash` and `job`. `seconds`: time limit of a command that names none."""

    def bash(command: str, cancel: threading.Event, seconds: float = seconds, background: bool = False) -> Result:
        """Run a shell command. Its output comes back when it ends.

        seconds: time limit
        background: go on without waiting; see the tool job
        """
        if not 0 < seconds <= MAX_SECONDS:
            raise ArgumentError(f"seconds is at most {MAX_SECONDS}; use background for what takes longer.")
        if background:
            return _in_background(jobs, command)
        job = jobs.new(command)
        try:
            job.start()
            while not job.ended.wait(POLL):
                if cancel.is_set():
                    job.kill()
                    return Result(_text(f"cancelled by the user after {job.seconds:.0f} s", job), failed=True)
                if job.seconds > seconds:
                    job.stop()
                    return Result(_text(f"killed after {seconds:g} s", job), failed=True)
        except BaseException:
            job.kill()
            raise
        return Result(_text(job.state(), job))

    def job(id: int, action: Literal["output", "status", "stop"] = "output") -> str:
        """Output or state of a background job, or stop it."""
        found = jobs.get(id)
        if action == "stop":
            found.stop()
        found.told = found.ended.is_set()
        first = f"job {id}: {found.state()}"
        return f"{first}: {_one_line(found.command)}" if action == "status" else _text(first, found)

    return [tool(bash, needs_permission=True, describe=_describe), tool(job)]


def _in_background(jobs: Jobs, command: str) -> Result:
    running = jobs.running()
    if len(running) >= MAX_JOBS:
        raise ArgumentError(f"{MAX_JOBS} jobs run already ({', '.join(map(str, running))}); stop one first.")
    job = jobs.new(command)
    try:
        job.start()
        number = jobs.keep(job)
        has_ended = job.ended.wait(EARLY)
    except BaseException:
        job.kill()
        raise
    if has_ended:
        job.told = True
        return Result(_text(job.state(), job))
    return Result(f"running as job {number}")


def _describe(arguments: dict[str, object]) -> str:
    return f"bash{' in background' if arguments.get('background') else ''}: {arguments['command']}"


def _text(first: str, job: Job) -> str:
    note = "\n(processes that it left running were killed; use background for them)" if job.left_behind else ""
    return f"{first}{note}\n{job.output.text()}".rstrip("\n")


def _one_line(command: str) -> str:
    line = visible(command)
    return line if len(line) <= 100 else line[:97] + "..."


def _environment() -> dict[str, str]:
    """No more than a command needs: what the user's environment holds besides (keys, tokens) is not the model's."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {"PATH": os.defpath, "HOME": "/", "LANG": "C.UTF-8", **kept, "TERM": "dumb"}
