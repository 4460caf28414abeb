"""K5: when logits are valid, that they are never stale, and that an array which was handed out stays as it was."""

from __future__ import annotations

import gc

import pytest
from oracle import NEEDS_TEST_BUILD, TEST_BUILD, TOYS, assert_same, cancel_at, fresh_logits, make_engine, some_tokens

from ds4.errors import (
    Cancelled,
    NoLogits,
)

every_toy = pytest.mark.parametrize("toy", TOYS)
injected = pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
BASE = some_tokens(100)
MORE = some_tokens(30, 2)


# ---- K5 ----------------------------------------------------------------------------------------------------------


def interrupted(session, call):
    with pytest.raises(Cancelled):
        call(session)


LOGITS = [  # what is done to a session of 100 tokens with valid logits, and whether they are valid then
    ("eval", lambda s: s.eval([1]), True),
    ("eval all", lambda s: s.eval([1, 2], logits="all"), True),
    ("eval none", lambda s: s.eval([1], logits=None), False),
    ("eval nothing", lambda s: s.eval([]), True),
    ("eval nothing, no logits", lambda s: s.eval([], logits=None), True),
    ("score", lambda s: s.score([1, 2]), True),
    ("sync equal", lambda s: s.sync(BASE), True),
    ("sync shorter", lambda s: s.sync(BASE[:50]), True),
    ("sync longer", lambda s: s.sync([*BASE, 1]), True),
    ("sync to nothing", lambda s: s.sync([]), False),
    ("truncate here", lambda s: s.truncate(100), True),
    ("truncate", lambda s: s.truncate(99), False),
    ("truncate to 0", lambda s: s.truncate(0), False),
    ("clear", lambda s: s.clear(), False),
    ("truncate and sync", lambda s: (s.truncate(99), s.sync(BASE[:99])), True),
    ("truncate and refresh", lambda s: (s.truncate(99), s.refresh()), True),
    ("mark", lambda s: s.mark(), True),
    ("mark, eval none, rollback", lambda s: (m := s.mark(), s.eval([1], logits=None), s.rollback(m)), True),
    ("mark without, eval, rollback", lambda s: (s.truncate(99), m := s.mark(), s.eval([1]), s.rollback(m)), False),
    ("reserve", lambda s: s.reserve(10), True),
    ("batch", lambda s: s.engine.eval_batch([(s, [1])]), True),
    ("cancelled before the first chunk", lambda s: (s.cancel(), s.eval([])), True),
    (
        "cancelled after a chunk",
        lambda s: interrupted(s, lambda s: s.eval(MORE, chunk=5, progress=cancel_at(s, 5))),
        False,
    ),
    ("cancelled at the end", lambda s: s.eval(MORE, chunk=5, progress=cancel_at(s, 30)), True),
]


@pytest.mark.parametrize("call, valid", [case[1:] for case in LOGITS], ids=[case[0] for case in LOGITS])
@pytest.mark.parametrize("toy", ["plain", "both"])
def test_when_logits_are_valid(engine_of, toy, call, valid):
    with engine_of(toy=toy).session() as session:
        session.eval(BASE)
        array = session.logits
        held = array.tobytes()
        call(session)
        assert session.logits_valid == valid
        if valid:
            assert session.logits.tobytes() == fresh_logits(session.engine, session.tokens)
        else:
            with pytest.raises(NoLogits):
                session.logits  # noqa: B018
        assert array.tobytes() == held, "an array that was handed out has changed"
        with pytest.raises(ValueError):
            array[0] = 0
        assert_same(session, session.tokens)


def test_forks_share_logits_where_the_session_stands(engine_of):
    with engine_of().session() as session:
        session.eval(BASE)
        here, also_here, before = session.fork(), session.fork(100), session.fork(99)
        assert (here.logits_valid, also_here.logits_valid, before.logits_valid) == (True, True, False)
        logits = session.logits
        session.close()
        assert (
            here.logits.tobytes() == also_here.logits.tobytes() == logits.tobytes() == fresh_logits(here.engine, BASE)
        )


def test_logits_outlive_session_and_engine():
    engine = make_engine()
    session = engine.session()
    session.eval(BASE)
    array, held = session.logits, session.logits.tobytes()
    session.eval([1])
    session.close()
    engine.close()
    del session, engine
    gc.collect()
    assert array.tobytes() == held


def test_an_empty_session_has_no_logits(engine_of):
    with engine_of().session() as session:
        for call in (lambda: session.logits, session.refresh):
            with pytest.raises(NoLogits):
                call()
        assert session.sync([]).evaluated == 0 and session.state == "EMPTY"
        assert session.score([5]).tolist() == [0.0]
