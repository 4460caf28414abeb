"""The summary pass: what ends it, what makes it fail, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import DATA, assert_same, settled
from surfaces import words
from tiny_tokenizer import CHATML, QWEN, tokenizer_json

import ds4
from ds4 import chat_formats, models
from ds4.chat_formats import ToolCall
from ds4.compaction import prompts, summary, whole
from ds4.compaction.policy import CompactionPolicy
from ds4.compaction.summary import PENALTY, Repetition, SummaryPass, echo_share, whole_sentences
from ds4.errors import Cancelled, NonFiniteError
from ds4.events import Prefill, Summary, SummaryDiscarded
from ds4.nodes import Writer, tokens_of

POLICY = CompactionPolicy()
LIMITS = POLICY.limits(2048, 60)  # a summary of 256 tokens
ASKED = "Write down what was done. Reason: a test."
GOOD = "The file a.txt was read up to line 40, and it holds a list of names."


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[ds4.Engine]:
    folder = tmp_path_factory.mktemp("summary") / "tiny"
    shutil.copytree(DATA / "llama", folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(CHATML, QWEN)))
    (folder / "tokenizer_config.json").write_text("{}")
    with ds4.Engine(folder, threads=1, pool_tokens=16384) as engine:
        yield engine


class Pass:
    """A pass on a session at BOTTOM, with a script in the place of the model's choice: each element of `tries` is the
    text that it writes, and ids of control tokens."""

    def __init__(
        self, engine, monkeypatch, *tries: Sequence[str | int] | str, policy=POLICY, limits=LIMITS, accept=None
    ):
        self.format = chat_formats.get("chatml", engine.tokenizer)
        self.session = engine.session(2048)
        self.session.eval(self.format.render(chat_formats.Message("user", "Read a.txt to its end.")))
        self.bottom, self.before = self.session.mark(), self.session.tokens
        self.logits = self.session.logits
        self.asked: list[tuple[float, list[int]]] = []  # (penalty, history) of every choice
        self.scripts = [self._ids(each) for each in tries]
        monkeypatch.setattr(summary, "sample", self._sample)
        writer = Writer(self.format)
        request = writer.user(ASKED, first=False)
        self.prompt = [*request.ids, *self.format.generation_prefix(False)]
        self.work = SummaryPass(
            self.session, self.format, self.prompt, limits, policy,
            request_ids=engine.tokenizer.encode(ASKED), accept=accept or (lambda text: None),
        )  # fmt: skip

    def _ids(self, script: Sequence[str | int] | str) -> list[int]:
        parts = [script] if isinstance(script, str) else script
        encode = self.format.tokenizer.encode
        return [i for part in parts for i in ([part] if isinstance(part, int) else encode(part))]

    def _sample(self, logits, sampling, history=(), position=0):
        assert len(logits) == self.session.engine.vocab and position == self.session.pos
        assert sampling.temperature == 0
        self.asked.append((sampling.repetition, list(history)))
        script = self.scripts[min(len(self.scripts) - 1, int(sampling.repetition == PENALTY))]
        done = self.session.pos - len(self.before) - len(self.prompt)
        return (script[done] if done < len(script) else self.format.tokenizer.control["<|im_end|>"]), 0.0

    def run(self):
        """(events, result)"""
        events, work = [], self.work.run()
        while True:
            try:
                events.append(next(work))
            except StopIteration as stop:
                self.work.close()
                return events, stop.value

    def assert_nothing_left(self):
        """After the caller's rollback the session is what it was, with the bits of one that never tried."""
        self.work.close()
        self.session.rollback(self.bottom)
        assert self.session.tokens == self.before
        assert np.array_equal(self.session.logits, self.logits)
        assert_same(self.session, self.before)
        self.bottom.release()
        self.session.close()


@pytest.fixture
def make(engine, monkeypatch) -> Iterator:
    """After the test every pass has left nothing in its session, and nothing in the pool (O2)."""
    start, made = settled(engine.ledger()), []

    def start_pass(*tries, **options):
        made.append(Pass(engine, monkeypatch, *tries, **options))
        return made[-1]

    yield start_pass
    monkeypatch.undo()
    while made:
        made.pop().assert_nothing_left()
    gc.collect()  # logits that a traceback still holds
    assert settled(engine.ledger()) == start


def streamed(events) -> str:
    """The text of the last try."""
    last = max((i for i, event in enumerate(events) if isinstance(event, SummaryDiscarded)), default=-1)
    return "".join(event.text for event in events[last + 1 :] if isinstance(event, Summary))


def discarded(events) -> list[str]:
    return [event.reason for event in events if isinstance(event, SummaryDiscarded)]


# ---- a pass that goes well


def test_a_summary_is_what_the_model_wrote(make):
    one = make(GOOD)
    events, result = one.run()
    assert (result.text, result.step, result.why) == (GOOD, "model", "")
    assert streamed(events) == GOOD
    assert [(e.done, e.total) for e in events if isinstance(e, Prefill)] == [(len(one.prompt), len(one.prompt))]
    assert one.session.tokens == one.before + one.prompt + one.scripts[0]
    assert result.tokens == len(one.scripts[0])


def test_white_space_around_it_is_no_part_of_it(make):
    assert make(f"\n\n {GOOD}\n\n").run()[1].text == GOOD


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>"])
def test_L42_it_ends_before_a_boundary_and_runs_no_tool(make, engine, marker):
    # smallest input: tools on in summary call
    one = make([GOOD, "\n", *engine.tokenizer.encode(marker, special=True), "behind it"])
    events, result = one.run()
    assert result.text == GOOD and result.step == "model" and "behind" not in streamed(events)
    assert one.session.tokens == one.before + one.prompt + one._ids([GOOD, "\n"])


def test_a_long_request_comes_in_pieces(make):
    one = make(GOOD)
    one.work.prompt = one.prompt = one._ids(words(150)) + one.prompt
    events, result = one.run()
    done = [event.done for event in events if isinstance(event, Prefill)]
    assert len(done) > 2 and done == sorted(done) and done[-1] == len(one.prompt)
    assert result.text == GOOD


# ---- a pass that fails


def test_L19_L43_an_empty_summary_is_none(make):
    # smallest input: summariser returns ""
    for script in ([], " \n\n "):
        events, result = make(script).run()
        assert discarded(events) == ["it is empty"] * 2
        assert (result.text, result.step, result.why) == ("", "ledger", "it is empty")


def test_an_empty_first_try_is_followed_by_a_second(make):
    one = make([], GOOD)
    events, result = one.run()
    assert (result.text, result.step) == (GOOD, "retry")
    assert discarded(events) == ["it is empty"] and streamed(events) == GOOD


def test_the_second_try_evaluates_nothing_again_and_penalises_only_its_own_words(make, monkeypatch):
    loop = "and on " * 40
    one = make(loop, f"{words(45)}.", limits=replace(LIMITS, summary=400))
    evaluated = []
    real = one.session.eval
    monkeypatch.setattr(one.session, "eval", lambda tokens, **more: (evaluated.extend(tokens), real(tokens, **more))[1])
    events, result = one.run()
    assert result.step == "retry" and len(discarded(events)) == 1 and "repeats itself every" in discarded(events)[0]
    first = len([1 for penalty, _ in one.asked if penalty == 1])
    assert evaluated == one.prompt + one.scripts[0][:first] + one.scripts[1][: result.tokens - first]
    second = [history for penalty, history in one.asked if penalty == PENALTY]
    assert second == [one.scripts[1][max(0, i - 256) : i] for i in range(len(second))]
    assert len(second) >= 256


def test_a_loop_ends_the_pass_at_once(make):
    one = make("a b c d e f g: " + "abc" * 200, GOOD)
    events, result = one.run()
    first = len([1 for penalty, _ in one.asked if penalty == 1])
    head = len(one._ids("a b c d e f g: "))
    assert first <= head + 48
    assert discarded(events) == ["it repeats itself every 3 tokens"]
    assert result.step == "retry"


def test_a_summary_that_echoes_the_request_is_none(make):
    events, result = make(f"{ASKED} And more.", GOOD).run()
    assert result.step == "retry" and "echoes the request" in discarded(events)[0]


def test_L30_a_checkpoint_that_would_not_be_smaller_is_none(make):
    # smallest input: span 957 tokens, model always writes ~900 + 98 frame
    seen = []

    def accept(text):
        seen.append(text)
        return "the checkpoint has 1008 tokens and would stand for 957" if "list" in text else None

    events, result = make(GOOD, "Read a.txt up to line 40.", accept=accept).run()
    assert result.step == "retry" and result.text == "Read a.txt up to line 40."
    assert discarded(events) == ["the checkpoint has 1008 tokens and would stand for 957"]
    assert seen == [GOOD, "Read a.txt up to line 40."]
    assert make(GOOD, GOOD, accept=accept).run()[1].step == "ledger"


def test_at_the_limit_whole_sentences_stay(make):
    text = f"{GOOD} {GOOD} {words(200)}"
    one = make(text)
    events, result = one.run()
    assert result.text == f"{GOOD} {GOOD}" and result.step == "model"
    assert result.tokens == LIMITS.summary == 256
    assert text.startswith(streamed(events)) and len(streamed(events)) > len(result.text)


@pytest.mark.parametrize("text", [words(200), f"Yes. {words(200)}"])
def test_a_cut_summary_without_enough_sentences_is_none(make, text):
    events, result = make(text, GOOD).run()
    assert result.step == "retry" and "whole sentences have only" in discarded(events)[0]


def test_a_policy_may_begin_with_the_penalty(make):
    one = make(GOOD, "Something else.", policy=CompactionPolicy(summary_penalty=True))
    _, result = one.run()
    assert (result.text, result.step) == ("Something else.", "retry")
    assert {penalty for penalty, _ in one.asked} == {PENALTY}


def test_L29_L33_without_room_the_model_is_not_asked(make):
    # smallest input: used = 100 % of ctx when compaction starts
    one = make(GOOD)
    one.work.limits = CompactionPolicy().limits(len(one.before) + len(one.prompt) + 255, 60)
    events, result = one.run()
    assert events == [] and result.step == "ledger"
    assert result.why == "only 255 tokens of room, 256 are needed"
    assert one.session.tokens == one.before


# ---- ways out


@pytest.mark.parametrize("after", [0, 1, 5, 30])
def test_a_cancel_leaves_what_a_rollback_takes_away(make, after):
    one = make(GOOD)
    work = one.work.run()
    with pytest.raises(Cancelled):
        for n, _ in enumerate(work):
            if n == after:
                one.session.cancel()
    assert one.session.tokens == (one.before + one.prompt + one.scripts[0])[: one.session.pos]


def test_a_cancel_while_a_token_is_chosen(make, monkeypatch):
    one = make(GOOD)
    choose = summary.sample

    def cancelling(*arguments):
        if len(one.asked) == 7:
            one.session.cancel()
        return choose(*arguments)

    monkeypatch.setattr(summary, "sample", cancelling)
    with pytest.raises(Cancelled):
        one.run()


def test_stop_ends_it_before_the_first_token(make):
    one = make(GOOD)
    with pytest.raises(Cancelled):
        list(one.work.run(lambda: True))
    assert one.run()[1].text == GOOD


@pytest.mark.parametrize("way", ["close", "stop", "cancel"])
def test_a_pass_that_was_stopped_goes_on_where_it_was(make, way):
    one = make(words(30), f"{GOOD} {words(5)}.", accept=lambda text: "no" if "word29" in text else None)
    pieces, stopped = [], [False]
    while True:
        stopped[0] = False
        work = one.work.run(lambda: stopped[0])
        try:
            while True:
                pieces.append(next(work))
                if len(pieces) % 7 == 0:
                    if way == "close":
                        work.close()
                        break
                    stopped[0] = way == "stop"
                    if way == "cancel":
                        one.session.cancel()
        except Cancelled:
            continue
        except StopIteration as stop:
            result = stop.value
            break
    assert (result.text, result.step) == (f"{GOOD} {words(5)}.", "retry")
    assert streamed(pieces) == result.text
    assert result.tokens == sum(map(len, one.scripts))
    assert one.session.tokens == one.before + one.prompt + one.scripts[1]
    assert list(one.work.run()) == []  # a result stays one


def test_numbers_that_are_none_are_an_error(make, engine, monkeypatch):
    one = make(GOOD)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(ds4.Session, "logits", np.full(engine.vocab, np.nan, np.float32))
        with pytest.raises(NonFiniteError):
            one.run()
    assert one.session.pos == len(one.before) + len(one.prompt)


def test_a_pass_is_closed_in_the_middle(make):
    one = make(GOOD)
    work = one.work.run()
    next(work)
    next(work)
    work.close()
    one.work.close()
    one.work.close()


# ---- what is noticed


def periodic(ids: Sequence[int]) -> int:
    """The rule as it is written: the smallest p of 1..128 with which the last max(3p, 48) tokens are periodic."""
    for p in range(1, 129):
        n = max(3 * p, 48)
        last = ids[-n:]
        if len(ids) >= n and all(last[i] == last[i - p] for i in range(p, n)):
            return p
    return 0


@given(
    st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=130), st.integers(0, 9)
)
def test_a_loop_is_noticed_at_the_token_that_completes_it(head, period, tail):
    ids = head + period * (48 // len(period) + 4) + [7] * tail
    watch = Repetition()
    for n in range(1, len(ids) + 1):
        assert watch.feed(ids[n - 1]) == periodic(ids[:n])


@pytest.mark.parametrize("period", [1, 2, 3, 15, 16, 17, 100, 127, 128])
def test_every_period_is_seen_after_three_rounds_or_48_tokens(period):
    watch, n = Repetition(), 0
    while not (found := watch.feed(n % period + 1000)):
        n += 1
    assert (found, n + 1) == (period, max(3 * period, 48))


def test_a_period_of_129_is_no_loop():
    watch = Repetition()
    assert not any(watch.feed(n % 129) for n in range(2000))


def test_echo_is_a_share_of_four_token_sequences():
    assert echo_share([1, 2, 3, 4, 5], [1, 2, 3, 4, 9]) == 0.5
    assert echo_share([1, 2, 3], [1, 2, 3]) == 0
    assert echo_share([], [1]) == 0
    assert echo_share(list(range(10)), list(range(10))) == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One. Two thr", "One."),
        ("One! Two? Thr", "One! Two?"),
        ('He said "yes." Then', 'He said "yes."'),
        ("See main.py for mo", ""),
        ("See main.py for more. And ut", "See main.py for more."),
        ("First line\nsecond li", "First line"),
        ("Steps:\n1. Read it.\n2. Wri", "Steps:\n1. Read it."),
        ("读完了。然后", "读完了。"),
        ("nothing", ""),
        ("", ""),
        ("Wait… and", "Wait…"),
    ],
)
def test_whole_sentences(text, kept):
    assert whole_sentences(text) == kept


# ---- the request


def test_the_request_says_what_it_must():
    text = prompts.request("full", "the context is\nnearly full", 300)
    for said in ("not the user", "summary", "what the user wants", "condition", "files", "commands", "decisions",
                 "rejected", "bugs", "next", "not carried out", "path and range", "Invent nothing", "No tool",
                 "no thinking", "no markup", "300 words", "stop"):  # fmt: skip
        assert said in text
    assert text.split("\n")[-1] == "Reason: the context is nearly full."
    short = prompts.request("short", "the context is nearly full", 300)
    assert "not the user" in short and "150 words" in short
    assert short.split("\n")[-1] == "(Why now: the context is nearly full.)"
    assert "\n-" not in short and "#" not in short and short.count("\n") == 1
    for form, reason in (("full", "\nReason: a test."), ("short", "\n(Why now: a test.)")):
        asked = prompts.request(form, "a test", 100, update="Read a.txt.")
        assert "Read a.txt." in asked and "up to date" in asked and asked.endswith(reason)
        assert "heckpoint 7" not in asked
        asked = prompts.request(form, "a test", 100, earlier=7)
        assert "heckpoint 7" in asked and "up to date" in asked


# ---- on the real model


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Iterator[ds4.Engine]:
    with ds4.Engine(smollm2_path, pool_tokens=8192) as engine:
        yield engine


NOTES = """\
A library for programs that keep a language model's context and move it back and forth. After a cut, a copy or a
failure the numbers are the same bits as if the rest had never been read. A session holds tokens and rows; a mark
remembers a position, and going back to it costs microseconds. A snapshot is one file with checksums.
What is missing: the page about sampling has no example; the table of formats is older than the code; nobody has
measured how long saving takes on a slow disk. Open questions: whether the archive may be compressed, and who reads
the log when two programs want the same folder.
"""


def conversation(writer: Writer):
    return [
        *writer.opening(),
        writer.user("Do not change any file, deadline Friday 14:00. Read notes.txt and say what is in it.", first=True),
        writer.assistant("", [ToolCall("read", {"path": "notes.txt", "start": 1, "lines": 40}, "c1")]),
        writer.result("c1", "notes.txt lines 1-40 of 90\n" + NOTES),
        writer.assistant("The first part describes a runtime whose context can be rolled back. I have read 40 lines."),
    ]


@pytest.mark.model
@pytest.mark.parametrize("form", ["short", "full"])
def test_smollm2_writes_a_summary_that_can_be_used(smollm2, form):
    format = chat_formats.get("chatml", smollm2.tokenizer)
    writer = Writer(format, "You are a helpful assistant.")
    nodes = conversation(writer)
    policy = CompactionPolicy(request=form).for_model(models.load("smollm2-135m").compaction)
    limits = policy.limits(2048, whole.request_size(writer, policy))
    request = whole.request_for(nodes, writer, limits, policy, "the context is nearly full")
    assert len(smollm2.tokenizer.encode(prompts.request("short", "the context is nearly full", 999))) <= 60
    with smollm2.session(2048) as session:
        session.eval(tokens_of(nodes))
        before, logits = session.tokens, session.logits
        with session.mark() as bottom:
            work = SummaryPass(
                session, format, request.prompt, limits, policy, request_ids=request.ids, accept=lambda text: None
            )  # fmt: skip
            events = list(work.run())
            result = next(iter(_returned(work)))
            work.close()
            session.rollback(bottom)
        assert session.tokens == before and np.array_equal(session.logits, logits)
    if form == "full" and result.step == "ledger":  # a model of this size may loop over the long request
        assert not result.text and result.why
        return
    assert result.step == "retry" and len(smollm2.tokenizer.encode(result.text)) >= 16
    assert streamed(events).strip().startswith(result.text) and "<" not in result.text
    assert echo_share(smollm2.tokenizer.encode(result.text), request.ids) <= 0.3


def _returned(work: SummaryPass):
    try:
        while True:
            next(work.run())
    except StopIteration as stop:
        yield stop.value


@pytest.mark.model
def test_the_full_request_leaves_room_from_2048_on(smollm2):
    writer = Writer(chat_formats.get("chatml", smollm2.tokenizer))
    for form in ("full", "short"):
        policy = CompactionPolicy(request=form)
        for ctx in (2048, 4096, 100_000):
            limits = policy.limits(ctx, whole.request_size(writer, policy))
            assert ctx - limits.generation > limits.soft
            limits.check(400)
