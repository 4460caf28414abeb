"""Control boundaries: where the text of a summary ends, whatever the pieces are that it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import QWEN, tiny

from ds4.chat_formats import Boundary, get
from ds4.compaction.boundaries import ControlWatch

# DeepSeek V4: the ids of its own tokenizer; ordinary tokens of the fake vocabulary have ids below 1000
EOS, USER, ASSISTANT, THINK, THOUGHT, DSML = 1, 128803, 128804, 128821, 128822, 128825
V4 = (
    Boundary("end", "<｜end▁of▁sentence｜>", EOS),
    Boundary("role", "<｜User｜>", USER),
    Boundary("role", "<｜Assistant｜>", ASSISTANT),
    Boundary("think", "<think>", THINK),
    Boundary("think", "</think>", THOUGHT),
    Boundary("tool", "｜DSML｜", DSML, before="<"),
)
SPELLED = {boundary.id: boundary.text for boundary in V4}


def through(boundaries, pieces) -> tuple[str, ControlWatch]:
    """The text that goes through; `pieces`: texts of ordinary tokens, and ids of control tokens."""
    watch, out = ControlWatch(boundaries), ""
    for n, piece in enumerate(pieces):
        token = piece if isinstance(piece, int) else 500 + n
        out += watch.feed(token, SPELLED.get(piece, "") if isinstance(piece, int) else piece)
        if watch.ended:
            break
    return out + watch.flush(), watch


@pytest.mark.parametrize("control", [EOS, USER, ASSISTANT, THINK, THOUGHT, DSML])
@pytest.mark.parametrize(
    ("before", "expected"),
    [([], ""), (["Done."], "Done."), (["Do", "ne", ".\n\n"], "Done.\n\n")],
)
def test_a_control_token_ends_the_text_of_v4(control, before, expected):
    text, watch = through(V4, [*before, control, "behind it", EOS])
    assert text == expected
    assert watch.ended is not None and watch.ended.id == control


@pytest.mark.parametrize("pieces", [["Done.", "<"], ["Done.<"], ["Do", "ne.", "<"], ["Done", ".<"]])
def test_what_belongs_to_the_marker_of_v4_goes_with_it(pieces):
    """The `<` in front of the token came in an earlier token."""
    text, watch = through(V4, [*pieces, DSML, "tool_calls>"])
    assert text == "Done." and watch.ended.kind == "tool"


def test_only_one_sign_belongs_to_the_marker():
    assert through(V4, ["a <", "<", DSML])[0] == "a <"
    assert through(V4, ["<", DSML])[0] == ""
    assert through(V4, ["a < b", DSML])[0] == "a < b"


def test_a_sign_that_no_marker_follows_is_let_through():
    assert through(V4, ["if a <", " b: stop", EOS])[0] == "if a < b: stop"
    assert through(V4, ["a <", EOS])[0] == "a <"  # another boundary, to which it does not belong
    assert through(V4, ["a <"])[0] == "a <"


def test_a_sign_is_held_back_until_the_next_token_is_known():
    watch = ControlWatch(V4)
    assert watch.feed(500, "a <") == "a "
    assert watch.feed(501, "b") == "<b"


def test_a_marker_that_is_spelled_is_text_where_the_format_has_a_token():
    assert through(V4, ["a <｜DSML｜ b </think>", EOS])[0] == "a <｜DSML｜ b </think>"


def chatml(user=()) -> tuple[Boundary, ...]:
    return get("chatml", tiny(user=list(user))).boundaries


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<tool_call>"])
@pytest.mark.parametrize("text", ["", "Read a.txt.", "Read a.txt.\n\n", "a < b, <tool_cal, </thin"])
def test_text_markers_of_chatml_end_the_text_at_every_cut(marker, text):
    whole = f"{text}{marker}\n{{}}"
    for size in range(1, len(whole) + 1):
        out, watch = through(chatml(), [whole[i : i + size] for i in range(0, len(whole), size)])
        assert out == text and watch.ended.text == marker


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", *QWEN[:1], *QWEN[4:]])
def test_control_tokens_of_chatml_end_the_text(marker):
    format = get("chatml", tiny(user=QWEN))
    watch, out = ControlWatch(format.boundaries), ""
    stream = format.tokenizer.stream()
    for token in format.tokenizer.encode(f"Read <tool_ a.txt.{marker}behind", special=True):
        out += watch.feed(token, stream.feed(token))
    assert out == "Read <tool_ a.txt." and watch.ended.text == marker
    assert watch.flush() == ""


def test_the_call_of_llama3_ends_the_text():
    boundaries = (Boundary("tool", "<|python_tag|>", 7), Boundary("tool", '{"name":'))
    assert through(boundaries, ["It is ", '{"na', 'me"', ': "read"}'])[0] == "It is "
    assert through(boundaries, ['{"names"', ": 1}"])[0] == '{"names": 1}'


def test_after_the_end_nothing_is_free():
    watch = ControlWatch(V4)
    watch.feed(EOS, "")
    assert watch.feed(500, "more") == "" and watch.flush() == ""


TEXTS = st.lists(st.sampled_from(["<", "think", ">", "</", "tool_call", "a", "<t", "\n", "l>", "/think>"]), max_size=30)


@given(TEXTS, st.integers(1, 7))
def test_what_goes_through_does_not_depend_on_the_pieces(parts, size):
    text = "".join(parts)
    markers = ["<think>", "</think>", "<tool_call>"]
    places = [text.find(marker) for marker in markers if marker in text]
    expected = text[: min(places)] if places else text
    assert through(chatml(), parts)[0] == expected
    assert through(chatml(), [text[i : i + size] for i in range(0, len(text), size)])[0] == expected
