"""Which nodes stay: whole ones, in pairs, from a human turn on, and the newest human message in any case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surfaces import CHATML, WRITERS, Surface, assert_paired, numbered, surfaces, words

from ds4.chat_formats import ToolCall
from ds4.compaction import tail
from ds4.compaction.policy import CompactionPolicy
from ds4.compaction.tail import keep, units
from ds4.nodes import Node, size_of

LIMITS = CompactionPolicy().limits(4096, 100)


def limits(budget: int, human: int = 1024):
    return replace(LIMITS, tail=budget, human_keep=human)


def build(spec: str, writer=CHATML) -> list[Node]:
    """Nodes above the system prompt in the notation of faults.md, `U A A[c1,c2] R(c1)`; K a checkpoint, N a note; a
    number behind `:` gives a text of so many words."""
    nodes: list[Node] = []
    for word in spec.split():
        head, _, size = word.partition(":")
        text = words(int(size), f"{head[0]}{len(nodes)}x") if size else f"{head[0]}{len(nodes)}"
        ids = head[2:-1].split(",") if len(head) > 1 else []
        if head[0] == "A":
            nodes.append(writer.assistant(text, [ToolCall("read", {"path": f"{i}.c"}, i) for i in ids]))
        elif head[0] == "R":
            batch = next((n.calls for n in reversed(nodes) if any(c.id == ids[0] for c in n.calls)), None)
            index, count = ([c.id for c in batch].index(ids[0]), len(batch)) if batch else (0, 1)
            nodes.append(writer.result(ids[0], text, index, count))
        else:
            kind = {"U": "", "K": "checkpoint", "N": "note"}[head]
            nodes.append(writer.user(text, first=not nodes, kind=kind))
    return numbered(writer.arrange(nodes), 2)


def numbers(nodes) -> list[int]:
    return [node.number for node in nodes]


def kept(spec: str, budget: int | None = None, waiting=(), writer=CHATML, human: int = 1024):
    """(number of the pinned message, numbers of the tail); the budget is by default exactly what the tail shown
    needs."""
    found = keep(build(spec, writer), writer, limits(10_000 if budget is None else budget, human), waiting)
    return found.pinned.number if found.pinned else None, numbers(node for unit in found.tail for node in unit.nodes)


# ---- units


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("U A", "2 3"),
        ("U A[c1] R(c1) A", "2 3-4 5"),
        ("U A[c1,c2] R(c1) R(c2) A", "2 3-5 6"),
        ("U A[c1] U R(c1) A", "2 3-5 6"),
        ("U A[c1] A[c2] R(c1) R(c2) A", "2 3-6 7"),
        ("U A[c1] R(c1) A[c1] R(c1)", "2 3-4 5-6"),
        ("A[c1] A[c2] R(c2) U R(c1)", "2-6"),
        ("U A[c1] U A", "2 3! 4 5"),
        ("U A[c1,c2] R(c2) U", "2 3-4! 5"),
        ("K R(c0) A", "2 3! 4"),
        ("U A[c1]", "2 3?"),
        ("U A[c1,c2] R(c1)", "2 3-4?"),
        ("U A[c1,c2,c3] R(c1)", "2 3-4?"),
        ("A[c1] R(c1) R(c1) A", "2-3 4! 5"),
    ],
)
def test_units(spec, expected):
    """`-` joins the nodes of a unit, `!` marks a broken one, `?` one that waits (for c1 in the end, or c2)."""
    waiting = ["c1", "c2"] if "?" in expected else []
    shown = []
    for unit in units(build(spec), waiting):
        found = numbers(unit.nodes)
        shown.append("-".join(dict.fromkeys([str(found[0]), str(found[-1])])) + "!" * unit.broken + "?" * unit.waiting)
    assert " ".join(shown) == expected


@given(surfaces())
def test_units_cover_a_surface_in_order(surface: Surface):
    found = units(surface.nodes)
    assert [node for unit in found for node in unit.nodes] == list(surface.nodes)
    for unit in found:
        if not unit.broken:
            assert_paired(unit.nodes)
        else:
            with pytest.raises(AssertionError):
                assert_paired(unit.nodes)


# ---- the rules


@pytest.mark.parametrize(
    ("spec", "budget", "expected"),
    [
        ("U A U A", None, (None, [2, 3, 4, 5])),
        ("U A U A U A", "4-7", (None, [4, 5, 6, 7])),
        ("U A U A:30 U A", "5-7", (None, [6, 7])),  # from the first human turn inside on
        ("U:20 A A A", "4-5", (2, [4, 5])),  # else from an assistant turn on
        ("U A[c1] R(c1) A", "4-5", (2, [5])),  # never from a result on
        ("U:20 A[c1] R(c1) A A", "3-6", (None, [2, 3, 4, 5, 6])),  # the newest human message costs nothing
        ("U A U A:9", "5-5", (None, [4, 5])),
        ("U A U:40 A A", "5-6", (None, [4, 5, 6])),
        ("U A U", 1, (None, [4])),
        ("U A", 1, (2, [])),  # nothing fits: the pinned message stays
        ("U A:400", 100, (None, [2, 3])),  # and an oversized node as a preview
        ("K U A", None, (None, [3, 4])),  # a checkpoint does not begin a tail,
        ("U A K U A", None, (None, [2, 3, 4, 5, 6])),  # but it may be inside
        ("K A", None, (None, [3])),
        ("K", None, (None, [])),
        ("", None, (None, [])),
    ],
)
def test_what_the_budget_holds(spec, budget, expected):
    nodes = build(spec)
    if isinstance(budget, str):
        first, last = map(int, budget.split("-"))
        newest = next(node for node in reversed(nodes) if node.human)
        budget = size_of(node for node in nodes if first <= node.number <= last and node is not newest)
    assert kept(spec, budget) == expected


def test_results_do_not_count_as_human():
    pinned, rest = kept("U A[c1] R(c1) A[c2] R(c2) A", 40)
    assert pinned == 2 and 4 not in rest[:1]


def test_notes_and_fillers_go():
    assert kept("U A N A") == (None, [2, 3, 5])
    assert kept("U N A", 1) == (2, [])
    writer = WRITERS["alternating"]
    nodes = build("K U A U U A", writer)
    assert [node.kind for node in nodes if node.kind == "filler"] == ["filler"] * 2
    found = keep(nodes, writer, limits(10_000))
    assert not [node for node in found.nodes if node.kind]
    assert [node.kind for node in keep(build("U A N A", writer), writer, limits(10_000)).nodes] == ["", "", "note", ""]


def test_L1_L11_a_result_never_stays_without_its_call():
    # smallest input: S U A[c1] // R(c1) A; the first kept message is R
    nodes = build("U A[c1]:30 R(c1):30 A")
    for budget in range(1, size_of(nodes) + 1):
        found = keep(nodes, CHATML, limits(budget))
        assert_paired(found.nodes)
        assert found.tail == () or found.tail[0].nodes[0].role != "tool"


def test_L2_a_call_whose_result_waits_is_paired_and_in_the_tail():
    # smallest input: compact between A[c1] and the arrival of R(c1)
    for budget in (1, 40, 4000):
        for spec in ("U A[c1]", "U A[c1]:90", "U A U A[c1]"):
            nodes = build(spec)
            assert numbers(keep(nodes, CHATML, limits(budget), ["c1"]).nodes)[-1] == nodes[-1].number
        found = keep(build("U A[c1,c2,c3] R(c1)"), CHATML, limits(budget), ["c2"])
        assert numbers(found.nodes) == [2, 3, 4]
        assert [call.id for node in found.nodes for call in node.calls] == ["c1", "c2", "c3"]


def test_L5_an_orphan_result_does_not_survive():
    # smallest input: K then R(c0) as first kept node, compact again
    assert kept("K R(c0) A U A") == (None, [5, 6])
    assert kept("K U A R(c0) A") == (3, [6])


def test_L6_a_parallel_batch_stays_together():
    # smallest input: A[c1,c2] R(c1) // R(c2)
    nodes = build("U:30 A[c1,c2] R(c1):30 R(c2):30")
    for budget in range(1, size_of(nodes) + 1):
        assert numbers(keep(nodes, CHATML, limits(budget)).nodes) in ([2], [2, 3, 4, 5])


def test_L7_L9_a_call_that_was_interrupted_does_not_stay():
    # smallest input: U A[c1] // (no R) U2; abort tool, then compact
    assert kept("U A[c1] U A") == (None, [4, 5])
    assert kept("U A[c1]") == (2, [])
    assert kept("U A[c1,c2] R(c1) U A") == (None, [5, 6])
    assert kept("U A[c1] U A[c2]", waiting=["c2"]) == (None, [4, 5])
    assert kept("A[c1] A[c2] U R(c2)", waiting=["c1"]) == (None, [2, 3, 4, 5])


def test_L10_L85_thinking_and_its_calls_are_never_parted():
    # smallest input: A[think,c1,c2], only c2's result inside the keep window
    call = [ToolCall("read", {"path": f"{i}.c"}, i) for i in ("c1", "c2")]
    nodes = [CHATML.user("go", first=True), CHATML.assistant("", call, thinking=words(30))]
    nodes = numbered([*nodes, CHATML.result("c1", words(30), 0, 2), CHATML.result("c2", "ok", 1, 2)], 2)
    assert keep(nodes, CHATML, limits(size_of(nodes[1:]) // 2 + 1)).nodes == tuple(nodes)  # up to twice the budget
    for budget in range(1, size_of(nodes), 9):
        found = keep(nodes, CHATML, limits(budget)).nodes
        assert numbers(found) in ([2], [2, 3, 4, 5])
        assert all(node.thinking in ("", words(30)) for node in found)  # left out of a preview, and never cut


def test_L12_the_human_part_of_a_mixed_turn_is_a_node_of_its_own():
    # smallest input: U{text + R(c1)} as first kept node
    nodes = build("U A[c1] U R(c1):50")
    assert numbers(keep(nodes, CHATML, limits(5)).nodes)[0] in (3, 4)
    for budget in range(1, 200, 7):
        found = keep(nodes, CHATML, limits(budget)).nodes
        assert 4 in numbers(found)
        assert_paired(found)


def test_L14_a_session_of_nothing_but_pairs_can_be_cut():
    # smallest input: every message is a call/result pair, long session
    nodes = build("U " + " ".join(f"A[c{i}] R(c{i})" for i in range(50)))
    found = keep(nodes, CHATML, limits(size_of(nodes[-6:])))
    assert numbers(found.nodes) == [2, *numbers(nodes[-6:])]


@pytest.mark.parametrize("turns", [1, 40])
def test_L83_the_budget_counts_tokens(turns):
    # smallest input: 10k CJK chars
    nodes = [node for _ in range(turns) for node in (CHATML.user("问" * 50, first=False), CHATML.assistant("答" * 50))]
    nodes = numbered([CHATML.user("始", first=True), *nodes], 2)
    found = keep(nodes, CHATML, limits(1000))
    assert size_of(node for unit in found.tail for node in unit.nodes if node is not found.newest) <= 1000


# ---- what is too large


def test_the_newest_human_message_stays_whole_up_to_a_quarter():
    nodes = build("U:60 A")
    whole = len(nodes[0])
    assert keep(nodes, CHATML, limits(10, whole)).nodes[0] is nodes[0]
    found = keep(nodes, CHATML, limits(10, whole - 1), locator="/spill/000001.jsonl")
    short = found.nodes[0]
    assert short.number == 2 and short.human and len(short) <= whole - 1
    assert short.text.startswith("U0x0 U0x1") and short.text.endswith("U0x59")
    assert "of #2 is left out; the whole text is in /spill/000001.jsonl" in short.text
    assert [(a, b) for a, b in found.previews] == [(short, nodes[0])]


@pytest.mark.parametrize("factor", [1.0, 1.9, 2.0])
def test_a_node_up_to_twice_the_budget_stays_whole(factor):
    nodes = build("U A[c1] R(c1):50 A:50")
    assert keep(nodes, CHATML, limits(int(len(nodes[-1]) / factor) + 1)).nodes == (nodes[0], nodes[-1])


def test_a_larger_node_stays_as_a_preview():
    nodes = build("U A[c1] R(c1):300")
    found = keep(nodes, CHATML, limits(200), locator="/spill/7.jsonl")
    assert numbers(found.nodes) == [2, 3, 4]
    assert found.nodes[:2] == tuple(nodes[:2])
    short = found.nodes[2]
    assert (short.result_of, short.index, short.count) == ("c1", 0, 1) and len(short) <= 400
    assert "/spill/7.jsonl" in short.text and short.data["spill"] == "/spill/7.jsonl"
    assert found.previews == ((short, nodes[2]),)
    assert (
        CHATML.format.tokenizer.decode(short.ids)
        == f"<|im_start|>user\n<tool_response>\n{short.text}\n</tool_response><|im_end|>\n"
    )


def test_L25_a_call_with_huge_arguments_stays_as_a_preview():
    # smallest input: A[c1 with 1 MB args] x N, results already stubs
    huge = {"path": "a.txt", "text": "line\n" * 200_000, "lines": list(range(100_000)), "n": 3}
    nodes = [CHATML.user("go", first=True), CHATML.assistant("I write it.", [ToolCall("write", huge, "c1")])]
    nodes = numbered([*nodes, CHATML.result("c1", "written")], 2)
    for waiting, above in (((), nodes), (("c1",), nodes[:2])):
        found = keep(above, CHATML, limits(300), waiting)
        assert numbers(found.nodes) == numbers(above)
        call = found.nodes[1].calls[0]
        assert (call.id, call.name, call.arguments["path"], call.arguments["n"]) == ("c1", "write", "a.txt", 3)
        assert "left out" in call.arguments["text"] and len(found.nodes[1]) <= 600
        assert (
            CHATML.format.parse(CHATML.format.tokenizer.decode(found.nodes[1].ids[:-2])).tool_calls[0].arguments
            == call.arguments
        )


def test_a_unit_of_very_many_results_goes():
    n = 60
    nodes = build(f"U A[{','.join(f'c{i}' for i in range(n))}] " + " ".join(f"R(c{i}):40" for i in range(n)))
    assert numbers(keep(nodes, CHATML, limits(100)).nodes) == [2]
    waiting = keep(nodes[:-1], CHATML, limits(100), [f"c{n - 1}"]).nodes
    assert numbers(waiting) == numbers(nodes[:-1])
    assert_paired(waiting, [f"c{n - 1}"])


def test_L81_a_preview_never_cuts_a_character():
    # smallest input: emoji at preview/prune border
    for n in range(60, 75):
        nodes = numbered([CHATML.user("x" * n + "😀€é" * 200 + "y" * n, first=True)], 2)
        text = keep(nodes, CHATML, limits(10, 150)).nodes[0].text
        assert "\ufffd" not in text and set(text.split("\n")[0]) <= set("x😀€é")


# ---- generated surfaces


@given(surfaces(), st.integers(1, 900), st.integers(40, 900))
def test_what_stays_is_paired_and_unchanged(surface: Surface, budget, human):
    n = int(surface.nodes[0].role == "system") if surface.nodes else 0
    above = surface.nodes[n:]
    found = keep(above, surface.writer, limits(budget, human), surface.waiting)
    assert_paired(found.nodes, surface.waiting)
    shown = {node.number: node for node in above}
    previews = {short.number for short, _ in found.previews}
    assert all(node is shown[node.number] for node in found.nodes if node.number not in previews)
    assert all(whole is shown[short.number] for short, whole in found.previews)
    assert numbers(found.nodes) == sorted(set(numbers(found.nodes)))
    humans = [node.number for node in above if node.human]
    assert not humans or humans[-1] in numbers(found.nodes)
    if found.tail:
        start = found.tail[0].nodes[0]
        assert start.human or start.role == "assistant" and start.kind != "filler"
        assert start.human or not any(u.nodes[0].human for u in found.tail) or found.tail[0].waiting
    if surface.waiting:
        assert set(surface.waiting) <= {call.id for node in found.nodes for call in node.calls}
    else:
        assert size_of(node for unit in found.tail for node in unit.nodes if node is not found.newest) <= 2 * budget


@given(surfaces(), st.integers(1, 2000))
def test_a_shorter_tail_is_an_end_of_the_longer_one(surface: Surface, tokens):
    found = keep(surface.nodes[1:], surface.writer, limits(1500), surface.waiting)
    shorter = found.without(tokens)
    if shorter is None:
        assert all(unit.waiting or not tail._size(unit, found.newest) for unit in found.tail[:1])
        return
    assert len(shorter.tail) < len(found.tail) and found.tail[len(found.tail) - len(shorter.tail) :] == shorter.tail
    assert_paired(shorter.nodes, surface.waiting)
    assert found.newest is None or found.newest in shorter.nodes
    gone = size_of(found.nodes) - size_of(shorter.nodes)
    assert gone >= tokens or not shorter.tail or shorter.tail[0].waiting
