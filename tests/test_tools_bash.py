"""The tools `bash` and `job`: limits, what is killed when, and background jobs."""

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4.agent import bash
from ds4.agent.bash import Jobs, Output, bash_tools
from ds4.agent.sandbox import Root
from ds4.agent.tools import Result, Toolbox
from ds4.chat_formats.base import ToolCall

LONG = 300  # seconds that nothing here may take


class Shell:
    """The two tools in a folder."""

    def __init__(self, folder: Path, limit: int = 16_000) -> None:
        self.folder = folder
        self.jobs = Jobs(Root(folder), limit)
        self.box = Toolbox(bash_tools(self.jobs))
        self.cancel = threading.Event()

    def run(self, command: str, **arguments: Any) -> Result:
        return self.box.call(ToolCall("bash", {"command": command, **arguments}), self.cancel)

    def job(self, id: int, **arguments: Any) -> Result:
        return self.box.call(ToolCall("job", {"id": id, **arguments}))

    def pid(self, name: str = "pid") -> int:
        """The process that has written its number to a file."""
        return int(wait_for(lambda: (self.folder / name).exists() and (self.folder / name).read_text().strip()))


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def is_gone(pid: int) -> bool:
    """A killed orphan may stay a zombie where nobody reaps orphans."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    one = Shell(tmp_path)
    yield one
    one.jobs.close()


# -- results


def test_the_first_line_is_the_exit_code(shell: Shell) -> None:
    assert shell.run("echo out; echo err >&2") == Result("exit code 0\nout\nerr")
    assert shell.run("exit 3") == Result("exit code 3")
    assert shell.run("kill -9 $$") == Result("exit code 137")
    assert shell.run("no_such_command_at_all").text.startswith("exit code 127\n")
    assert shell.run("printf 'a\\xff\\xc3b'") == Result("exit code 0\na\ufffd\ufffdb")


def test_it_runs_in_the_root_with_nothing_to_read_and_a_bare_environment(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    text = shell.run("pwd; cat; env").text
    assert text.splitlines()[1] == os.path.realpath(shell.folder)
    names = set(re.findall(r"^(\w+)=", text, re.M))
    assert {"PATH", "HOME", "LANG", "TERM"} <= names <= {"PATH", "HOME", "LANG", "TERM", "PWD", "SHLVL", "_", "OLDPWD"}
    assert "TERM=dumb" in text


def test_wrong_arguments(shell: Shell) -> None:
    for seconds in (0, -1, 601, "long"):
        result = shell.run("echo", seconds=seconds)
        assert result.failed and "seconds" in result.text
    assert shell.run("echo \0").failed
    assert shell.run("echo " + "x" * 10_000_000).failed
    assert shell.job(7) == Result("job failed: there is no job 7; jobs are: none.", failed=True)


def test_a_root_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    shell = Shell(tmp_path / "r")
    (tmp_path / "r").rmdir()
    assert shell.run("echo").failed


# -- output


def test_output_keeps_head_and_tail_of_any_pieces() -> None:
    text = "".join(f"é{i:05}\n" for i in range(1000))
    for size in (1, 7, 64, 5000, 100_000):
        output = Output(100)
        data = text.encode()
        for at in range(0, len(data), size):
            output.add(data[at : at + size])
        head, left_out, tail = (
            output.text().split("\n[... ")[0],
            output.text(),
            output.text().split(" left out ...]\n")[1],
        )
        assert text.startswith(head) and 48 <= len(head.encode()) <= 50
        assert text.endswith(tail) and 48 <= len(tail.encode()) <= 50
        assert "[... 7.9 kB left out ...]" in left_out
    for length in (0, 1, 50, 51, 99, 100):
        output = Output(100)
        output.add(b"x" * length)
        assert output.text() == "x" * length


@pytest.mark.slow
@pytest.mark.nosanitize
def test_a_gigabyte_of_output_takes_no_memory(shell: Shell) -> None:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = shell.run("yes | head -c 1000000000; echo; echo the end", seconds=LONG).text
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 30_000_000
    assert (
        text.startswith("exit code 0\ny\ny\n") and text.endswith("y\n\nthe end") and "[... 1 GB left out ...]" in text
    )
    assert len(text) < 17_000


def test_endless_output_ends_with_the_time(shell: Shell) -> None:
    result = shell.run("yes", seconds=0.3)
    assert result.failed and result.text.startswith("killed after 0.3 s\ny\n")


# -- what is killed


def test_the_time_limit_kills_the_whole_group(shell: Shell) -> None:
    result = shell.run(f"echo before; (echo $BASHPID > pid; exec sleep {LONG}) & sleep {LONG}", seconds=1.5)
    assert result.failed and result.text.startswith("killed after 1.5 s\n") and result.text.endswith("before")
    assert wait_for(lambda: is_gone(shell.pid()))


def test_a_command_may_clean_up(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash, "GRACE", 60)
    shell.run(f"trap 'echo cleaned; exit 7' TERM; echo $$ > pid; sleep {LONG} & wait", background=True)
    shell.pid()
    assert shell.job(1, action="stop").text == "job 1: exit code 7\ncleaned"


@pytest.mark.parametrize("trick", ["trap '' TERM INT HUP; echo $$ > pid", "echo $$ > pid; kill -STOP $$"])
def test_a_command_cannot_refuse_to_end(shell: Shell, trick: str) -> None:
    shell.run(f"{trick}; sleep {LONG}; sleep {LONG}", background=True)
    shell.pid()
    assert shell.job(1, action="stop").text == "job 1: exit code 137"
    assert wait_for(lambda: is_gone(shell.pid()))


def test_what_holds_the_pipe_open_neither_hangs_nor_survives(shell: Shell) -> None:
    result = shell.run(f"(echo $BASHPID > pid; exec sleep {LONG}) & while [ ! -s pid ]; do :; done; echo started")
    assert result.text == "exit code 0\n(processes that it left running were killed; use background for them)\nstarted"
    assert wait_for(lambda: is_gone(shell.pid()))
    assert shell.run("yes & exit 4").text.startswith("exit code 4\n")  # one that never stops writing
    shell.run(f"(echo $BASHPID > quiet; exec sleep {LONG}) > /dev/null 2>&1 & while [ ! -s quiet ]; do :; done")
    assert wait_for(lambda: is_gone(shell.pid("quiet")))


def test_a_daemon_that_holds_the_pipe_does_not_hang_the_call(shell: Shell) -> None:
    program = "import os, sys, time; os.setsid(); open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
    result = shell.run(f'{sys.executable} -c "{program}" & while [ ! -s pid ]; do :; done; echo over')
    try:
        assert result.text.startswith("exit code 0\n") and result.text.endswith("over")
    finally:
        os.kill(shell.pid(), signal.SIGKILL)


def test_output_closed_early_is_no_end(shell: Shell) -> None:
    assert shell.run("exec >&- 2>&-; sleep 0.3; exit 5") == Result("exit code 5")
    assert shell.run(f"exec >&- 2>&-; sleep {LONG}", seconds=0.3).text == "killed after 0.3 s"


def test_a_cancel_kills_the_command_and_its_children(shell: Shell) -> None:
    def cancel() -> None:
        shell.pid()
        shell.cancel.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    result = shell.run(f"trap '' TERM; echo some; (echo $BASHPID > pid; sleep {LONG}) & sleep {LONG}", seconds=LONG)
    thread.join()
    assert result.failed and re.fullmatch(r"cancelled by the user after \d s\n(\(.*\n)?some", result.text)
    assert wait_for(lambda: is_gone(shell.pid()))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends a signal to a thread")
def test_ctrl_c_kills_the_command_and_passes(shell: Shell) -> None:
    main = threading.get_ident()

    def press() -> None:
        shell.pid()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shell.run(f"echo $$ > pid; sleep {LONG}", seconds=LONG)
    thread.join()
    assert wait_for(lambda: is_gone(shell.pid()))


def test_a_job_that_was_killed_first_does_not_begin(shell: Shell) -> None:
    job = shell.jobs.new("touch begun")
    job._signal(signal.SIGKILL)
    job.start()
    assert job.ended.is_set() and not (shell.folder / "begun").exists()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends a signal to a thread")
@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_while_a_command_starts(shell: Shell, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    main, start = threading.get_ident(), subprocess.Popen

    def slow_start(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        shell.pid()
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        return process

    monkeypatch.setattr(subprocess, "Popen", slow_start)
    with pytest.raises(KeyboardInterrupt):
        shell.run(f"echo $$ > pid; sleep {LONG}", background=background)
    assert wait_for(lambda: is_gone(shell.pid()))


def test_without_waitid_and_with_sigchld_ignored(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert shell.run("echo a").text == "exit code 0\na"  # the system takes the code: 0 as in subprocess
    finally:
        signal.signal(signal.SIGCHLD, before)
    monkeypatch.delattr(os, "waitid", raising=False)
    assert shell.run("echo a; exit 2").text == "exit code 2\na"
    assert shell.run("exec >&-  2>&-; exit 3").text == "exit code 3"


def test_descriptors_and_threads_are_given_back(shell: Shell) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/dev/fd")), threading.active_count()

    shell.run("echo")
    before = wait_for(held)
    for _ in range(5):
        shell.run("echo")
    wait_for(lambda: held() <= before)


# -- background jobs


def test_a_job_runs_on_and_is_read_and_stopped(shell: Shell) -> None:
    started = shell.run(f"echo one; echo $$ > pid; sleep {LONG}", background=True)
    assert started == Result("running as job 1")
    wait_for(lambda: "one" in shell.job(1).text)
    assert re.fullmatch(r"job 1: running for \d+ s\none", shell.job(1).text)
    assert re.fullmatch(rf"job 1: running for \d+ s: echo one; .*sleep {LONG}", shell.job(1, action="status").text)
    assert shell.job(1, action="stop").text == "job 1: exit code 143\none"
    assert is_gone(shell.pid())
    assert "one of" in shell.job(1, action="kill").text
    assert shell.job(2).text.endswith("jobs are: 1.")


def test_a_job_that_ends_at_once_says_so(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash, "EARLY", 60)
    assert shell.run("echo no; exit 2", background=True) == Result("exit code 2\nno")
    assert shell.jobs.note() is None


def test_the_note_restates_what_the_model_must_know(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell.jobs.note() is None
    shell.run(f"sleep {LONG}\n" + "# " + "x" * 500, background=True)
    monkeypatch.setattr(bash, "EARLY", 0)
    shell.run("until [ -e go ]; do sleep 0.02; done; exit 1", background=True)
    (shell.folder / "go").touch()
    wait_for(lambda: shell.jobs.running() == [1])
    note = shell.jobs.note()
    assert note is not None and len(note) < 300 and "\n" not in note
    assert re.match(
        rf"Background jobs: job 1 \(running for \d s\): sleep {LONG}\\n# x+\.\.\.; job 2 \(exit code 1\): until",
        note,
    )
    shell.job(2)
    assert "job 2" not in (shell.jobs.note() or "")
    shell.job(1, action="stop")
    assert shell.jobs.note() is None


def test_too_many_jobs_are_refused_and_old_ones_forgotten(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bash, "MAX_JOBS", 2)
    monkeypatch.setattr(bash, "KEPT", 2)
    monkeypatch.setattr(bash, "EARLY", 0)
    for _ in range(2):
        assert not shell.run(f"sleep {LONG}", background=True).failed
    assert "2 jobs run already (1, 2)" in shell.run("echo", background=True).text
    shell.job(2, action="stop")
    for number in range(3, 8):
        assert shell.run("while [ ! -e go ]; do sleep 0.02; done", background=True).text == f"running as job {number}"
        (shell.folder / "go").touch()
        wait_for(lambda: shell.jobs.running() == [1])
        (shell.folder / "go").unlink()
    assert shell.job(2).failed and not shell.job(1).failed and shell.job(7).text == "job 7: exit code 0"


def test_a_job_writes_for_ever_in_bounded_memory(tmp_path: Path) -> None:
    shell = Shell(tmp_path, limit=1000)
    shell.run("yes", background=True)
    wait_for(lambda: "left out" in shell.job(1).text)
    assert len(shell.job(1).text) < 1200
    shell.jobs.close()


@pytest.mark.parametrize("way", ["close", "dropped"])
def test_the_end_of_the_agent_kills_its_jobs(tmp_path: Path, way: str) -> None:
    shell = Shell(tmp_path)
    shell.run(f"echo $$ > pid; trap '' TERM; sleep {LONG}; sleep {LONG}", background=True)
    pid = shell.pid()
    if way == "close":
        shell.jobs.close()
        assert shell.job(1).failed
    else:
        del shell
        gc.collect()
    assert wait_for(lambda: is_gone(pid))
