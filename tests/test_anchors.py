"""Anchors: span.md section 2, rule by rule."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4.compaction import anchors
from ds4.compaction.anchors import closest, cut, find, normalise, text_of
from ds4.errors import ArgumentError
from ds4.nodes import Node


def surface(*texts: str | tuple[str, str], first: int = 1) -> list[Node]:
    """Nodes numbered from `first`; a text is a user's, else (role or kind, text)."""
    nodes = []
    for number, item in enumerate(texts, first):
        role, text = ("user", item) if isinstance(item, str) else item
        kind = role if role in ("checkpoint", "note", "filler") else ""
        role = {"checkpoint": "user", "note": "user", "filler": "assistant"}.get(role, role)
        nodes.append(Node(role, (1,), text, kind, number=number))
    return nodes


def refused(nodes: list[Node], anchor: str, side: str = "end") -> str:
    with pytest.raises(ArgumentError) as caught:
        find(nodes, anchor, side)
    return str(caught.value)


# ---- the normal form

TABLE = {
    "。": ".", "，": ",", "、": ",", "！": "!", "？": "?", "；": ";", "：": ":", "“": '"', "”": '"', "‘": "'", "’": "'",
    "（": "(", "）": ")", "【": "[", "［": "[", "】": "]", "］": "]", "｛": "{", "｝": "}", "～": "~", "…": "...",
}  # fmt: skip
SPACE = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B)))


@pytest.mark.parametrize(("mark", "form"), TABLE.items())
def test_each_mark_of_the_table_is_mapped_on_both_sides(mark, form):
    assert normalise(mark) == form
    nodes = surface(f"read{mark}file", "other")
    assert find(nodes, f"read{form}fi", "end") == 0
    assert find(surface(f"read{form}file", "other"), f"read{mark}fi", "end") == 0


@pytest.mark.parametrize("space", SPACE, ids=lambda c: f"U+{ord(c):04X}")
def test_each_white_space_character_collapses_and_is_trimmed(space):
    assert normalise(f"{space}{space}a{space} {space}b{space}") == "a b"
    assert normalise(space) == ""


def test_nothing_else_is_mapped():
    others = (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    text = "|".join(c for c in others if c not in TABLE and c not in SPACE)
    assert normalise(text) == text


@pytest.mark.parametrize(
    "text", ["「」《》", "—–-", "．／", "ＡＢＣ", "É vs É", "a\x85b", "a\x1cb\x1f", "a\u200bb", "a\u180eb", "İß"]
)
def test_these_stay_distinct(text):
    assert normalise(text) == text


def test_case_and_composition_are_not_folded():
    nodes = surface("Caf\u00e9 opens")
    for other in ("cafe\u0301 opens", "Cafe\u0301 opens", "caf\u00e9 opens"):
        refused(nodes, other)


@given(st.text())
def test_normalising_again_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(alphabet=SPACE + "ab…。", max_size=300), st.integers(0, 40))
@example("a" + " " * 200 + "b", 3)
def test_an_opening_is_the_beginning_of_the_normal_form(text, length):
    assert anchors._opening(text, length) == normalise(text)[:length]


# ---- what can be named


def test_only_user_and_assistant_messages_are_named_by_text():
    nodes = surface(("system", "alpha"), ("tool", "alpha"), ("filler", "alpha"), ("assistant", "alpha one"))
    assert find(nodes, "alpha", "end") == 3
    assert find(surface(("note", "alpha"), ("system", "x")), "alpha", "end") == 0


def test_thinking_and_calls_contribute_nothing():
    node = Node("assistant", (1,), "", thinking="alpha", number=3)
    assert text_of(node) == ""
    assert "not the opening" in refused([node], "alpha")


def test_a_call_spelled_by_a_user_is_text():
    nodes = surface("[tool-call x] please", ("assistant", "fine"))
    assert find(nodes, "[tool-call x]", "start") == 0


def test_a_checkpoint_is_matched_behind_its_first_line():
    nodes = surface(("checkpoint", "[checkpoint 1]\nParser done.\nmore\n[end]"), "[checkpoint 1] what is it?")
    assert find(nodes, "Parser done.", "start") == 0
    assert find(nodes, "[checkpoint 1]", "start") == 1


# ---- hits


def test_one_hit_wins_and_white_space_does_not_matter():
    nodes = surface("read\n\n  the file。", "write the file")
    assert find(nodes, " read the\tfile.", "start") == 0


def test_the_whole_text_beats_an_opening():
    nodes = surface("go on please", "go on", "go on now")
    assert find(nodes, "go on", "end") == 1
    assert find(nodes, "  go on \n", "end") == 1


def test_two_whole_texts_are_ambiguous_and_openings_are_not_listed():
    error = refused(surface("go on", "go on", "go on now"), "go on")
    assert "AMBIGUOUS: 2 messages" in error and "#1 user: go on\n#2 user: go on" in error and "#3" not in error


@pytest.mark.parametrize("anchor", ["#2", " #2\n", "#02"])
def test_a_number_always_works(anchor):
    nodes = surface("go on", "go on", ("tool", "x"))
    assert find(nodes, anchor, "end") == 1
    assert find(nodes, "#3", "end") == 2  # a tool result too: it snaps


def test_a_number_is_never_compared_with_texts():
    nodes = surface("#9 is the bug", "x", first=4)
    error = refused(nodes, "#9", "start")
    assert "start anchor #9 names no node" in error and "#4 user: #9 is the bug\n#5 user: x" in error
    assert find(nodes, "#9 is", "start") == 0
    assert "not the opening" in refused(nodes, "#" + "9" * 5000)


def test_excluded_nodes_count_only_when_nothing_else_is_hit():
    nodes = surface("go on", ("assistant", "go on"))
    assert find(nodes, "go on", "end", never={1}) == 0
    assert find(nodes[1:], "go on", "end", never={0}) == 0


# ---- errors


def test_no_hit_names_the_side_the_anchor_and_the_closest_nodes():
    nodes = surface(
        ("system", "parser tests"), "hello", "the parser has tests", ("assistant", "parser"), ("tool", "parser tests"),
        "tests of the parser, long ago", "The Parser again",
    )  # fmt: skip
    error = refused(nodes, "parser Tests fail " + "x" * 200, "start")
    assert f'The start anchor "{("parser Tests fail " + "x" * 200)[:120]}…" is not the opening' in error
    assert error.splitlines()[1:] == [
        "#3 user: the parser has tests",
        "#6 user: tests of the parser, long ago",
        "#4 assistant: parser",
    ]


def test_zero_scores_are_left_out_and_short_words_do_not_count():
    nodes = surface("it is on", "nothing here")
    assert closest(nodes, "it is on to") == []
    assert "name it as #N" in refused(nodes, "on it is")


@pytest.mark.parametrize(
    ("anchor", "best"),
    [
        ("修复 x", [2]),
        ("の", [3]),
        ("고쳐", [4]),
        ("wort4 größe", [5]),
        ("don't_know", [6]),
        ("修解析", [2, 7]),
        ("12", []),
    ],
)
def test_words_are_runs_of_three_and_single_cjk_characters(anchor, best):
    nodes = surface("plain", "请修复它", "これの", "고칩니다", "GRÖSSE wort4", "know", "解释")
    if anchor == "고쳐":
        nodes[3] = Node("user", (1,), "고 하나", number=4)
    assert [node.number for node in closest(nodes, anchor)] == best


def test_previews_begin_at_the_first_difference():
    opening = "Please read the file " + "very " * 60
    error = refused(surface(opening + "A" * 100, opening + "B", opening + "…"), "Please read")
    assert "AMBIGUOUS: 3 messages open with the end anchor" in error
    assert error.splitlines()[1:] == ["#1 user: …" + "A" * 80 + "…", "#2 user: …B", "#3 user: …..."]


def test_a_text_that_ends_where_the_others_go_on_is_shown_as_such():
    error = refused(surface("go on now", "go on"), "go o")
    assert error.splitlines()[1:] == ["#1 user: … now", "#2 user: …(ends here)"]


def test_at_most_twenty_hits_are_listed():
    error = refused(surface(*[f"step {i}" for i in range(30)]), "step")
    assert "AMBIGUOUS: 30 messages" in error and error.count("#") == 20
    assert error.endswith("(and 10 more)")


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [("abc", 3, "abc"), ("abcd", 3, "abc…"), ("ab\U0001f600d", 3, "ab\U0001f600…"), ("abe\u0301d", 3, "ab…"),
     ("a\U0001f468\u200d\U0001f469b", 3, "a…"), ("a\U0001f44d\U0001f3fdb", 2, "a…"), ("e" + "\u0301" * 9, 3, "e\u0301\u0301…")],
)  # fmt: skip
def test_no_character_is_torn(text, limit, shown):
    assert cut(text, limit) == shown


def test_a_difference_inside_a_character_shows_the_character():
    error = refused(surface("say e\u0301!", "say e\u0300!"), "say")
    assert error.splitlines()[1:] == ["#1 user: …e\u0301!", "#2 user: …e\u0300!"]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=8), st.text(max_size=12))
def test_a_hit_is_a_hit_and_every_error_is_short(texts, anchor):
    nodes = surface(*texts)
    try:
        node = nodes[find(nodes, anchor, "end")]
    except ArgumentError as error:
        assert len(str(error)) < 4000
    else:
        assert normalise(node.text).startswith(normalise(anchor)) or normalise(anchor) == f"#{node.number}"


# ---- size


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [" ", "\u3000a", "…", "\u0301", "ab ", "hello", "字", "\U0001f468\u200d"],
    ids=["spaces", "wide spaces", "dots", "marks", "short words", "one word", "Han", "joiners"],
)
def test_a_megabyte_takes_seconds_at_most(piece):
    text = piece * (10**6 // len(piece))
    nodes = surface(text + "1", text + "2", "small")
    start = time.process_time()
    if normalise(text):
        assert "AMBIGUOUS: 2" in refused(nodes, text)
    assert find(nodes, text + "2", "end") == 1
    assert "not the opening" in refused(nodes, text + "3")
    assert time.process_time() - start < 10


def test_a_thousand_nodes_are_searched_at_their_openings():
    body = "x y z " * 20_000
    nodes = surface(*[f"node {i} {body}" for i in range(1000)])
    start = time.process_time()
    assert find(nodes, "node 777 x", "end") == 777
    assert find(nodes, "#1000", "end") == 999
    assert time.process_time() - start < 1
