"""The tools of span compaction: schema, arguments, drafts, results, the archive as text, and the nudge."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny

from ds4.chat_formats import ToolCall
from ds4.chat_formats.chatml import ChatML
from ds4.compaction import spantool
from ds4.compaction.span import plan_span, resolve
from ds4.compaction.spantool import Drafts, Request, SpanOptions, error_text, expand, nudge, render, result
from ds4.errors import ArgumentError
from ds4.node_json import to_json
from ds4.nodes import Node, Writer

WRITER = Writer(ChatML(tiny()), "Be brief.", [spantool.SCHEMA, spantool.EXPAND_SCHEMA])


# ---- schemas and arguments


@pytest.mark.parametrize("schema", [spantool.SCHEMA, spantool.EXPAND_SCHEMA], ids=["context_compact", "expand"])
def test_a_schema_is_one_and_short(schema):
    jsonschema.Draft202012Validator.check_schema(schema["parameters"])
    assert len(json.dumps(schema)) < 1300


def test_the_names_and_the_required_ones():
    assert spantool.SCHEMA["name"] == "context_compact"
    parameters = spantool.SCHEMA["parameters"]
    assert list(parameters["properties"]) == ["startAnchor", "endAnchor", "summary", "includeActive"]
    assert parameters["required"] == ["endAnchor", "summary"]


@pytest.mark.parametrize(
    "word",
    ["verbatim", "#N", "step is done", "wrong direction", "stale", "smaller", "in progress", "newest instruction"],
)
def test_the_description_tells_the_model(word):
    assert word in spantool.SCHEMA["description"]


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        ({"endAnchor": "e", "summary": "s"}, Request("e", "s")),
        ({"startAnchor": "a", "endAnchor": "e", "summary": "s", "includeActive": True}, Request("e", "s", "a", True)),
        ({"startAnchor": None, "endAnchor": "e", "summary": "s", "includeActive": None}, Request("e", "s")),
        ({"summary": "s"}, Request("", "s")),  # `resolve` says that it is needed
    ],
)
def test_arguments_are_read(arguments, request_):
    assert Request.read(arguments) == request_


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"endAnchor": "e"}, "summary is needed"),
        ({"endAnchor": "e", "summary": None}, "summary is needed"),
        ({"endAnchor": 3, "summary": "s"}, "endAnchor is text, not 3"),
        ({"endAnchor": "e", "summary": ["s"] * 1000}, 'summary is text, not ["s"'),
        ({"endAnchor": "e", "summary": "s", "includeActive": "yes"}, 'includeActive is true or false, not "yes"'),
        ({"endAnchor": "e", "summary": "s", "includeActive": 1}, "includeActive is true or false"),
        ({"end": "e", "summary": "s"}, "no argument 'end'; its arguments are startAnchor, endAnchor"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, words):
    with pytest.raises(ArgumentError) as caught:
        Request.read(arguments)
    assert words in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, SpanOptions()),
        ({"autoArchive": False}, SpanOptions(False)),
        ({"volumeNudgeTokens": 0}, SpanOptions(True, 0)),
    ],
)
def test_options(values, options):
    assert SpanOptions.from_mapping(values) == options


def test_the_options_are_on_and_50000_unless_said_otherwise():
    assert (SpanOptions().auto_archive, SpanOptions().volume_nudge_tokens) == (True, 50_000)


@pytest.mark.parametrize(
    "values", [{"autoArchive": 1}, {"volumeNudgeTokens": -1}, {"volumeNudgeTokens": True}, {"nudge": 5}]
)
def test_wrong_options_are_refused_by_name(values):
    with pytest.raises(ArgumentError, match=next(iter(values))):
        SpanOptions.from_mapping(values)


# ---- drafts


def test_a_draft_can_be_named_instead_of_repeated():
    drafts = Drafts()
    first, second = drafts.keep("long text"), drafts.keep("another")
    assert (first, second, drafts.keep("long text")) == (1, 2, 1)
    assert drafts.text(spantool.draft_name(1)) == drafts.text(" Draft 1\n") == "long text"
    assert drafts.text("draft 2") == "another"
    for own in ("a draft 1", "draft 1 is good", "draft", "draft one", "# State\ndraft 1", "draft 1" + "0" * 20):
        assert drafts.text(own) == own


def test_a_draft_that_there_is_not_and_a_stub_are_refused():
    drafts = Drafts()
    with pytest.raises(ArgumentError, match=r"no draft 3 \(kept: none\)"):
        drafts.text("draft 3")
    drafts.keep("x")
    with pytest.raises(ArgumentError, match=r"no draft 3 \(kept: draft 1\)"):
        drafts.text("draft 3")
    with pytest.raises(ArgumentError, match="write the complete summary"):
        drafts.text("stored as checkpoint 3")


# ---- results


def surface() -> list[Node]:
    nodes = [
        *WRITER.opening(),
        WRITER.user("start", first=True),
        WRITER.assistant("words " * 60),
        WRITER.user("go on", first=False),
    ]
    return [Node(**{**node.__dict__, "number": number}) for number, node in enumerate(nodes, 1)]


def test_a_result_names_what_was_really_covered():
    span = resolve(surface(), None, "#3")
    found = result(span, 4, "/s/000001.jsonl")
    hint = found["archived"].pop("retrievalHint")
    assert found == {
        "ok": True,
        "archived": {"locator": "/s/000001.jsonl"},
        "covered": {"first": 2, "last": 3, "nodes": 2, "tokens": span.tokens},
        "checkpoint": 4,
    }
    assert "expand" in hint and "/s/000001.jsonl" in hint


def test_a_result_without_an_archive_says_why():
    span = resolve(surface(), None, "#3")
    failed = result(span, 1, None, "the disk is full")
    assert failed["archived"] is None and failed["archiveError"] == "the disk is full"
    switched_off = result(span, 1, None)
    assert switched_off["archived"] is None and "archiveError" not in switched_off


def test_an_error_says_what_would_work_and_where_the_summary_is():
    with pytest.raises(ArgumentError) as caught:
        resolve(surface(), None, "go")
    plain = error_text(caught.value)
    assert plain == f"context_compact failed and nothing has changed. {caught.value}"
    kept = error_text("x", draft=3)
    assert '"summary": "draft 3"' in kept


# ---- expand


def archive() -> list[dict]:
    span = resolve(surface(), None, "#3")
    checkpoint = plan_span(surface(), span, WRITER, None, "Inner.", number=1, locator=None).checkpoint
    calls = (ToolCall("read", {"path": "a é.c"}, "c1"), ToolCall("list", {}, "c2"))
    nodes = [
        Node(**{**checkpoint.__dict__, "number": 12}),  # made later than what stands behind it
        WRITER.user("hello\n\nthere", first=False),
        WRITER.assistant("I read.", calls, "hm"),
        WRITER.result("c1", "one\ntwo", 0, 2),
        WRITER.result("c2", "", 1, 2),
    ]
    return [to_json(Node(**{**node.__dict__, "number": node.number or number})) for number, node in enumerate(nodes, 4)]


def test_archived_nodes_are_readable_text():
    text = render(archive()[1:])
    assert text == (
        "#5 user\nhello\n\nthere\n\n"
        "#6 assistant\n[thinking] hm\nI read.\n"
        '[call c1] read {"path": "a é.c"}\n[call c2] list {}\n\n'
        "#7 tool to call c1\none\ntwo\n\n"
        "#8 tool to call c2\n"
    )
    assert render(archive()[:1]).startswith("#12 user (checkpoint)\n")


@pytest.mark.parametrize(
    ("first", "last", "numbers"),
    [(None, None, [12, 5, 6, 7, 8]), (6, None, [6, 7, 8]), (None, 5, [12, 5]), (12, 6, [12, 5, 6]), (7, 7, [7])],
)
def test_a_range_goes_by_place(first, last, numbers):
    text = expand(archive(), first, last)
    assert [int(n) for n in re.findall(r"^#(\d+) ", text, re.M)] == numbers
    assert text.endswith(f"[end of #{numbers[0]} to #{numbers[-1]}]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"first": 9}, "no message #9; it has #12, #5, #6, #7, #8"),
        ({"last": 9}, "no message #9"),
        ({"first": 7, "last": 5}, "from #7 to #5 in this order"),
        ({"offset": 10**6}, "offset 1000000 is outside"),
        ({"offset": -1}, "offset -1 is outside"),
    ],
)
def test_a_range_that_is_not_there_is_refused(arguments, words):
    with pytest.raises(ArgumentError) as caught:
        expand(archive(), **arguments)
    assert words in str(caught.value)


def test_an_empty_archive_and_a_long_one():
    assert expand([]) == "The archive is empty."
    lines = [{"number": n, "role": "user", "text": "x"} for n in range(1000)]
    with pytest.raises(ArgumentError) as caught:
        expand(lines, first=2000)
    assert str(caught.value).endswith("#49, ....")


@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=6), limit=st.integers(1, 50))
def test_the_parts_of_an_archive_are_the_whole(texts, limit):
    lines = [{"number": n, "role": "user", "text": text} for n, text in enumerate(texts, 1)]
    offset, read = 0, ""
    for _ in range(1000):
        part = expand(lines, offset=offset, limit=limit)
        body, _, foot = part.rpartition("\n[")
        assert len(body) <= limit
        match = re.search(r"go on with offset (\d+)\]$", foot)
        if match is None:
            break
        assert int(match[1]) > offset
        whole = render(lines)[offset : int(match[1])]
        assert whole.rstrip("\n") == body
        read, offset = read + whole, int(match[1])
    assert (read + render(lines)[offset:]) == render(lines)
    assert foot.startswith("end of #1")


# ---- the nudge


@pytest.mark.parametrize(
    ("size", "last", "bucket", "grown"),
    [
        (49_999, 0, 50_000, None), (50_000, 0, 50_000, 50_000), (99_999, 0, 50_000, 50_000), (100_000, 0, 50_000, 100_000),
        (60_000, 20_000, 50_000, None), (70_000, 20_000, 50_000, 50_000), (10, 500, 50_000, None), (10**6, 0, 0, None),
    ],
)  # fmt: skip
def test_a_nudge_comes_with_each_bucket(size, last, bucket, grown):
    text = nudge(size, last, bucket)
    assert (text is None) == (grown is None)
    assert text is None or (f"grown by {grown} tokens" in text and "\n" not in text)


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 10**5))
def test_its_text_changes_only_at_the_edges(size, last, bucket):
    if (size + 1 - last) % bucket:
        assert nudge(size, last, bucket) == nudge(size + 1, last, bucket)
    else:
        assert nudge(size, last, bucket) != nudge(size + 1, last, bucket) or size + 1 <= last
