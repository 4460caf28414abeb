"""How a turn is shown, and the conversation at the terminal, on a chat that needs no model."""

import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from ds4.events import Prefill, Text, Thinking, TurnEnd
from ds4.cli.chat import Room
from ds4.cli.output import Output
from ds4.cli.talk import talk
from ds4.errors import ArgumentError, Cancelled

END = TurnEnd("stop", 100, 60, 2, 0.5)


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
    """A chat whose session holds one position per turn."""

    def __init__(self, turns=()):
        self.turns, self.closed, self.seeds = list(turns), False, []
        ledger = {"pages_used": 1, "bytes_used": 2000, "bytes_budget": 3000}
        self.session = SimpleNamespace(ctx=9, cancel=never, engine=SimpleNamespace(ledger=lambda: ledger))
        self._count()

    def _count(self):
        self.session.pos = len(self.turns)

    def send(self, text):
        if text == "fail":
            raise ArgumentError("the context\nis full")
        self.turns.append(text)
        self._count()
        yield Text(f"<{text}>")
        yield TurnEnd("stop", 1, 0, 1, 0.1)

    def undo(self):
        if not self.turns:
            raise ArgumentError("there is no turn")
        self.turns.pop()
        self._count()

    def retry(self, seed):
        self.seeds.append(seed)
        text = self.turns.pop()
        return self.send(text)

    def fork(self):
        return Toy(self.turns)

    def close(self):
        self.closed = True


@pytest.fixture
def room(capsys):
    return Room(Toy(), Output(quiet=True))


def test_commands_move_the_conversation(room, capsys):
    for line in ("one", "two", "", "/undo", "/fork", "three", "/fork 1", "four", "/retry 7", "/retry"):
        assert room.enter(line)
    first, second = room.branches
    assert first.turns == ["one", "four"] and second.turns == ["one", "three"]
    assert first.seeds[0] == 7 and first.seeds[1] != 7
    out = capsys.readouterr().out
    assert "<one>\n<two>\n" in out and "undone: before 2, pos 1" in out and "branch: branch 2, branches 2, pos 1" in out
    assert not room.failed
    assert not room.enter("/quit")
    room.close()
    assert first.closed and second.closed


def test_stats_and_help(room, capsys):
    room.enter("/stats")
    room.enter("/help")
    out = capsys.readouterr().out
    assert "stats: branch 1, branches 1, pos 0, ctx 9, pages used 1, used 2 kB, budget 3 kB" in out
    assert all(command in out for command in room.commands)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fail", "the context is full"),
        ("/undo", "there is no turn"),
        ("/fly", "there is no command /fly"),
        ("/fork 9", "there is no branch 9: 1 to 1 are there"),
        ("/fork x", "there is no branch x"),
        ("/retry x", "/retry takes a seed"),
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


def test_reasoning_is_dim_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", Terminal())
        talk(Output(), turn(), never)
    assert "\x1b[2;3mhm \x1b[0m" in screen.getvalue() and screen.getvalue().endswith("Hello you\n")
