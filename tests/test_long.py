"""Contexts of more than one block table: 64 pages of 64 rows, so a table ends at every 4096 positions, and a piece of
the token log at every 1024.

One text, prefilled once, gives the logits of all positions; every session here holds a prefix of it, so that each next
token shows whether it is exact."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle import DATA, NEEDS_TEST_BUILD, TEST_BUILD, TOYS, held_rows, settled, some_tokens

import ds4
from ds4.errors import PoolFull, SystemResourceError

pytestmark = pytest.mark.slow

N = 8500
TABLE = 4096
TEXT = some_tokens(N, 42)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny Llama with a longer context."""
    path = tmp_path_factory.mktemp("long")
    config = json.loads((DATA / "llama" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10000}))
    (path / "model.safetensors").write_bytes((DATA / "llama" / "model.safetensors").read_bytes())
    return path


@pytest.fixture(scope="module", params=["plain", "both"])
def world(request, folder):
    """The engine, the logits of all positions, the rows of all streams."""
    if TOYS[request.param] and not TEST_BUILD:
        pytest.skip(NEEDS_TEST_BUILD)
    with ds4.Engine(folder, test_options=TOYS[request.param], threads=2, pool_tokens=60000, reach_slack=16) as engine:
        with engine.session() as session:
            logits = np.concatenate(
                [session.eval(TEXT[n : n + 500], logits="all", chunk=500) for n in range(0, N, 500)]
            )
            rows = [held_rows(session, i) for i in range(len(engine.streams))]
        start = settled(engine.ledger())
        yield engine, logits, rows
        assert settled(engine.ledger()) == start


def proven(session, logits):
    """The next tokens, from a fork, have the bits of the one prefill."""
    session.check()
    pos = session.pos
    assert session.tokens == TEXT[:pos]
    if session.logits_valid:
        assert session.logits.tobytes() == logits[pos - 1].tobytes()
    with session.fork() as child:
        end = min(N, pos + 3)
        assert child.eval(TEXT[pos:end], logits="all").tobytes() == logits[pos:end].tobytes()


EDGES = [1, 1023, 1024, 1025, 4095, 4096, 4097, 4160, 8191, 8192, 8193]


def test_rows_do_not_depend_on_where_a_table_ends(world):
    engine, logits, rows = world
    with engine.session() as session:
        for n in (*EDGES, N):
            session.eval(TEXT[session.pos : n], chunk=613, logits=None)
        for i, held in enumerate(rows):
            other = held_rows(session, i)
            assert all(other[row] == data for row, data in held.items() if row in other)
        proven(session, logits)


def test_truncate_and_fork_around_the_ends_of_tables(world):
    """Going down through all edges, by truncate and by fork, with and without others that share the tables; then up
    again."""
    engine, logits, _ = world
    with engine.session() as parent:
        marks = {}
        for n in EDGES:
            parent.eval(TEXT[parent.pos : n], chunk=512)
            marks[n] = parent.mark()  # windowed streams: these positions stay exact
        parent.eval(TEXT[parent.pos : N])
        children = []
        for n in reversed(EDGES):
            child = parent.fork(n)
            proven(child, logits)
            children.append(child)
            with parent.fork() as walker:
                walker_pos = walker.nearest_exact(n)
                walker.truncate(walker_pos)
                proven(walker, logits)
                walker.eval(TEXT[walker_pos : walker_pos + 70], chunk=9)
                proven(walker, logits)
        for n in reversed(EDGES):
            parent.rollback(marks[n])
            proven(parent, logits)
        parent.close()
        for child in children[::2]:
            child.close()
        for child in children[1::2]:
            child.eval(TEXT[child.pos : child.pos + 100])
            proven(child, logits)
            child.close()


def test_a_long_walk_of_many_relatives(world):
    """Forks of forks that share tables, cut and grown at random, freed in random order."""
    engine, logits, _ = world
    rng = np.random.default_rng(8)
    root = engine.session()
    root.eval(TEXT[:8000], logits=None)
    family = [root]
    for step in range(250):
        session = family[int(rng.integers(len(family)))]
        near = int(rng.choice([0, 1024, 2048, 4096, 4096, 8192]))
        wanted = int(np.clip(near + rng.integers(-70, 71), 0, min(session.pos, N)))
        what = rng.integers(6)
        if what == 0 and len(family) < 8:
            family.append(session.fork(session.nearest_exact(wanted)))
        elif what == 1:
            session.truncate(session.nearest_exact(wanted))
        elif what == 2 and len(family) > 2:
            family.remove(session)
            session.close()
        elif what == 3:
            result = session.sync(TEXT[:wanted])
            assert result.reused + result.evaluated == wanted
        elif session.pos < N:
            grow = int(rng.choice([1, 5, 63, 64, 65, 300]))
            session.eval(TEXT[session.pos : min(N, session.pos + grow)], chunk=int(rng.choice([7, 64, 512])))
        if step % 5 == 0:
            proven(family[step % len(family)], logits)
    for session in family:
        proven(session, logits)
        session.close()


@pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
def test_no_memory_for_a_table(world):
    """A cut and a fork in the middle of a shared table copy it: all copies or none."""
    engine, logits, _ = world
    with engine.session() as parent:
        parent.eval(TEXT[:4400], logits=None)
        parent.eval(TEXT[4400:4450], logits=None)
        for pos in (4440, 4445):
            for k in range(1, 12):
                with parent.fork() as child, child.fork() as other:
                    for call in (lambda c=child, p=pos: c.truncate(p), lambda c=child, p=pos: c.fork(p).close()):
                        before = child.pos
                        engine.fault("alloc", k)
                        try:
                            call()
                        except SystemResourceError:
                            assert child.pos == before
                        engine.fault("alloc", 0)
                        proven(child, logits)
                    proven(other, logits)
        for k in (1, 2, 3):
            with parent.fork() as child:
                child.sync(TEXT[:4450])
                engine.fault("alloc", k)
                try:
                    child.sync(TEXT[:100])
                except (SystemResourceError, PoolFull):
                    pass
                engine.fault("alloc", 0)
                proven(child, logits)
        proven(parent, logits)
