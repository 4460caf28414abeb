"""`ds4 agent` and `ds4 chat` as a person or a pipe uses them, on the tiny model."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest
from oracle import DATA
from terminal import Terminal
from tiny_tokenizer import CHATML, QWEN, tokenizer_json

from ds4 import cli, conversations
from ds4.chat_formats import ToolCall
from ds4.cli import settings, turns
from ds4.cli.turns import Permission
from ds4.errors import StoreError
from ds4.events import TurnEnd

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "\x1b]0;title\x07\x1b[31mred"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS4_DEBUG", raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny Llama with a tokenizer of bytes, in ChatML, and a context that holds the tools spelled in bytes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(DATA / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(CHATML, QWEN)))
    template = {"chat_template": "<|im_start|> <|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return str(folder)


SLOW_SUMMARY = """
import sys, time
from ds4 import cli
from ds4.compaction import summary
from ds4.files import open_checkpoint
from ds4.tokenizer import load

words = load(open_checkpoint(sys.argv[sys.argv.index("-m") + 1]))
text = " ".join(f"Part {i}, about {i * i * 7919} and {i ** 3}, is done." for i in range(1, 200))
ids = words.encode(text)[:250] + [words.control["<|im_end|>"]]

def sample(logits, sampling, last, pos):
    time.sleep(0.005)
    return ids[len(last)], None

summary.sample = sample
sys.exit(cli.main(sys.argv[1:]))
"""
LONG = " ".join(f"fact {i}: {i * i * 31 % 9973};" for i in range(160))


@pytest.mark.nosanitize
@pytest.mark.slow
def test_a_person_at_a_terminal(model, home):
    env = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "DS4_HOME": str(home), "NO_COLOR": ""}
    args = ["chat", "-m", model, "--ctx", "8192", "--threads", "1", "-n", "4", "--policy", "request=short"]
    with Terminal(SLOW_SUMMARY, *args, env=env) as screen:
        screen.wait(r"\[\d+/8k\] >")
        screen.send(LONG + "\r")
        screen.wait(r"4 generated[^\]]*\]\s+\[[\d.]+k/8k\] >")
        screen.send("And the rest?\r")
        screen.wait(r"4 generated[^\]]*\]\s+\[[\d.]+k/8k\] >")

        screen.send("/compact\r")
        screen.wait("Part 3, about")
        assert "\x1b[1;95mCOMPACTING" in screen.raw and "asked for" in screen.text
        screen.send("\x03")
        screen.wait(r"not compacted .*Nothing has changed\.\s+\[[\d.]+k/8k\] >")
        screen.send("/history\r")
        there = screen.wait(r"#4[\s\S]*\] >")
        assert "fact 0" in there and "And the rest?" in there and "replaced" not in there

        screen.send("/compact\r")
        screen.wait(r"compacted: \d+ -> \d+ tokens[\s\S]*\] >")
        screen.send("/undo\r")
        screen.wait(r"undone: the last compaction; ")
        screen.send("What else?\r")
        screen.wait(r"4 generated[^\]]*\]\s+\[[\d.]+k/8k\] >")
        screen.send("/quit\r")
        screen.wait("--resume")
        assert screen.ended() == 0
    (kept,) = conversations.conversations(home / "conversations")
    assert kept.title.startswith("fact 0") and kept.nodes == 6 and kept.snapshot_bytes and not kept.in_use
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o700
    assert conversations.verify(kept.path) == []


FORCED_CALLS = """
import sys
from ds4 import cli
from ds4.chat_formats import ToolCall
from ds4.cli import settings

real = settings.Opener.open

def opened(self, *args):
    made = real(self, *args)
    for text in ("one", "two"):
        made.chat.force("", [ToolCall("write", {"path": text + ".txt", "text": text}, text)])
        if text == "two":
            made.chat.force("Done.")
    return made

settings.Opener.open = opened
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.nosanitize
def test_a_tool_asks_at_the_terminal_and_ctrl_c_there_ends_the_turn(model, home, tmp_path):
    (tmp_path / "files").mkdir()
    env = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "DS4_HOME": str(home), "NO_COLOR": ""}
    args = ["agent", "-m", model, "--ctx", "20000", "--threads", "1", "--write", "--root", str(tmp_path / "files")]
    with Terminal(FORCED_CALLS, *args, env=env) as screen:
        screen.wait(r"/19.5k\] >")
        screen.send("Write one\r")
        assert "write one.txt (1 lines, 3 B)" in screen.wait(r"allow this\?")
        screen.send("\x03")
        screen.wait(r"; stopped\]\s+\[[\d.]+k/19.5k\] >")
        screen.send("Write two\r")
        screen.wait(r"allow this\?")
        screen.send("y\r")
        screen.wait(r"Done\.[\s\S]*generated[^\]]*\]\s+\[[\d.]+k/19.5k\] >")
        screen.send("\x04")
        assert screen.ended() == 0
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["two.txt"]


# ---- from a pipe ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ds4(model, monkeypatch, capsys):
    """ds4(lines, *args): (exit code, stdout, stderr) of a command that is given these turns."""

    def run(turns, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in turns)))
        code = cli.main([*args, "--threads", "1", "--pool-tokens", "40000"])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def says(monkeypatch):
    """says(text, *calls): the next answer of any chat that is opened from now on."""
    answers = []
    real = settings.Opener.open

    def opened(self, *args):
        made = real(self, *args)
        for text, calls in answers:
            made.chat.force(text, calls)
        return made

    monkeypatch.setattr(settings.Opener, "open", opened)
    return lambda text, *calls: answers.append((text, calls))


def events(text):
    return [json.loads(line) for line in text.split("\n") if line]


def kept():
    return conversations.conversations()


def test_a_pipe_gives_a_turn_a_line_and_the_id_to_go_on_with(ds4, model, says):
    says("Hello.")
    says("Fine.")
    code, out, err = ds4(["Hi", "How are you?"], "chat", "-m", model, "--ctx", "8192")
    (one,) = kept()
    assert (code, out) == (0, "Hello.\nFine.\n") and "\x1b" not in out + err
    assert f"go on with: ds4 chat --resume {one.id}" in err and one.nodes == 4


def test_a_conversation_is_resumed_with_what_it_was_begun_with(ds4, model, says, tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    args = ["--root", str(tmp_path / "files"), "--ctx", "16384", "--write", "--drop-thinking", "-n", "3"]
    assert ds4(["Hi"], "agent", "-m", model, *args, "--system", "Be kind.")[0] == 0
    (one,) = kept()
    monkeypatch.chdir(tmp_path)
    code, out, err = ds4(["/history"], "agent", "--resume", one.id[:-2])
    assert code == 0 and "Be kind." in out and str(tmp_path / "files") in err and f"{one.tokens} tokens of 16384" in err
    code, out, _ = ds4(["More", "/stats"], "agent", "--continue", "--json", "-n", "5", "--ctx", "20000")
    found = {event["type"]: event for event in events(out)}
    assert found["conversation"]["id"] == one.id and found["turn_end"]["generated"] <= 5
    assert found["stats"]["ctx"] == 20000 and len(kept()) == 1
    for flags, message in [
        (["--system", "x"], "--system belongs to the start"),
        (["--write"], "--write belongs to the start"),
        (["--no-span-tools"], "--no-span-tools belongs to the start"),
        (["--memory"], "--memory keeps nothing on disk"),
    ]:
        code, out, err = ds4([], "agent", "--resume", one.id, *flags)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    (tmp_path / "files").rmdir()
    code, out, err = ds4([], "agent", "--resume", one.id)
    assert code == 1 and "say where the files are now" in err.lower()
    assert ds4(["/stats"], "agent", "--resume", one.id, "--root", str(tmp_path))[0] == 0


def test_nothing_is_kept_of_an_empty_conversation_or_in_memory(ds4, model, home):
    assert ds4(["/stats", "/help", "/new", "/quit"], "chat", "-m", model)[0] == 0
    code, _, err = ds4(["Hi", "/save"], "chat", "-m", model, "--memory", "-n", "2")
    assert code == 1 and "kept in memory only" in err
    assert kept() == [] and not (home / "conversations").exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "say which model with -m"),
        (["-m", "x", "--root", "nowhere"], 2, "--root nowhere: there is no such folder"),
        (["-m", "x", "--policy", "tail=1"], 2, "no field 'tail'; its fields are soft_fraction"),
        (["-m", "x", "--policy", "tail_fraction=much"], 2, "tail_fraction is 'much'"),
        (["-m", "x", "--policy", "tail_fraction"], 2, "--policy takes FIELD=VALUE"),
        (["-m", "x", "--no-compact", "--background"], 2, "--no-compact leaves nothing"),
        (["-m", "x", "--temperature", "-1"], 2, "temperature is -1"),
        (["--resume", "2026"], 1, "there is no conversation '2026'"),
        (["--continue"], 1, "there is no conversation in"),
        (["--continue", "--resume", "2"], 2, "not allowed with"),
    ],
)
def test_wrong_usage(ds4, args, code, message):
    found, out, err = ds4([], "agent", *args)
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


def test_a_small_context_is_not_compacted(ds4, model):
    code, _, err = ds4(["Hi"], "chat", "-m", model, "--ctx", "1024", "-n", "2")
    assert code == 0 and "1024 tokens is too small to compact itself" in err
    code, _, err = ds4(["Hi"], "chat", "-m", model, "--ctx", "1024", "--background")
    assert code == 1 and "at least 2048" in err
    code, _, err = ds4(["Hi"], "run", "-m", model, "--ctx", "1024", "-n", "2", "-p", "Hi")
    assert code == 0


def test_a_context_that_the_tools_overfill_is_refused_with_the_numbers(ds4, model):
    code, out, err = ds4(["Hi"], "agent", "-m", model, "--ctx", "6144")
    assert code == 1 and "system prompt and tools" in err and kept() == []


def test_a_format_without_tools_gets_none(ds4, tmp_path):
    folder = tmp_path / "gemma"
    shutil.copytree(DATA / "gemma3", folder)
    control = ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(control, [])))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    args = ["--chat-format", "gemma", "--no-compact", "-n", "2"]
    code, out, err = ds4(["Hi"], "agent", "-m", str(folder), *args)
    assert code == 0 and "gemma3 has no" not in err and "has no tool calls: the model gets no tools" in err


def test_ctrl_c_in_a_pipe_is_130(ds4, model, monkeypatch):
    from ds4.agent.chat import Chat

    def send(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        yield TurnEnd("cancelled", 1, 0, 0, 0.1)

    monkeypatch.setattr(Chat, "send", send)
    code, out, err = ds4(["one", "/stats"], "chat", "-m", model)
    assert (code, out) == (130, "") and "; stopped]" in err


def test_input_that_is_no_text(ds4, model, monkeypatch):
    ds4([], "chat", "-m", model)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), "utf-8"))
    assert cli.main(["chat", "-m", model, "--memory", "--threads", "1", "-n", "2"]) == 2


# ---- commands ------------------------------------------------------------------------------------------------------


def test_plan_says_what_a_compaction_would_do_and_changes_nothing(ds4, model, says):
    says("Yes.")
    says("No.")
    args = ["--ctx", "8192", "--policy", "request=short"]
    commands = ["/plan", LONG, "Next?", "/plan", "/plan #1 #2", "/history 1"]
    code, out, err = ds4(commands, "chat", "-m", model, *args)
    assert code == 0
    assert "no compaction: nothing to compact" in out
    assert re.search(r"goes:    #1 to #2 \(\d+ tokens\)\nstays:   #3 to #4 \(\d+ tokens\)", out)
    assert "goes:    #1 to #2: 2 messages" in out and "#4  assistant" in out and "replaced" not in out
    code, out, _ = ds4(["/plan"], "chat", "--continue", "--json")
    (plan,) = [event for event in events(out) if event["type"] == "plan"]
    assert plan["possible"] and plan["goes"] == [1, 2] and plan["before"] == kept()[0].tokens


def test_history_marks_what_a_compaction_has_replaced(ds4, model, says):
    says("Yes.")
    says("No.")
    args = ["--ctx", "8192", "--policy", "request=short", "--json"]
    code, out, _ = ds4(
        [LONG, "Next?", "/compact", "/history", "/undo", "/undo", "/history"], "chat", "-m", model, *args
    )
    assert code == 0
    found = events(out)
    nodes = [(e["number"], e["kind"], e["surface"]) for e in found if e["type"] == "node"]
    assert nodes[:5] == [(1, "", False), (2, "", False), (3, "", True), (4, "", True), (5, "checkpoint", True)]
    assert nodes[5:] == [(1, "", True), (2, "", True)]
    assert [e["what"] for e in found if e["type"] == "undone"] == ["compaction", "turn"]


def test_from_one_conversation_to_another(ds4, model, says):
    says("Yes.")
    code, out, err = ds4(["one", "/new", "two", "/list", "/switch zzz"], "chat", "-m", model)
    assert code == 1 and "there is no conversation 'zzz'" in err
    assert {one.title for one in kept()} == {"one", "two"}
    assert re.search(r" here +two", out) and re.search(r" - +one", out)
    first = next(one for one in kept() if one.title == "one")
    code, out, err = ds4(
        ["/switch " + first.id, "three", "/switch " + first.id, "/delete"], "chat", "--continue", "-n", "2"
    )
    assert code == 1 and f"{first.id} is where you are" in err
    assert f"ds4 sessions delete --yes {first.id}" in err
    assert next(one for one in kept() if one.id == first.id).nodes == 4 and len(kept()) == 2


def test_a_long_conversation_gets_a_snapshot_that_can_be_stripped(ds4, model, says):
    says("Yes.")
    code, _, err = ds4([LONG], "chat", "-m", model)
    assert code == 0 and "saving a snapshot" in err and kept()[0].snapshot_bytes
    code, out, _ = ds4(["Next?"], "chat", "--continue", "--json")
    (end,) = [event for event in events(out) if event["type"] == "turn_end"]
    assert end["reused"] > 2000
    code, out, err = ds4(["/strip", "/strip"], "chat", "--continue")
    assert code == 1 and "stripped: " in out and "there is no snapshot to drop" in err
    assert "saving" not in err and not kept()[0].snapshot_bytes
    code, out, err = ds4(["/save"], "chat", "--continue")
    assert code == 0 and out.startswith("saved: a snapshot of ")


def test_delete_asks(ds4, model, says, monkeypatch):
    from ds4.cli import commands, room

    says("Yes.")
    asked = []
    answers = iter(["n", "y"])
    monkeypatch.setattr(commands, "ask", lambda question: asked.append(question) or next(answers))
    real = room.Room.__init__
    monkeypatch.setattr(room.Room, "__init__", lambda self, *a, **k: real(self, *a, **{**k, "interactive": True}))
    code, out, err = ds4(["one", "/delete", "/history", "/delete", "/history"], "chat", "-m", model)
    assert code == 0 and len(asked) == 2 and " is kept" in err and "deleted " in out
    assert out.count("#1  user") == 1 and kept() == []


# ---- tools ---------------------------------------------------------------------------------------------------------

WRITE = ToolCall("write", {"path": "new.txt", "text": "hello\n"}, "c1")


def agent(ds4, model, folder, *args):
    return ds4(["Do it"], "agent", "-m", model, "--root", str(folder), "--ctx", "20000", "--json", "--write", *args)


def result_of(out):
    (result,) = [event["text"] for event in events(out) if event["type"] == "tool_result"]
    return result


def test_nobody_to_ask_is_a_refusal_that_says_so(ds4, model, says, tmp_path):
    says("", WRITE)
    says("I could not.")
    code, out, _ = agent(ds4, model, tmp_path)
    assert code == 0 and "nobody is there to be asked" in result_of(out) and not (tmp_path / "new.txt").exists()


def test_yes_allows_without_asking(ds4, model, says, tmp_path):
    says("", WRITE)
    says("Done.")
    code, out, _ = agent(ds4, model, tmp_path, "--yes")
    assert code == 0 and result_of(out).startswith("new.txt written") and (tmp_path / "new.txt").exists()


def test_background_jobs_end_with_the_conversation(ds4, model, says, tmp_path):
    says("", ToolCall("bash", {"command": "sleep 100", "background": True}, "c1"))
    says("It runs.")
    args = ["--root", str(tmp_path), "--ctx", "20000", "--bash", "--yes"]
    code, out, err = ds4(["Do it"], "agent", "-m", model, *args)
    assert code == 0 and "running as job 1" in out and "background jobs are ended: 1" in err
    assert "bash run without asking" in err


def test_permission_is_asked_once_where_always_is_the_answer(monkeypatch):
    cancelled, asked, answers = [], [], ["y", "n", "", "always", None]
    monkeypatch.setattr(turns, "ask", lambda question: asked.append(question) or answers.pop(0))
    allow = Permission(lambda: cancelled.append(True))
    write, bash = ToolCall("write", {}), ToolCall("bash", {})
    assert [allow(write, "write x") for _ in range(4)] == [True, False, False, True]
    assert allow(write, "write y") and len(asked) == 4 and asked[0].startswith("write x\n")
    assert not allow(bash, "bash: ls") and cancelled == [True]  # Ctrl-C


# ---- what a log says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"tools": [{"name": "mine"}]}, "made by a program with tools of its own"),
        ({"about": {"model": 3}}, "does not say how"),
        ({"about": {"model": "m", "yes": True}}, "does not say how"),
        ({"about": {"model": "m", "bash": "yes"}}, "does not say how"),
        ({"about": {"model": "m", "policy": []}}, "does not say how"),
    ],
)
def test_a_log_of_another_kind_is_refused(info, message):
    with pytest.raises(StoreError, match=message):
        settings.from_info(info)


def test_a_conversation_of_a_program_without_tools_can_be_gone_on_with(ds4, model, home):
    import ds4 as library

    path = conversations.new_path()
    with library.Engine(model, threads=1, pool_tokens=8192) as engine:
        with library.Chat(engine, ctx=8192, system="Be kind.", store=path, max_tokens=2) as chat:
            chat.ask("Hi")
    code, out, _ = ds4(["/history"], "chat", "--resume", path.name)
    assert code == 0 and "Be kind." in out and "Hi" in out
