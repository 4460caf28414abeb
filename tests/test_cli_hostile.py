"""What a hostile folder, file or caller does to the commands: closed streams, full disks, signals, tricks with links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scenes import small_chat_model
from terminal import Terminal

from ds4 import cli, conversations
from ds4.agent.chat import Chat
from ds4.cli.output import printable
from ds4.engine import Engine
from ds4.store import Store

ROOT = Path(__file__).resolve().parent.parent
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS4_DEBUG", raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(small_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, threads=1) as engine:
        yield engine


def kept(engine, text="What is there?"):
    """A conversation of one turn on disk; its folder."""
    with Chat(engine, ctx=4096, max_tokens=2, store=conversations.new_path(), policy=None) as chat:
        chat.ask(text)
        return chat.transcript.store.path


def ds4(shell, model="", input=""):
    """`$DS4` in a shell line; exit code, stdout, stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS4": f"{sys.executable} -m ds4", "M": model}
    done = subprocess.run(["bash", "-c", shell], env=env, input=input, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


# ---- streams


def test_streams_that_the_caller_has_closed(model):
    assert ds4("$DS4 models >&-") == (0, "", "")
    code, out, err = ds4("$DS4 chat -m $M --threads 1 -n 2 --json <&-", model)
    assert (code, err) == (0, "") and '"type": "load"' in out
    code, out, err = ds4("$DS4 chat -m $M --threads 1 -n 2 >&- 2>&-", model, "hello\n")
    assert (code, out, err) == (0, "", "")
    found = conversations.conversations()
    assert [one.title for one in found] == ["hello"] and conversations.verify(found[0].path) == []


@needs_full
@pytest.mark.parametrize("flag", ["", "--json"])
def test_nothing_can_be_written_to_stdout(model, flag):
    for command, input in (("models", ""), ("chat -m $M --threads 1 -n 2 --memory", "hello\n")):
        code, _, err = ds4(f"$DS4 {command} {flag} > /dev/full", model, input)
        assert code == 1 and "ds4: No space left on device" in err.replace("[Errno 28] ", "")
        assert "Traceback" not in err and "Exception ignored" not in err


def test_what_is_typed_before_a_question_is_no_answer():
    script = """
import time
from ds4.cli.turns import ask
print("wait", flush=True)
time.sleep(1)
print("said", repr(ask("allow this? ")), flush=True)
"""
    with Terminal(script, env={"PYTHONPATH": str(ROOT), "TERM": "xterm"}) as screen:
        screen.wait("wait")
        screen.send("y\r")
        screen.wait(r"allow this\?")
        screen.send("n\r")
        screen.wait("said 'n'")
        assert screen.ended() == 0


def test_text_cannot_turn_a_line_around():
    assert printable("a\u202eb\u2066\x1b\x9b") == "a\\u202eb\\u2066\\x1b\\x9b" and printable("שלום\t\n") == "שלום\t\n"


FORCED = """
import json, os, sys
from ds4 import cli
from ds4.chat_formats import ToolCall
from ds4.cli import settings

real = settings.Opener.open

def opened(self, *args):
    made = real(self, *args)
    if not made.chat.forced:
        made.chat.force("", [ToolCall(*json.loads(os.environ["CALL"]))])
        made.chat.force("Done.")
    return made

settings.Opener.open = opened
sys.exit(cli.main(sys.argv[1:]))
"""


def forced(model, call, *flags):
    """A started `ds4 agent` whose model makes this call."""
    args = ["agent", "-m", model, "--ctx", "20000", "--threads", "1", "--memory", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CALL": json.dumps(call)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + FORCED, *args]
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)


def test_what_a_tool_gives_is_shown_without_escape_sequences_in_a_pipe_too(model, tmp_path):
    (tmp_path / "bad.txt").write_text("\x1b]0;title\x07\x1b[31mred \u202eabc\n")
    out, _ = forced(model, ["read", {"path": "bad.txt"}], "--root", str(tmp_path)).communicate(b"read\n", timeout=120)
    assert b"\\x1b]0;title\\x07\\x1b[31mred \\u202eabc" in out and b"\x1b" not in out


# ---- signals


@pytest.mark.nosanitize
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("background", [True, False])
def test_commands_end_with_a_program_that_is_ended(model, tmp_path, number, background):
    command = f"echo $$ > {tmp_path}/pid; sleep 60"
    call = ["bash", {"command": command, "background": background}]
    agent = forced(model, call, "--bash", "--yes", "--root", str(tmp_path))
    agent.stdin.write(b"go\n")
    agent.stdin.flush()
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < end and agent.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    agent.send_signal(number)
    agent.communicate(timeout=60)
    assert agent.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


# ---- folders


def test_a_log_with_nothing_in_it_is_damaged(engine, model, capsys):
    path = kept(engine)
    (path / "log-000001.jsonl").write_bytes(b"")
    assert [str(damage) for damage in conversations.verify(path)] == [
        "log-000001.jsonl, line 1: there is nothing in it"
    ]
    assert cli.main(["sessions", "list"]) == 0 and "damaged" in capsys.readouterr().out
    assert cli.main(["chat", "--resume", path.name]) == 1
    assert "cannot be opened: log-000001.jsonl, line 1: there is nothing in it." in capsys.readouterr().err


def test_a_log_whose_first_line_was_changed_says_so(engine, capsys):
    path = kept(engine)
    log = path / "log-000001.jsonl"
    log.write_bytes(log.read_bytes().replace(b"tiny", b"tidy", 1))
    assert cli.main(["chat", "--resume", path.name]) == 1
    assert "log-000001.jsonl, line 1: its checksum does not fit" in capsys.readouterr().err


def test_a_lock_that_is_another_file_is_not_written_over(engine):
    path = kept(engine)
    (path / "lock").unlink()
    os.link(path / "log-000001.jsonl", path / "lock")
    before = (path / "log-000001.jsonl").read_bytes()
    with Store.open(path):
        assert conversations.in_use(path)
    assert (path / "log-000001.jsonl").read_bytes() == before


def test_a_log_that_is_deleted_while_it_is_open(engine, model, capsys, monkeypatch, tmp_path):
    with Chat(engine, ctx=4096, max_tokens=2, store=conversations.new_path(), policy=None) as chat:
        chat.ask("one")
        (chat.transcript.store.path / "log-000001.jsonl").unlink()
        assert chat.ask("two") is not None
        assert "its log was deleted while it was open" in chat.transcript.store.failed
        assert [node.text for node in chat.transcript.history() if node.human] == ["one", "two"]


def test_the_farewell_of_a_conversation_that_is_gone(model, home):
    script = "echo one; while [ ! -e $DS4_HOME/conversations/*/log* ]; do sleep 0.1; done; sleep 0.3; "
    script += "rm -r $DS4_HOME/conversations/*; echo two"
    _, _, err = ds4(f"({script}) | $DS4 chat -m $M --threads 1 -n 2", model)
    assert "its log was deleted while it was open" in err and "nothing is kept: " in err and "--resume" not in err


def test_resume_of_nothing(model, capsys):
    assert cli.main(["chat", "-m", model, "--resume", ""]) == 1
    assert "there is no conversation ''" in capsys.readouterr().err


def test_a_full_context_that_does_not_compact_can_be_opened_again(engine, home):
    with Chat(engine, ctx=300, policy=None, store=home / "one") as chat:
        chat.force("x" * 500)
        assert list(chat.send("Tell me a story."))[-1].finish == "length"
        assert 295 < chat.live.used <= 300
    with Chat(engine, ctx=300, policy=None, store=home / "one") as chat:
        assert chat.undo() == "turn"


def test_a_plan_names_what_is_cut(model, capsys, monkeypatch):
    text = " ".join(f"fact {i}: {i * i};" for i in range(250))
    code, out, err = ds4("$DS4 chat -m $M --threads 1 -n 2 --memory --ctx 8192", model, f"{text}\n/plan\n")
    assert code == 0, err
    assert "stays:   #1 to" not in out and "cut:     #1 (" in out


def test_the_mark_of_a_forced_answer_outlives_the_bar_before_it():
    script = """
from ds4 import events as ev
from ds4.cli.demo import _Forced
from ds4.cli.output import Output
from ds4.cli.talk import talk

def events():
    yield ev.Prefill(0, 900)
    yield ev.Prefill(900, 900)
    yield _Forced()
    yield ev.Text("It is so.")

talk(Output(), events(), lambda: None)
"""
    with Terminal(script, env={"PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": ""}) as screen:
        screen.wait("It is so")
        shown = screen.raw[screen.raw.rindex("[forced]") :]
        assert "prefill" in screen.raw and "\x1b[2K" not in shown and "prefill" not in shown
