"""generate on the tiny llama, with small tokenizers made here: the session, the text, the ways it ends."""

import codecs
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ds4
from ds4.errors import ArgumentError, Cancelled, NoLogits, PoolFull
from ds4.sampling import Sampling, Token, generate

PROMPT = [5, 77, 130, 9, 301, 44, 2]
WARM = Sampling(temperature=1.5, seed=7)


class Pieces:
    """A tokenizer whose token i stands for pieces[i]; the ids behind stand for nothing."""

    def __init__(self, pieces, eos_ids=()):
        self.pieces, self.eos_ids = pieces, frozenset(eos_ids)

    def stream(self):
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return SimpleNamespace(feed=lambda i: utf8.decode(self.bytes_of(i)), flush=lambda: utf8.decode(b"", True))

    def bytes_of(self, i):
        return self.pieces[i] if i < len(self.pieces) else b""


BYTES = Pieces([bytes([i]) for i in range(256)])


class View:
    """A session with another tokenizer, whose eval can be made to fail."""

    def __init__(self, session, tokenizer=None, fail_at=None, error=None):
        self._session, self._fail_at, self._error = session, fail_at, error
        self.engine = SimpleNamespace(tokenizer=tokenizer)

    def __getattr__(self, name):
        return getattr(self._session, name)

    def eval(self, tokens):
        if self._session.pos == self._fail_at:
            raise self._error
        return self._session.eval(tokens)


@pytest.fixture(scope="module")
def engine():
    with ds4.Engine(Path(__file__).parent / "data" / "llama") as e:
        yield e


@pytest.fixture
def session(engine):
    with engine.session(ctx=256) as s:
        s.sync(PROMPT)
        yield s


def script(ids):
    """A mask that makes generate say exactly these ids."""
    return Sampling(mask=lambda so_far: [ids[len(so_far)]])


def say(session, pieces, **options):
    """Generates the pieces, one token each."""
    ids = list(range(len(pieces)))
    tokenizer = Pieces([p if isinstance(p, bytes) else p.encode() for p in pieces], options.pop("eos_ids", ()))
    return list(generate(View(session, tokenizer), script(ids), max_tokens=len(ids), **options))


def text_of(items):
    return "".join(t.text for t in items)


def is_like_fresh(engine, session):
    """O1: the logits are those of a session that was given the same tokens at once."""
    with engine.session(ctx=256) as fresh:
        fresh.sync([int(t) for t in session.tokens])
        return np.array_equal(fresh.logits, session.logits)


# ---- tokens and the session ----


def test_a_token_is_yielded_when_it_is_in_the_session(engine, session):
    said = []
    for t in generate(View(session), WARM, max_tokens=20):
        said.append(t.id)
        assert session.pos == len(PROMPT) + len(said)
        assert list(session.tokens) == PROMPT + said
        assert t.seed == 7 and t.logprob <= 0 and t.text == ""
        assert t.finish == ("length" if len(said) == 20 else None)
    assert len(said) == 20 and is_like_fresh(engine, session)
    session.check()


def test_greedy_is_the_argmax_of_the_logits(session):
    for t in generate(View(session), max_tokens=10):
        with session.fork(session.pos - 1) as before:
            before.refresh()
            x = before.logits.astype(np.float64)
        assert t.id == int(np.argmax(x))
        assert t.logprob == pytest.approx(x[t.id] - x.max() - np.log(np.exp(x - x.max()).sum()), abs=1e-5)


@pytest.mark.parametrize("n", [1, 5])
def test_break_leaves_the_session_behind_the_last_token(engine, session, n):
    said = [t.id for t in itertools.islice(generate(View(session), WARM), n)]
    assert list(session.tokens) == PROMPT + said
    assert is_like_fresh(engine, session)


def test_nothing_happens_until_it_is_read(session):
    generate(View(session), WARM).close()
    generate(View(session), WARM)
    assert list(session.tokens) == PROMPT


def test_the_session_method(session):
    with session.fork() as twin:
        a = [(t.id, t.logprob, t.finish) for t in session.generate(WARM, max_tokens=5, stop_ids=())]
        b = [(t.id, t.logprob, t.finish) for t in generate(View(twin), WARM, max_tokens=5)]
    assert a == b and len(a) == 5


def test_logits_are_refreshed_first(engine, session):
    want = [t.id for t in generate(View(session), WARM, max_tokens=5)]
    session.truncate(len(PROMPT))
    assert [t.id for t in generate(View(session), WARM, max_tokens=5)] == want
    with engine.session(ctx=256) as empty, pytest.raises(NoLogits):
        next(generate(View(empty), WARM))


def test_a_moved_session_is_refused(session):
    items = generate(View(session), WARM)
    next(items), next(items)
    session.truncate(len(PROMPT))
    with pytest.raises(ArgumentError, match=f"position {len(PROMPT) + 2} to {len(PROMPT)}"):
        next(items)
    assert list(session.tokens) == PROMPT


# ---- ends ----


def test_the_end_of_the_context(engine):
    with engine.session(ctx=12) as s:
        s.sync(PROMPT)
        items = list(generate(View(s), WARM))
        assert len(items) == 12 - len(PROMPT) and s.pos == 12
        assert [t.finish for t in items] == [None] * (len(items) - 1) + ["length"]
        tokens = list(s.tokens)
        assert list(generate(View(s), WARM)) == [Token(None, "", None, "length", 7)]
        assert list(s.tokens) == tokens


def test_max_tokens_0_says_so_and_does_nothing(session):
    session.truncate(3)
    assert list(generate(View(session), WARM, max_tokens=0)) == [Token(None, "", None, "length", 7)]
    assert list(session.tokens) == PROMPT[:3]


def test_stop_ids(engine, session):
    items = say(session, ["a", "b", "c", "d"], stop_ids=[2])
    assert [(t.id, t.text, t.finish) for t in items] == [(0, "a", None), (1, "b", None), (2, "", "stop")]
    assert list(session.tokens) == [*PROMPT, 0, 1, 2] and is_like_fresh(engine, session)


def test_end_of_text_ids_stop_unless_told_otherwise(session):
    assert [t.text for t in say(session, ["a", "</s>", "c"], eos_ids=[1])] == ["a", ""]
    assert [t.text for t in say(session, ["a", "</s>", "c"], eos_ids=[1], stop_ids=())] == ["a", "</s>", "c"]


def test_text_held_back_before_a_stop_id_comes_in_an_item_of_its_own(session):
    items = say(session, ["x be", "ta", "c"], stop="beta gamma", stop_ids=[2])
    assert [(t.id, t.text, t.finish) for t in items] == [
        (0, "x ", None), (1, "", None), (2, "", None), (None, "beta", "stop"),
    ]  # fmt: skip
    assert list(session.tokens) == [*PROMPT, 0, 1, 2] and items[-1].logprob is None


@pytest.mark.parametrize(
    "pieces",
    [
        ["x beta gamma y"],
        ["x ", "beta gamma"],
        ["x b", "eta", " ", "gamm", "a and"],
        list("x beta gamma"),
        ["x beta g", "amma"],
    ],
)
def test_stop_strings_across_tokens(engine, session, pieces):
    items = say(session, [*pieces, "more"], stop=["nothing", "beta gamma"])
    assert text_of(items) == "x " and [t.finish for t in items] == [None] * (len(pieces) - 1) + ["stop"]
    assert [t.id for t in items] == list(range(len(pieces)))
    assert list(session.tokens) == PROMPT + list(range(len(pieces)))  # the stop string's tokens stay
    assert is_like_fresh(engine, session)


def test_what_is_held_back_is_flushed_at_the_end(session):
    items = say(session, ["a", "b\n", "User"], stop="\nUser:")
    assert [(t.text, t.finish) for t in items] == [("a", None), ("b", None), ("\nUser", "length")]


def test_half_characters_wait(session):
    smile = "\U0001f600".encode()
    items = say(session, [b"a" + smile[:1], smile[1:3], smile[3:] + b"b", smile[:2]])
    assert [t.text for t in items] == ["a", "", "\U0001f600b", "\ufffd"]


def test_text_is_what_the_tokens_decode_to(session):
    items = list(generate(View(session, BYTES), Sampling(temperature=3, seed=3), max_tokens=60))
    data = b"".join(BYTES.bytes_of(t.id) for t in items)
    assert text_of(items) == data.decode("utf-8", errors="replace") and len(data) > 10


# ---- cancel and errors ----


def test_cancel_between_two_items(engine, session):
    s = Sampling(mask=lambda so_far: [len(so_far)], seed=5)
    items = generate(View(session, Pieces([b"be", b"ta"])), s, stop="beta gamma")
    next(items), next(items)
    session.cancel()
    assert list(items) == [Token(None, "beta", None, "cancelled", 5)]
    assert list(session.tokens) == [*PROMPT, 0, 1] and is_like_fresh(engine, session)


def test_cancel_before_an_evaluation_keeps_its_token(session):
    def mask(so_far):
        if len(so_far) == 2:
            session.cancel()
        return [len(so_far)]

    items = list(generate(View(session), Sampling(mask=mask)))
    assert [(t.id, t.finish) for t in items] == [(0, None), (1, None), (2, "cancelled")]
    assert list(session.tokens) == [*PROMPT, 0, 1, 2]
    assert [t.id for t in generate(View(session), script([4, 5]), max_tokens=2)] == [4, 5]  # the next one is free of it


def test_a_cancelled_evaluation_is_not_in_the_session(engine, session):
    view = View(session, Pieces([b"x", b"User"]), len(PROMPT) + 2, Cancelled("cancelled"))
    items = list(generate(view, Sampling(mask=lambda so_far: [len(so_far)], seed=5), stop="Users"))
    assert items[-1] == Token(None, "User", None, "cancelled", 5)
    assert [t.id for t in items] == [0, 1, None] and list(session.tokens) == [*PROMPT, 0, 1]
    assert is_like_fresh(engine, session)


def test_other_errors_pass_through(session):
    items = generate(View(session, None, len(PROMPT) + 1, PoolFull("full")), WARM)
    said = next(items).id
    with pytest.raises(PoolFull):
        next(items)
    assert list(session.tokens) == [*PROMPT, said]


# ---- seeds ----


def test_the_same_seed_gives_the_same_tokens_after_going_back(session):
    first = [t.id for t in generate(View(session), WARM, max_tokens=30)]
    session.truncate(len(PROMPT))
    assert [t.id for t in generate(View(session), WARM, max_tokens=30)] == first
    session.truncate(len(PROMPT) + 11)  # also from the middle: the number depends on the position alone
    assert [t.id for t in generate(View(session), WARM, max_tokens=19)] == first[11:]


def test_penalties_too_depend_on_the_tokens_alone(session):
    s = Sampling(temperature=0.8, seed=1, repetition=1.3, frequency=0.4, presence=0.2, repeat_last=20)
    first = [t.id for t in generate(View(session), s, max_tokens=30)]
    session.truncate(len(PROMPT) + 13)
    assert [t.id for t in generate(View(session), s, max_tokens=17)] == first[13:]


def test_a_seed_is_independent_of_neighbours(session):
    with session.fork() as alone, session.fork() as other:
        want = [t.id for t in generate(View(alone), WARM, max_tokens=20)]
        got = []
        neighbour = generate(View(other), Sampling(temperature=2), max_tokens=40)
        for t in generate(View(session), WARM, max_tokens=20):
            got.append(t.id)
            next(neighbour)
    assert got == want


def test_four_runs_at_a_high_temperature_differ(session):
    runs = []
    for _ in range(4):
        with session.fork() as s:
            items = list(generate(View(s), Sampling(temperature=1.5), max_tokens=12))
        assert len({t.seed for t in items}) == 1
        runs.append((items[0].seed, [t.id for t in items]))
    assert len({seed for seed, _ in runs}) == 4 and len({tuple(ids) for _, ids in runs}) == 4
    seed, ids = runs[2]
    assert [t.id for t in generate(View(session), Sampling(temperature=1.5, seed=seed), max_tokens=12)] == ids


def test_top_k_1_is_greedy(session):
    with session.fork() as twin:
        greedy = [t.id for t in generate(View(twin), max_tokens=15)]
    assert [t.id for t in generate(View(session), Sampling(temperature=1.5, top_k=1, seed=1), max_tokens=15)] == greedy


def test_a_snapshot_in_the_middle_continues_equally(engine, session, tmp_path):
    items = generate(View(session), WARM, max_tokens=30)
    for _ in range(10):
        next(items)
    session.save(tmp_path / "s")
    rest = [t.id for t in items]
    for _ in range(2):
        with engine.load(tmp_path / "s") as s:
            assert [t.id for t in generate(View(s), WARM, max_tokens=20)] == rest


# ---- penalties and masks ----


def test_penalties_count_the_prompt_and_what_was_said(session):
    said = [t.id for t in generate(View(session), Sampling(presence=1e6), max_tokens=60)]
    assert len(set(said + PROMPT)) == 60 + len(PROMPT)


def test_repeat_last_counts_only_the_end(session):
    plain = Sampling(logit_bias={3: 100})
    assert {t.id for t in generate(View(session), plain, max_tokens=5)} == {3}
    session.truncate(len(PROMPT))
    s = Sampling(logit_bias={3: 100, 4: 50}, presence=1000, repeat_last=1)
    assert [t.id for t in generate(View(session), s, max_tokens=6)] == [3, 4, 3, 4, 3, 4]


def test_the_mask_sees_what_was_said_since_the_start(session):
    asked = []

    def mask(so_far):
        asked.append(so_far)
        return {10 + len(so_far)}

    said = [t.id for t in generate(View(session), Sampling(mask=mask), max_tokens=4)]
    assert said == [10, 11, 12, 13]
    assert asked == [(), (10,), (10, 11), (10, 11, 12)]


@pytest.mark.parametrize("answer", [None, [], [512], [-1], ["a"], 3])
def test_a_wrong_mask_changes_nothing(session, answer):
    with pytest.raises(ArgumentError):
        next(generate(View(session), Sampling(mask=lambda so_far: answer)))
    assert list(session.tokens) == PROMPT


# ---- arguments ----


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": 0.7},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": 5},
        {"stop": b"a"},
        {"stop_ids": [-1]},
        {"stop_ids": ["a"]},
        {"stop_ids": 5},
        {"stop_ids": [1.5]},
    ],
)
def test_arguments_are_checked_at_once(session, options):
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))}"):
        generate(View(session, BYTES), **options)


def test_stop_strings_need_a_tokenizer(session):
    with pytest.raises(ArgumentError, match="tokenizer"):
        generate(View(session), stop="a")
