"""The transcript: what each event does, the way back, and that a replay of the log leads to the same state."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections import UserDict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.chat_formats import ToolCall
from ds4.errors import ArgumentError, FileFormatError
from ds4.interrupts import uninterrupted
from ds4.nodes import Node
from ds4.store import Store
from ds4.transcript import Held, State, Transcript, fold


def user(text, *ids, **more):
    return Node("user", ids or (len(text), 7), text, **more)


def answer(text, *ids, **more):
    return Node("assistant", ids or (len(text), 8), text, **more)


def checkpoint(text, *ids):
    return user(text, *ids, kind="checkpoint", data={"summary": text})


def texts(nodes):
    return [node.text for node in nodes]


def state_of(state: State) -> dict[str, Any]:
    """All that a log leads to; two conversations differ in their ids only."""
    return {
        "surface": list(state.surface), "history": state.history(), "nodes": dict(state.nodes), "held": state.held, "size": state.size,
        "numbers": (state.seq, state.last, state.checkpoints), "info": state.info, "origins": state.origins,
    }  # fmt: skip


def talk(store=None):
    """A conversation with two turns."""
    t = Transcript(store)
    t.append(Node("system", (1, 2), "be brief"))
    t.append(user("one"))
    t.append(answer("first"))
    t.append(user("two"))
    t.append(answer("second"))
    return t


# ---- what each event does ------------------------------------------------------------------------------------------


def test_append_numbers_and_caches():
    t = Transcript()
    assert (t.surface, t.tokens, t.size, t.seq, t.held, t.checkpoints) == ((), [], 0, 1, None, 0)
    first = t.tokens
    made = t.append(user("hello", 3, 4), answer("hi", 5))
    assert made == [user("hello", 3, 4, number=1), answer("hi", 5, number=2)] and t.seq == 2
    assert t.surface == tuple(made) and t.surface is t.surface
    assert t.tokens == [3, 4, 5] and t.tokens is t.tokens and first == [] and t.size == 3
    before = t.tokens
    t.append(user("more", 6))
    assert before == [3, 4, 5] and t.tokens == [3, 4, 5, 6]
    assert t.find(2) == made[1] and texts(t.history()) == ["hello", "hi", "more"]
    for number in (0, -1, 4, 10**30):
        with pytest.raises(ArgumentError, match=f"no node #{number}"):
            t.find(number)
    seq = t.seq
    assert t.append() == [] and t.seq == seq


def test_replace_names_nodes_and_never_positions():
    t = talk()
    system, one, first, two, second = t.surface
    t.replace([system, checkpoint("sum", 50), two, second], reason="test", before=10)
    assert texts(t.surface) == ["be brief", "sum", "two", "second"]
    assert [n.number for n in t.surface] == [1, 6, 4, 5] and t.checkpoints == 1
    assert t.surface[0] is system and t.surface[2] is two, "a node that stays is the same object"
    assert t.tokens == [1, 2, 50, *two.ids, *second.ids] and t.size == len(t.tokens)
    assert texts(t.history()) == ["be brief", "one", "first", "two", "second", "sum"] and t.find(2) is one
    event = list(t.store.events())[-1]
    assert event["info"] == {"reason": "test", "before": 10} and [n for n in event["surface"] if n != 1][1:] == [4, 5]
    t.replace([t.surface[1], t.surface[3]])  # the node that had been fourth
    assert texts(t.surface) == ["sum", "second"]
    t.replace([])
    assert t.surface == () and t.size == 0 and t.tokens == []


def test_a_node_rendered_anew_keeps_its_number():
    t = talk()
    one = t.surface[1]
    anew = replace(one, ids=(9, 9, 9), headed=True)
    t.replace([t.surface[0], anew, *t.surface[2:]])
    assert t.surface[1] == anew and t.surface[1].number == one.number and t.size == len(t.tokens)
    assert t.find(one.number) == one and t.history()[1] == one, "the first form is what can be looked up"
    t.replace(t.surface)
    assert t.surface[1] == anew


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [s[0], s[0]], "stands twice"),
        (lambda s: [replace(s[0], number=77)], "node 77 is not on the surface"),
        (lambda s: [replace(s[1], text="another")], "its ids are the truth"),
        (lambda s: [replace(s[1], role="assistant", ids=(1,))], "its ids are the truth"),
        (lambda s: [Node("robot", (1,))], "role 'robot'"),
        (lambda s: [user("x", -1)], "token ids lie between 0"),
        (lambda s: [user("x", 1 << 31)], "token ids lie between 0"),
        (lambda s: [user("x", data={"a": object()})], "type object cannot be logged"),
        (lambda s: [user("x", data={1: 2})], "keys"),
        (lambda s: [Node("tool", (1,), index=2, count=2)], "number 2 of 2"),
    ],
)
def test_what_cannot_be_logged_changes_nothing(change, message):
    t = talk()
    before, events = state_of(t._state), list(t.store.events())
    with pytest.raises(ArgumentError, match=message):
        t.replace(change(t.surface))
    if not any(node.number for node in change(t.surface)):
        with pytest.raises(ArgumentError, match=message):
            t.append(*change(t.surface))
    assert state_of(t._state) == before and list(t.store.events()) == events
    with pytest.raises(ArgumentError, match="taken already"):
        t.append(t.surface[0])


def test_every_field_of_a_node_is_kept():
    node = Node(
        "assistant", (0, 2**31 - 1), "té\0xt\u2028\x1b[31m\U0001f600", thinking="hm\n", finish="length",
        calls=(ToolCall("read", {"path": "a", "n": [1, 2.5, None, True, {"x": "y"}]}, "call-1"), ToolCall("x")),
        headed=True, data={"ledger": [{"a": 1}], "empty": {}},
    )  # fmt: skip
    result = Node("tool", (), "", result_of="call-1", index=1, count=3)
    t = Transcript()
    made = t.append(node, result)
    assert made == [replace(node, number=1), replace(result, number=2)]
    assert fold(t.store.events()).surface == made


def test_what_json_cannot_hold_becomes_text_at_once():
    """Not only after reading it again: a replay has to lead to what is in memory."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    arguments = {
        "half": "\ud800x", "pair": "\ud83d\ude00", "huge": 10**60, "more": -(10**5000), "inf": math.inf, "nan": math.nan,
        "deep": deep, "tuple": (1, 2), "map": UserDict(a=1), "\udc00": 1, "true": True, "float": 5e-324,
    }  # fmt: skip
    t = Transcript()
    [node] = t.append(answer("\ud800", calls=(ToolCall("\udfffn", arguments, "\ud800i"),), data=arguments))
    assert node.text == "\ufffd" and node.calls[0].name == "\ufffdn" and node.calls[0].id == "\ufffdi"
    kept = node.calls[0].arguments
    assert (
        kept == node.data and kept["half"] == "\ufffdx" and kept["pair"] == "\U0001f600" and kept["huge"] == str(10**60)
    )
    assert kept["inf"] == "inf" and kept["nan"] == "nan" and kept["tuple"] == [1, 2] and kept["map"] == {"a": 1}
    assert kept["\ufffd"] == 1 and kept["true"] is True and kept["float"] == 5e-324
    assert fold(t.store.events()).surface == [node]
    t.hold(Held("user", "\udfff"))
    t.record("note", text="\ud800", n=math.inf)
    assert t.held == Held("user", "\ufffd") and state_of(fold(t.store.events())) == state_of(t._state)


def test_the_pending_slot():
    t = talk()
    t.hold(Held("tool", "result", "call-1", 1, 2))
    assert t.held == Held("tool", "result", "call-1", 1, 2)
    t.hold(Held("user", "text"))
    t.undo()
    t.rewind(1)
    assert t.held == Held("user", "text"), "only a release empties it"
    assert fold(t.store.events()).held == t.held
    seq = t.seq
    t.append(user("text"), release=True)
    assert t.held is None and t.seq == seq + 1, "one event: it is never there twice, nor lost"
    t.release_held()
    assert t.seq == seq + 1
    t.hold(Held("user", "again"))
    t.append(answer("x"))
    assert t.held is not None
    t.release_held()
    assert t.held is None and fold(t.store.events()).held is None
    for wrong in (Held("system", "x"), Held("tool", "x", index=1, count=1), Held("tool", "x", index=-1)):
        with pytest.raises(ArgumentError, match="can be held"):
            t.hold(wrong)


def test_records_change_nothing():
    t = talk()
    before = t.surface, t.tokens, t.checkpoints
    t.record("compaction_started", reason="asked for", bottom=12)
    t.record("compaction_failed", reason="no room", step="build")
    assert (t.surface, t.tokens, t.checkpoints) == before
    assert list(t.store.events())[-2] == {
        "seq": 7, "type": "compaction_started", "reason": "asked for", "bottom": 12,
    }  # fmt: skip
    for name in ("append", "rewind", "conversation", "continue", "forked", "Bad", "", "a b", "x" * 100):
        with pytest.raises(ArgumentError, match="cannot be called"):
            t.record(name)
    for name in ("seq", "sum", "spills"):
        with pytest.raises(ArgumentError, match=f"a field '{name}'"):
            t.record("note", **{name: 1})


# ---- the way back --------------------------------------------------------------------------------------------------


def test_undo_goes_through_turns_and_compactions():
    t = talk()
    system, one, first, two, second = t.surface
    t.replace([system, checkpoint("sum"), two, second])
    t.append(user("three"), answer("third"))
    assert t.undo() == "turn" and texts(t.surface) == ["be brief", "sum", "two", "second"]
    assert t.undo() == "compaction" and t.surface == (system, one, first, two, second)
    assert t.undo() == "turn" and t.surface == (system, one, first)
    assert texts(t.history()) == ["be brief", "one", "first"]
    assert t.undo() == "turn" and t.surface == (system,)
    before = t.seq
    with pytest.raises(ArgumentError, match="nothing to undo"):
        t.undo()
    assert t.seq == before and t.checkpoints == 1
    [again] = t.append(user("again"))
    assert again.number == 9 and t.find(8).text == "third", "numbers are never used again, nodes never lost"
    t.replace([t.surface[0], checkpoint("two")])
    assert t.checkpoints == 2
    assert state_of(fold(t.store.events())) == state_of(t._state)


def test_undo_takes_what_is_no_compaction_along():
    """A replace without a checkpoint, such as dropped thinking, belongs to the turn that it came with."""
    t = talk()
    before = t.surface
    t.append(user("three"))
    t.append(user("note", kind="note"), answer("filler", kind="filler"), Node("tool", (1,), result_of="c"))
    t.replace([n if n.text != "first" else replace(n, ids=(1,), thinking="") for n in t.surface], reason="thinking")
    assert t.undo() == "turn" and t.surface == before, "a checkpoint, a note or a result is no human message"


def test_rewind_reaches_every_event():
    t = talk()
    t.replace([t.surface[0], checkpoint("sum")])
    t.append(user("three"))
    t.hold(Held("user", "x"))
    seen = {}
    replayed = State()
    for event in list(t.store.events()):
        replayed.apply(event)
        seen[replayed.seq] = list(replayed.surface)
    top = t.seq
    for seq in (3, top, 1, 7, 2, top):
        t.rewind(seq)
        assert list(t.surface) == seen[seq] and t.size == len(t.tokens)
        seen[t.seq] = seen[seq]
    t.rewind(t.seq - 4)
    for wrong in (0, -1, t.seq + 1, 10**20):
        with pytest.raises(ArgumentError, match=f"no event {wrong}: the last one is {t.seq}"):
            t.rewind(wrong)
    assert state_of(fold(t.store.events())) == state_of(t._state)


def test_rewind_to_the_answer():
    t = talk()
    t.rewind_to_answer()
    assert texts(t.surface) == ["be brief", "one", "first", "two"]
    t.append(answer("another"))
    t.append(Node("tool", (4,), "r"), answer("end"))
    t.rewind_to_answer()
    assert texts(t.surface) == ["be brief", "one", "first", "two"]
    t.rewind(2)
    with pytest.raises(ArgumentError, match="no answer to try again"):
        t.rewind_to_answer()


def test_an_open_bracket_is_nothing():
    """L66: killed between start and commit, started again, failed, started again."""
    t = talk()
    surface = t.surface
    t.record("compaction_started", reason="x", bottom=5)
    again = fold(t.store.events())
    assert tuple(again.surface) == surface
    t.record("compaction_started", reason="x", bottom=5)
    t.replace([t.surface[0], checkpoint("sum")])
    assert t.undo() == "compaction" and t.surface == surface


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_fork(tmp_path, place):
    t = talk(Store.create(tmp_path / "parent", {"model": "m"}))
    entry = t.store.spill.prepare(t.surface[1:3], reason="x")
    t.replace([t.surface[0], checkpoint("sum"), *t.surface[3:]], spills=[entry])
    t.hold(Held("user", "waiting"))
    child = t.fork(tmp_path / "child" if place == "folder" else None)
    assert child.store.id != t.store.id and child.info == {"model": "m"}
    assert child.surface == t.surface and child.held == t.held and child.history() == t.history()
    assert (child.checkpoints, child.seq) == (t.checkpoints, t.seq + 1)
    held = t.surface, list(t.store.events())
    assert child.undo() == "compaction" and texts(child.surface) == ["be brief", "one", "first", "two", "second"]
    assert (t.surface, list(t.store.events())) == held
    assert child.append(user("mine"))[0].number == 7 == t.append(user("yours"))[0].number
    # what the parent spilled can be read by the locators that stand in its texts, also by a child of the child
    for one in (child, child.fork(tmp_path / "third" if place == "folder" else None)):
        assert one.store.spill.read(entry.locator) == t.store.spill.read(1) == one.store.spill.read(1)
        assert one.store.spill.prepare(t.surface[:1]).number == 2
        assert state_of(fold(one.store.events())) == state_of(one._state)
    with pytest.raises(ArgumentError):
        t.store.spill.read(str(child.store.spill.prepare([]).locator).replace("000002", "000001"))


# ---- a replay leads to the same state ------------------------------------------------------------------------------

NODES = st.builds(
    Node,
    role=st.sampled_from(["user", "user", "assistant", "tool"]),
    ids=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    text=st.text(max_size=5),
    kind=st.sampled_from(["", "", "note", "checkpoint"]),
    data=st.dictionaries(
        st.text(max_size=2), st.none() | st.floats() | st.integers() | st.text(max_size=3), max_size=2
    ),
)
ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.lists(NODES, max_size=3), st.booleans()),
    st.tuples(st.just("replace"), st.lists(NODES, max_size=2), st.randoms(use_true_random=False)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("hold"), st.text(max_size=3)),
    st.tuples(st.just("release")),
    st.tuples(st.just("record")),
    st.tuples(st.just("fork")),
    st.tuples(st.just("reopen")),
)


class Model:
    """What a transcript should be, kept the plain way: the whole surface behind every event."""

    def __init__(self):
        self.surfaces, self.surface, self.undone, self.held = [None, []], [], [], None
        self.line = []  # (what, seq) of what an undo would take back; one list per event in `lines`
        self.lines = [None, []]

    def event(self):
        self.surfaces.append(self.surface)
        self.lines.append(self.line)


@settings(max_examples=150)
@given(st.lists(ACTIONS, max_size=25), st.booleans())
def test_random_walk(tmp_path_factory, actions, on_disk):
    folder = tmp_path_factory.mktemp("walk")
    path, forks = folder / "0", 0
    t, model = Transcript(Store.create(path) if on_disk else None), Model()
    for name, *args in actions:
        events = t.seq
        if name == "append":
            made = t.append(*args[0], release=args[1])
            if made or args[1]:
                if any(node.role == "user" and not node.kind for node in made):
                    model.line = [*model.line, ("turn", events)]
                model.surface, model.held = [*model.surface, *made], None if args[1] else model.held
                model.event()
        elif name == "replace":
            new, rng = args
            stay = [node for node in t.surface if rng.random() < 0.7]
            anew = [replace(node, ids=(*node.ids, 1)) if rng.random() < 0.2 else node for node in stay]
            at = rng.randint(0, len(anew))
            t.replace([*anew[:at], *new, *anew[at:]])
            model.surface = [*anew[:at], *t.surface[at : at + len(new)], *anew[at:]]
            assert all(node.number for node in model.surface) and [n.role for n in new] == [
                n.role for n in model.surface[at : at + len(new)]
            ]
            if any(node.kind == "checkpoint" for node in new):
                model.line = [*model.line, ("compaction", events)]
            model.event()
        elif name == "undo":
            if model.line:
                what, seq = model.line[-1]
                assert t.undo() == what
                model.surface, model.line = model.surfaces[seq], model.lines[seq]
                model.event()
            else:
                with pytest.raises(ArgumentError):
                    t.undo()
        elif name == "rewind":
            seq = max(1, math.ceil(args[0] * t.seq))
            t.rewind(seq)
            model.surface, model.line = model.surfaces[seq], model.lines[seq]
            model.event()
        elif name == "hold":
            t.hold(Held("user", args[0]))
            model.held = Held("user", args[0])
            model.event()
        elif name == "release":
            t.release_held()
            if model.held is not None:
                model.held = None
                model.event()
        elif name == "record":
            t.record("note", x=1)
            model.event()
        elif name == "fork":
            forks += 1
            path = folder / str(forks)
            old, t = t, t.fork(path if on_disk else None)
            old.store.close()
            model.event()
        elif on_disk:
            t.store.close()
            t = Transcript(Store.open(path))
        assert list(t.surface) == model.surface and t.held == model.held and t.seq == len(model.surfaces) - 1
        assert t.tokens == [i for node in t.surface for i in node.ids] and t.size == len(t.tokens)
        assert state_of(fold(t.store.events())) == state_of(t._state)
    assert len({node.number for node in t.history()}) == len(t.history())
    t.store.close()


# ---- hostile events ------------------------------------------------------------------------------------------------


def start():
    t = talk()
    t.replace([t.surface[0], checkpoint("sum"), *t.surface[3:]])
    return list(t.store.events())


def node_json(**change):
    t = Transcript()
    t.append(*[user("x") for _ in range(6)], user("y", calls=(ToolCall("c", {}, "i"),)))
    return {**list(t.store.events())[-1]["nodes"][-1], **change}


def without(name):
    found = node_json()
    del found[name]
    return found


HOSTILE = {
    "no seq": {"seq": None}, "seq twice": {"seq": 7}, "seq jumps": {"seq": 9}, "seq text": {"seq": "8"}, "seq huge": {"seq": 10**30},
    "seq true": {"seq": True}, "seq float": {"seq": 8.0}, "seq negative": {"seq": -8},
    "no type": {"type": None}, "type number": {"type": 4}, "type list": {"type": []}, "type odd": {"type": "__init__"},
    "type private": {"type": "_take"}, "type of a file": {"type": "continue"}, "type again": {"type": "conversation"},
    "type spill": {"type": "spill"},
    "nodes missing": {"nodes": None}, "nodes object": {"nodes": {}}, "release text": {"release": "yes"},
    "node text": {"nodes": ["x"]}, "node number only": {"nodes": [7]}, "node null": {"nodes": [None]},
    "role unknown": {"nodes": [node_json(role="robot")]}, "role list": {"nodes": [node_json(role=["user"])]},
    "number 0": {"nodes": [node_json(number=0)]}, "number negative": {"nodes": [node_json(number=-7)]},
    "number taken": {"nodes": [node_json(number=6)]}, "number twice": {"nodes": [node_json(), node_json()]},
    "number jumps": {"nodes": [node_json(number=8)]}, "number huge": {"nodes": [node_json(number=10**30)]},
    "number true": {"nodes": [node_json(number=True)]}, "number float": {"nodes": [node_json(number=7.0)]},
    "ids object": {"nodes": [node_json(ids={})]}, "id negative": {"nodes": [node_json(ids=[1, -1])]},
    "id huge": {"nodes": [node_json(ids=[2**31])]}, "id float": {"nodes": [node_json(ids=[1.0])]},
    "id true": {"nodes": [node_json(ids=[True])]}, "id nested": {"nodes": [node_json(ids=[[1]])]},
    "text number": {"nodes": [node_json(text=5)]}, "kind null": {"nodes": [node_json(kind=None)]},
    "field missing": {"nodes": [without("finish")]}, "field more": {"nodes": [node_json(other=1)]},
    "index is count": {"nodes": [node_json(index=1)]}, "count 0": {"nodes": [node_json(count=0)]},
    "headed number": {"nodes": [node_json(headed=1)]}, "data list": {"nodes": [node_json(data=[])]},
    "calls object": {"nodes": [node_json(calls={})]}, "call text": {"nodes": [node_json(calls=["x"])]},
    "call without id": {"nodes": [node_json(calls=[{"name": "x", "arguments": {}}])]},
    "call name": {"nodes": [node_json(calls=[{"id": "", "name": 4, "arguments": {}}])]},
    "call arguments": {"nodes": [node_json(calls=[{"id": "", "name": "", "arguments": "{}"}])]},
    "surface missing": {"type": "replace"}, "surface unknown": {"type": "replace", "surface": [2]},
    "surface twice": {"type": "replace", "surface": [1, 1]}, "surface true": {"type": "replace", "surface": [True]},
    "surface text": {"type": "replace", "surface": ["1"]}, "surface list": {"type": "replace", "surface": [[1]]},
    "surface replaced": {"type": "replace", "surface": [node_json(number=2)]},
    "surface other role": {"type": "replace", "surface": [node_json(number=5)]},
    "surface number jumps": {"type": "replace", "surface": [1, node_json(number=9)]},
    "surface one twice": {"type": "replace", "surface": [node_json(number=4), 4]},
    "rewind nowhere": {"type": "rewind"}, "rewind 0": {"type": "rewind", "to": 0}, "rewind itself": {"type": "rewind", "to": 8},
    "rewind negative": {"type": "rewind", "to": -1}, "rewind text": {"type": "rewind", "to": "1"},
    "hold nothing": {"type": "hold"}, "hold kind": {"type": "hold", "held": {"kind": "x", "text": "", "call": "", "index": 0, "count": 1}},
    "hold text": {"type": "hold", "held": {"kind": "user", "text": 1, "call": "", "index": 0, "count": 1}},
    "hold index": {"type": "hold", "held": {"kind": "user", "text": "", "call": "", "index": 1, "count": 1}},
    "hold count": {"type": "hold", "held": {"kind": "user", "text": "", "call": "", "index": 0, "count": 10**20}},
    "origins": {"type": "forked", "origins": "x"}, "origins of numbers": {"type": "forked", "origins": [1]},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_events_are_refused_whole(name):
    state = fold(start())
    sound = {"seq": 8, "type": "append", "nodes": [node_json()]}
    before = state_of(state)
    with pytest.raises(FileFormatError):
        state.apply({**sound, **HOSTILE[name]})
    assert state_of(state) == before
    state.apply(sound)
    assert state.surface[-1].text == "y"


def test_a_log_begins_with_its_conversation():
    events = start()
    for wrong in (
        [],
        {},
        {**events[0], "id": 4},
        {**events[0], "info": None},
        {**events[0], "seq": 2},
        {**events[1], "seq": 1},
    ):
        with pytest.raises(FileFormatError):
            State().apply(wrong if isinstance(wrong, dict) else {})
    assert State().apply_all([events[0], events[2]]) == "the event has the number 3 instead of 2"


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_interrupts_wait_for_the_end_of_the_block():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                steps.append("inner")
            steps.append("outer")
        steps.append("never")
    assert steps == ["inner", "outer"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ZeroDivisionError), uninterrupted():
        signal.raise_signal(signal.SIGINT) if False else 1 / 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, old)


def test_another_thread_is_left_alone():
    done = []

    def work():
        with uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_an_interrupted_append_is_whole(tmp_path, monkeypatch):
    """Ctrl-C in the middle of the write: log and memory have both taken the step."""
    t = talk(Store.create(tmp_path / "c"))
    real = os.fsync

    def fsync(fd):
        signal.raise_signal(signal.SIGINT)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        t.append(user("three"))
    monkeypatch.undo()
    assert texts(t.surface)[-1] == "three"
    t.store.close()
    with Store.open(tmp_path / "c") as store:
        assert state_of(Transcript(store)._state) == state_of(t._state)


def test_the_log_is_plain_json(tmp_path):
    """What docs promise: one object a line, with every field."""
    t = talk(Store.create(tmp_path / "c", {"ctx": 4096}))
    lines = [json.loads(line) for line in (tmp_path / "c" / "log-000001.jsonl").read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["type"] == "conversation" and lines[0]["info"] == {"ctx": 4096} and lines[0]["version"] == 1
    assert lines[2]["nodes"] == [
        {"number": 2, "role": "user", "kind": "", "text": "one", "thinking": "", "ids": [3, 7], "calls": [], "result_of": "",
         "index": 0, "count": 1, "headed": False, "finish": "", "data": {}}
    ]  # fmt: skip
    t.store.close()
