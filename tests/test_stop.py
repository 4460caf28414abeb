"""StopMatcher: stop strings across the borders of tokens, with the least hold-back."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.sampling import StopMatcher


def plain(text, stops):
    """(text before the stop, stopped) by looking at every prefix: the stop that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - len(max(hits, key=len))], True
    return text, False


def held(text, stops):
    """The longest suffix of text that is a proper prefix of a stop string."""
    return max((s[:n] for s in stops for n in range(len(s)) if text.endswith(s[:n])), key=len, default="")


def run(pieces, stops):
    """Feeds the pieces; checks after each that nothing more and nothing less than needed is held back."""
    matcher, out, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        out, seen = out + text, seen + piece
        if stopped:
            return out, True
        assert out + held(seen, stops) == seen
    return out + matcher.flush(), False


def splits(text):
    """Every way to cut text into pieces."""
    for n in range(len(text)):
        for cuts in combinations(range(1, len(text)), n):
            yield [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("a beta gamma", ["beta gamma"], "a "),
        ("x beta gammb", ["beta gamma"], None),
        ("hi\nUser: you", ["\nUser:"], "hi"),
        ("\n\nUser:", ["\nUser:"], "\n"),
        ("aaab aab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("abcd", ["bcd", "c"], "ab"),
        ("xabcx", ["bc", "abc"], "x"),
        ("abc", ["a", "abc"], ""),
        ("éé\U0001f600!", ["\U0001f600"], "éé"),
    ],
)
def test_every_split_gives_the_same_text(text, stops, before):
    want = (text, False) if before is None else (before, True)
    assert plain(text, stops) == want
    for pieces in splits(text):
        assert run(pieces, stops) == want, pieces


stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab\n", max_size=5), max_size=12), stop_lists)
def test_equals_the_plain_version(pieces, stops):
    assert run(pieces, stops) == plain("".join(pieces), stops)


def test_text_is_released_as_soon_as_it_is_certain():
    matcher = StopMatcher(["beta gamma", "\nUser:"])
    assert matcher.feed("one be") == ("one ", False)
    assert matcher.feed("t") == ("", False)
    assert matcher.feed("!") == ("bet!", False)
    assert matcher.feed("\n") == ("", False)
    assert matcher.feed("\nUse") == ("\n", False)
    assert matcher.feed("r") == ("", False)
    assert matcher.flush() == "\nUser" and matcher.flush() == ""


def test_nothing_to_stop_at_holds_nothing():
    matcher = StopMatcher([])
    assert matcher.feed("text") == ("text", False) and matcher.feed("") == ("", False) and matcher.flush() == ""


@pytest.mark.timeout(20)
def test_long_periodic_stops_take_linear_time():
    n = 100_000
    matcher = StopMatcher(["a" * n + "b", "a" * (n // 2) + "c"])
    text = "a" * (n - 1) + "d"
    out = "".join(matcher.feed(text[i : i + 5])[0] for i in range(0, n, 5))
    assert out == text
