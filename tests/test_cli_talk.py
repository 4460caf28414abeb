"""How a turn is shown, and the conversation at the terminal, on a chat that needs no model."""

import io
import json
import os
import signal
import sys
import threading
from collections import deque
from types import SimpleNamespace

import pytest

from ds4 import events as ev
from ds4.cli import commands
from ds4.cli.output import Output
from ds4.cli.room import Pace, Room
from ds4.cli.settings import Opened, Settings
from ds4.cli.talk import talk
from ds4.errors import ArgumentError, Cancelled
from ds4.events import Prefill, Text, Thinking, TurnEnd
from ds4.transcript import Held

END = TurnEnd("stop", 100, 60, 2, 0.5)
HOSTILE = "\x1b]0;title\x07\x1b[31mred"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path))


def turn():
    yield Prefill(0, 100)
    yield Prefill(100, 100)
    yield Thinking("hm ")
    yield Text("Hello")
    yield Text(" you")
    yield END


def never():
    raise AssertionError("nothing was interrupted")


def test_text_goes_to_stdout_and_figures_to_stderr(capsys):
    assert talk(Output(), turn(), never) == END
    out, err = capsys.readouterr()
    assert out == "hm Hello you\n"
    assert err.startswith("[100 prompt tokens, 60 of them reused; 2 generated") and err.count("\n") == 1


def test_events_in_json(capsys):
    talk(Output(json=True), turn(), never)
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [e["type"] for e in events] == [e.type for e in turn()]
    assert events[0] == {"type": Prefill(0, 1).type, "done": 0, "total": 100}
    assert events[-1] == {
        "type": END.type,
        "finish": "stop",
        "prompt_tokens": 100,
        "reused": 60,
        "generated": 2,
        "seconds": 0.5,
    }


def test_quiet_is_only_the_text(capsys):
    talk(Output(quiet=True), turn(), never)
    assert capsys.readouterr() == ("hm Hello you\n", "")


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cancels_the_turn_and_keeps_its_end(capsys):
    cancelled = []

    def events():
        yield Text("half")
        press()
        yield TurnEnd("cancelled" if cancelled else "stop", 1, 0, 1, 0.1)

    end = talk(Output(), events(), lambda: cancelled.append(True))
    assert end.finish == "cancelled"
    assert capsys.readouterr().err.endswith("; stopped]\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [Cancelled, None])
def test_ctrl_c_where_the_turn_cannot_end_by_itself(capsys, error):
    closed = []

    def events():
        try:
            yield Text("half")
            press()
            if error:
                raise error("cancelled")
            press()  # nothing happened, so it is pressed again
            yield Text("never")
        finally:
            closed.append(True)

    assert talk(Output(), events(), lambda: None) is None
    assert closed and capsys.readouterr().out == "half\n"


def test_cancelled_by_somebody_else_is_an_error():
    def events():
        yield Text("half")
        raise Cancelled("by another thread")

    with pytest.raises(Cancelled):
        talk(Output(), events(), never)


class Toy:
    """A chat whose context holds one token per turn."""

    def __init__(self, turns=()):
        self.turns, self.closed, self.seeds = list(turns), False, []
        ledger = {"pages_used": 1, "bytes_used": 2000, "bytes_budget": 3000}
        engine = SimpleNamespace(ledger=lambda: ledger)
        self.live = SimpleNamespace(ctx=4096, engine=engine, session=SimpleNamespace(pos=0))
        self.background = SimpleNamespace(ready=False)
        self.transcript = SimpleNamespace(store=SimpleNamespace(path=None, failed=None, persistent=False), seq=1)
        self.held, self.queued, self.cancelled = None, deque(), 0
        self._count()

    def _count(self):
        self.live.used = self.live.session.pos = len(self.turns)
        self.transcript.surface = [SimpleNamespace(human=True, number=i) for i, _ in enumerate(self.turns)]

    @property
    def session(self):
        return self.live.session

    def send(self, text):
        if text == "fail":
            raise ArgumentError("the context\nis full")
        if text == "wait":
            self.held = Held("user", text)
            press()
            yield TurnEnd("cancelled", 1, 0, 0, 0.1)
            return
        self.held = None
        self.turns.append(text)
        self._count()
        yield Text(f"<{text}>")
        yield TurnEnd("stop", 1, 0, 1, 0.1)

    def cancel(self):
        self.cancelled += 1

    def undo(self):
        if not self.turns:
            raise ArgumentError("there is no turn")
        self.turns.pop()
        self._count()
        return "turn"

    def retry(self, seed):
        self.seeds.append(seed)
        text = self.turns.pop()
        return self.send(text)

    def fork(self):
        return Toy(self.turns)

    def close(self):
        self.closed = True


def make_room(out, **options):
    opened = Opened(Toy(), Settings("toy"))
    return Room(None, opened, out, **{"kept": False, "interactive": False, "again": "ds4 chat", **options})


@pytest.fixture
def room(capsys):
    return make_room(Output(quiet=True))


def test_commands_move_the_conversation(room, capsys):
    for line in ("one", "two", "", "/undo", "/fork", "three", "/fork 1", "four", "/retry 7", "/retry"):
        assert room.enter(line)
    first, second = room.branches
    assert first.turns == ["one", "four"] and second.turns == ["one", "three"]
    assert first.seeds[0] == 7 and first.seeds[1] != 7
    out = capsys.readouterr().out
    assert "<one>\n<two>\n" in out and "undone: your last message and what followed; 2 -> 1 tokens" in out
    assert "branch: branch 2, branches 2, tokens 1" in out
    assert not room.failed
    assert not room.enter("/quit")
    room.leave()
    assert first.closed and second.closed


def test_stats_and_help(room, capsys):
    room.enter("/stats")
    room.enter("/help")
    out = capsys.readouterr().out
    figures = "tokens 0, evaluated 0, ctx 4096, pages used 1, used 2 kB, budget 3 kB"
    assert f"stats: branch 1, branches 1, {figures}" in out
    assert all(command in out for command in commands.COMMANDS)


def test_help_is_an_event_in_json(capsys):
    make_room(Output(json=True)).enter("/help")
    [event] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert event["type"] == "help" and [name.split()[0] for name in event["commands"]] == [*commands.COMMANDS, "/quit"]


def test_a_message_that_did_not_come_in_is_offered_again(capsys):
    room = make_room(Output())
    assert room.enter("wait") and room.interrupted and room.chat.cancelled == 1
    err = capsys.readouterr().err
    assert "not sent: your message waits" in err
    assert room.enter("/stats") and "not sent" not in capsys.readouterr().err  # said once
    assert room.take_pending() == "wait" and room.take_pending() == ""
    room.chat.queued.append("behind it")
    room.enter("/stats")
    assert room.take_pending() == "wait\n\nbehind it" and not room.chat.queued
    room.enter("go on")
    assert room.take_pending() == "" and not room.interrupted


def test_a_result_that_waits_is_said(capsys):
    room = make_room(Output())
    room.chat.held = Held("tool", "text", "call-1")
    room.enter("/stats")
    assert "the result of a tool waits" in capsys.readouterr().err and room.take_pending() == ""


def test_the_prompt_says_how_full_the_context_is(room):
    room.chat.live.used = 1229
    assert room.prompt() == "[1.2k/4k] > "
    room.chat.live.used, room.chat.background.ready = 812, True
    assert room.prompt() == "[812/4k, a compaction is prepared] > "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fail", "the context is full"),
        ("/undo", "there is no turn"),
        ("/fly", "there is no command /fly"),
        ("/fork 9", "there is no branch 9: 1 to 1 are there"),
        ("/fork x", "there is no branch x"),
        ("/retry x", "/retry takes a seed"),
        ("/fork", "there is nothing to fork yet"),
        ("/history x", "/history takes a number"),
        ("/plan x", "/plan takes nothing, or a span"),
        ("/save", "the conversation is kept in memory only"),
        ("/strip", "the conversation is kept in memory only"),
        ("/switch", "/switch takes the id"),
        ("/switch nope", "there is no conversation 'nope'"),
        ("/delete", "the conversation is not on disk"),
    ],
)
def test_an_error_ends_only_the_turn(room, capsys, line, message):
    assert room.enter(line) and room.failed
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
    assert room.enter("still here")
    assert capsys.readouterr().out == "<still here>\n"


def test_a_path_is_no_command(room, capsys):
    room.enter("/usr/bin is a folder")
    assert room.chat.turns == ["/usr/bin is a folder"]


def test_ctrl_c_skips_the_snapshot_and_loses_nothing(tmp_path, capsys):
    room = make_room(Output())
    chat, stopped = room.chat, threading.Event()

    def save():
        os.kill(os.getpid(), signal.SIGINT)
        if not stopped.wait(10):
            raise AssertionError("nobody cancelled it")
        raise Cancelled("the save was cancelled.")

    chat.save, chat.cancel = save, stopped.set
    (tmp_path / "id").mkdir()
    (tmp_path / "id" / "log-000001.jsonl").touch()
    chat.transcript.store = SimpleNamespace(path=tmp_path / "id", persistent=True, failed=None)
    chat.live.session.pos = 600
    room.leave()
    err = capsys.readouterr().err
    assert "saving a snapshot" in err and "no snapshot: the save was cancelled. Nothing is lost" in err
    assert "ds4 chat --resume id" in err and chat.closed


def test_the_pace_is_that_of_text_alone():
    pace = Pace()
    assert pace.rate == 0
    list(pace.timed(turn()))
    assert pace.tokens == 1 and pace.rate > 0  # from one piece of text to the next; the first one's wait is not known


# ---- compactions ---------------------------------------------------------------------------------------------------


def compaction():
    yield ev.CompactionStarted("asked for", 900)
    yield Prefill(50, 200)
    yield Prefill(200, 200)
    yield ev.Summary("The user")
    yield ev.Summary(" wants")
    yield ev.SummaryDiscarded("it repeats itself")
    yield ev.Summary(f"A file {HOSTILE}.\nMore")
    yield ev.CompactionPlanned(900, 300, 100, 50)
    yield Prefill(150, 300)
    yield Prefill(300, 300)
    yield ev.CompactionDone(900, 300, 100, 200, 1.5, "retry", 50, 1.0, 0.0001, 1.25)


PLAIN = """\
COMPACTING 900 tokens: asked for
The user wants
[not kept: it repeats itself]
A file SHOWN.
More
900 tokens become 300: 100 stay in place, the last 50 are kept as they were
compacted: 900 -> 300 tokens, 200 evaluated again, 1.25 s, second try
"""


def test_a_compaction_in_a_pipe_is_plain_lines(capsys):
    assert talk(Output(), compaction(), never) is None
    assert capsys.readouterr() == (PLAIN.replace("SHOWN", HOSTILE), "")


@pytest.mark.parametrize("reason", ["it was cancelled", "it was cancelled."])
def test_a_compaction_that_failed(capsys, reason):
    talk(Output(), (event for event in [ev.CompactionFailed(reason, "summary")]), never)
    assert capsys.readouterr().out == "not compacted (summary): it was cancelled. Nothing has changed.\n"


@pytest.mark.parametrize("colour", [True, False])
def test_a_compaction_at_a_terminal(monkeypatch, colour):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    screen, errors = Terminal(), Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", errors)
        talk(Output(), compaction(), never)
    out = screen.getvalue()
    assert HOSTILE not in out + errors.getvalue() and "\x1b]" not in out and "\x1b[31m" not in out
    if colour:
        assert "\x1b[1;95mCOMPACTING 900 tokens: asked for" in out and "\x1b[90mMore" in out
        assert "tokens/s" in out and "reading" in errors.getvalue() and "rebuilding" in errors.getvalue()
    else:
        assert out == PLAIN.replace("SHOWN", "\\x1b]0;title\\x07\\x1b[31mred") and "\x1b" not in errors.getvalue()


def test_a_compaction_in_json_is_its_events(capsys):
    talk(Output(json=True), compaction(), never)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["type"] for event in found if event["type"] != "prefill"]
    assert kinds == [event.type for event in compaction() if not isinstance(event, Prefill)]
    assert found[-1]["evaluated"] == 200 and found[0] == {
        "type": "compaction_started",
        "reason": "asked for",
        "bottom": 900,
    }


def test_a_tool_and_its_result(monkeypatch, capsys):
    def events():
        yield ev.ToolCall("call-1", "bash", {"command": f"echo {HOSTILE}"})
        yield ev.ToolResult("call-1", "\n".join(f"line {i} {HOSTILE}" for i in range(9)))
        yield END

    talk(Output(quiet=True), events(), never)
    out = capsys.readouterr().out
    assert out.startswith("-> bash {") and "line 3" in out and "line 4" not in out and "... 5 more lines" in out
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        talk(Output(quiet=True), events(), never)
    assert HOSTILE not in screen.getvalue() and "\x1b]" not in screen.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_reasoning_is_dim_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", Terminal())
        talk(Output(), turn(), never)
    assert "\x1b[2;3mhm \x1b[0m" in screen.getvalue() and screen.getvalue().endswith("Hello you\n")
