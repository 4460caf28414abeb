"""Snapshots (K9): the loaded session equals the saved one bit for bit; a damaged or foreign file is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import saved
from corrupt import snapshot as layout
from saved import DTYPES, HERE, TINY, TOKENS, TOYS, counts, make, needs_test_core, open_engine, refused, state

import ds4
from ds4.errors import ContextFull, IdentityError, InexactError, NoLogits, PoolFull, SnapshotError

pytestmark = needs_test_core
engine, ledger, sound = saved.engine, saved.ledger, saved.sound  # fixtures


# ---- the loaded session equals the saved one -----------------------------------------------------------------------


@pytest.mark.parametrize("toys", [True, None], ids=["toys", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype, toys, tmp_path):
    with open_engine(kv_dtype=dtype, toys=toys) as e:
        for n in (1, 2, 7, 8, 9, 23, 24, 25, 63, 64, 65, 128, 200):
            with e.session(ctx=512) as s:
                s.eval(TOKENS[:n])
                s.save(tmp_path / "s")
                with e.load(tmp_path / "s") as t:
                    assert state(t) == state(s) and t.ctx == 512
                    s.eval(TOKENS[n : n + 70], chunk=7)
                    t.eval(TOKENS[n : n + 70])
                    assert state(t) == state(s)
                with e.session() as fresh:  # O1
                    fresh.eval(TOKENS[: n + 70])
                    assert fresh.logits.tobytes() == s.logits.tobytes()
        assert counts(e)["pages_used"] == 0


def test_the_file_is_a_function_of_the_state(engine, tmp_path):
    """Saving what was loaded gives the same bytes: tokens, rows, marks with their flags, logits, and nothing else."""
    s = make(engine)
    s.save(tmp_path / "a")
    t = engine.load(tmp_path / "a")
    assert t.auto_marks == s.auto_marks + 1  # the handle's mark
    assert state(t) == state(s)
    t.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_checksums_are_crc32c(sound):
    """Against the definition in Python."""
    assert layout.seal(sound) == sound
    assert layout.crc32c(b"123456789") == 0xE3069283


def test_unwritten_memory_never_leaves(tmp_path):
    """Rows behind the end, which hold NaN or what was cut off, are zero in the file: no past of a session shows."""
    with open_engine(toys=None, kv_dtype="f32") as e, e.session() as s, e.session() as t:
        s.eval(TOKENS[:100])
        t.eval(TOKENS[:90])
        t.eval([1] * 200)
        t.truncate(90)
        t.eval(TOKENS[90:100])
        s.save(tmp_path / "s")
        t.save(tmp_path / "t")
        data = (tmp_path / "s").read_bytes()
        _, _, at, _, pages = next(c for c in layout.sections(data) if c[0] == "rows")
        page_bytes = e.streams[0].page_bytes
        last = np.frombuffer(data, np.float32, offset=at + (pages - 1) * page_bytes).reshape(
            3, 2, 2, -1
        )  # layer, part, head
        keys, values = last[:, 0].reshape(3, 2, 8, 64), last[:, 1].reshape(3, 2, 64, 8)
        assert not keys[..., 36:].any() and not values[:, :, 36:].any()
        assert keys[..., :36].all() and values[:, :, :36].all()
        assert data == (tmp_path / "t").read_bytes()


def test_without_logits(engine, tmp_path):
    s = make(engine)
    s.truncate(320)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    with pytest.raises(NoLogits):
        t.logits  # noqa: B018
    t.refresh(), s.refresh()
    assert state(t) == state(s)


def test_empty(engine, tmp_path):
    s = engine.session(ctx=100)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    assert (t.pos, t.state, t.ctx) == (0, "EMPTY", 100)
    no_room = layout.put((tmp_path / "s").read_bytes(), 124, "I", 0)
    refused(engine, layout.seal(no_room), tmp_path)
    for x in (s, t):
        x.eval(TOKENS[:70])
    assert state(s) == state(t)


def test_cleared_and_forked_sessions(engine, tmp_path):
    s = make(engine)
    child = s.fork(s.nearest_exact(300))
    child.eval(TOKENS[1000:1100])
    child.save(tmp_path / "child")
    s.clear()
    s.save(tmp_path / "s")
    assert engine.load(tmp_path / "s").pos == 0
    assert state(engine.load(tmp_path / "child")) == state(child)


def test_a_new_process_continues(engine, tmp_path):
    s = make(engine)
    s.save(tmp_path / "s")
    code = """
import hashlib, json, sys
import saved as t
with t.open_engine() as e, e.load(sys.argv[1]) as s:
    s.check()
    first = [s.pos, s.tokens, hashlib.sha256(s.logits).hexdigest(), [s.nearest_exact(p) for p in range(s.pos + 1)]]
    synced = s.sync(t.TOKENS[:400])
    print(json.dumps([*first, [synced.reused, synced.evaluated], hashlib.sha256(s.logits).hexdigest()]))
"""
    path = os.pathsep.join([str(Path(ds4.__file__).parent.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], cwd=HERE, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pos, tokens, first, exact, synced, second = json.loads(done.stdout)
    assert (pos, tokens, first) == (s.pos, s.tokens, hashlib.sha256(s.logits).hexdigest())
    assert exact == [s.nearest_exact(p) for p in range(s.pos + 1)]
    assert synced == [333, 67]
    s.eval(TOKENS[333:400])
    assert second == hashlib.sha256(s.logits).hexdigest()


@pytest.mark.parametrize("mark", [60, 140])
def test_marks_survive(engine, tmp_path, mark):
    """B9: behind the window, the positions of a handle's mark and of a pinned one are exact as before."""
    s = make(engine)
    with pytest.raises(InexactError):
        s.fork(100)
    s.save(tmp_path / "s")
    t = engine.load(tmp_path / "s")
    for x in (s, t):
        x.truncate(mark)
        x.eval(TOKENS[2000:2050])
    assert state(t) == state(s)
    fresh = engine.session()
    fresh.eval(TOKENS[:mark] + TOKENS[2000:2050])
    assert fresh.logits.tobytes() == t.logits.tobytes()


def test_seeded_generation_goes_on_alike(engine, tmp_path):
    """I13: from the middle of a seeded text, twice."""
    options = ds4.Sampling(temperature=1.0, top_k=50, repetition=1.1, seed=11)

    def say(x, n):
        return [t.id for t in x.generate(options, max_tokens=n)]

    s = engine.session()
    s.eval(TOKENS[:50])
    say(s, 9)
    s.save(tmp_path / "s")
    text = say(s, 20)
    assert [say(engine.load(tmp_path / "s"), 20) for _ in range(2)] == [text, text]


def test_ctx(engine, tmp_path):
    s = make(engine, 200, ctx=300)
    s.save(tmp_path / "s")
    assert engine.load(tmp_path / "s").ctx == 300
    assert engine.load(tmp_path / "s", ctx=200).ctx == 200
    assert engine.load(tmp_path / "s", ctx=4096).ctx == 4096
    for ctx, numbers in ((199, (200, 199)), (4097, (4097, 4096))):
        with pytest.raises(ContextFull) as error:
            engine.load(tmp_path / "s", ctx=ctx)
        assert (error.value.wanted, error.value.ctx) == numbers


# ---- foreign files -------------------------------------------------------------------------------------------------


def other_weights(folder):
    """The tiny model with one weight changed: all shapes equal."""
    shutil.copytree(TINY, folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 0x10
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_another_model_of_equal_shape(sound, tmp_path):
    with open_engine(other_weights(tmp_path / "other")) as e:
        assert "another model" in refused(e, sound, tmp_path, IdentityError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_dtype": "q8_0"}, "rows of kv_dtype f16, the engine's is q8_0"),
        ({"toys": None}, "other options"),
        ({"toys": {**TOYS, "toy_window": 25}}, "other options"),
        ({"toys": {**TOYS, "toy_stride": 5}}, "other options"),
    ],
)
def test_another_dtype_or_option(sound, tmp_path, options, text):
    with open_engine(**options) as e:
        assert text in refused(e, sound, tmp_path, IdentityError)


@pytest.mark.parametrize(
    ("at", "code", "value", "text"),
    [
        (12, "I", 2, "layout version 2, this build reads 1"),
        (32, "B", 0, "another model"),
        (64, "4s", b"lime", "architecture limea, the engine's is llama"),
        (64, "4s", b"\x1b[2J", "architecture ?[2Ja"),
        (64, "32s", b"x" * 32, f"architecture {'x' * 32}, "),
        (96, "8s", b"f16_f16_", "kv_dtype f16_f16_"),
        (104, "Q", 7, "other options"),
        (112, "I", 9999, "numerics number 9999"),
        (116, "I", 511, "another model"),
    ],
)
def test_another_identity(engine, sound, tmp_path, at, code, value, text):
    data = layout.seal(layout.put(sound, at, code, value))
    assert text in refused(engine, data, tmp_path, IdentityError)


# ---- damaged files -------------------------------------------------------------------------------------------------


def test_every_flipped_byte(engine, sound, tmp_path):
    """All of the header and of the lists, and a sample of the rest."""
    size = layout.u32(sound, 16)
    lists = [range(at, at + n) for kind, _, at, n, _ in layout.sections(sound) if kind in ("marks", "pages")]
    rng = random.Random(1)
    places = {*range(size), *(i for r in lists for i in r), *(rng.randrange(size, len(sound)) for _ in range(300))}
    for at in sorted(places):
        flipped = layout.put(sound, at, "B", sound[at] ^ 1 << rng.randrange(8))
        refused(engine, flipped, tmp_path)


def test_cut_anywhere(engine, sound, tmp_path):
    for at in sorted({at + d for at in layout.edges(sound) for d in (-1, 0, 1)} | set(range(0, len(sound), 997))):
        if 0 <= at < len(sound):
            refused(engine, sound[:at], tmp_path)


def test_corpus(engine, sound, tmp_path):
    """Broken on purpose, with true checksums: each is refused for its own fault."""
    cases = layout.cases(sound)
    assert len(cases) > 80
    for name, (data, text) in cases.items():
        assert data != sound, name
        assert text in refused(engine, data, tmp_path), name


def tried(e, data, path):
    """Loads a forged file: refused, or a session that holds together. Nothing may stay behind."""
    before = counts(e)
    path.write_bytes(data)
    try:
        with e.load(path) as s:
            s.check()
            s.sync(s.tokens[:-1] + [1, 2, 3])
            s.check()
    except (SnapshotError, ContextFull, PoolFull):
        pass
    assert counts(e) == before


def test_fuzzed_integers(engine, sound, tmp_path):
    """H6: every integer of header, table and lists takes extreme values; all checksums are true."""
    rng = random.Random(2)
    for _, at, code in layout.fields(sound):
        old = int.from_bytes(sound[at : at + (4 if code == "I" else 8)], "little")
        top = 2**32 if code == "I" else 2**64
        values = {0, 1, old - 1, old + 1, old * 2, top - 1, top // 2, 3 << 30, rng.randrange(top)}
        for value in sorted({v % top for v in values} - {old}):
            tried(engine, layout.seal(layout.put(sound, at, code, value)), tmp_path / "f")


def test_fuzzed_lists(engine, sound, tmp_path):
    """Marks and pages that are plausible but wrong."""
    rng = random.Random(3)
    lists = [(at, n) for kind, _, at, n, _ in layout.sections(sound) if kind in ("marks", "pages", "tokens")]
    for _ in range(300):
        data = sound
        for _ in range(rng.choice((1, 2, 4))):
            at, n = rng.choice(lists)
            data = layout.put(
                data, at + rng.randrange(0, n, 4), "I", rng.choice((rng.randrange(40), rng.randrange(600)))
            )
        tried(engine, layout.seal(data), tmp_path / "f")


@pytest.mark.timeout(30)
def test_huge_sparse_file(engine, sound, tmp_path):
    """H8: sizes above 2 GiB are numbers like others, and cost neither memory nor time."""
    with open(tmp_path / "huge", "wb") as file:
        file.write(layout.seal(layout.put(sound, 24, "Q", 3 << 30)))
        file.truncate(3 << 30)
    with pytest.raises(SnapshotError, match="3221225472 bytes"):
        engine.load(tmp_path / "huge")


def test_a_file_of_another_kind(engine, tmp_path):
    assert "does not begin like a snapshot" in refused(engine, (TINY / "model.safetensors").read_bytes(), tmp_path)
    assert "too short" in refused(engine, b"", tmp_path)


# ---- room ----------------------------------------------------------------------------------------------------------


def test_pool_full(sound, tmp_path):
    (tmp_path / "s").write_bytes(sound)
    with open_engine(pool_bytes=20_000) as e:
        before = counts(e)
        with pytest.raises(PoolFull) as error:
            e.load(tmp_path / "s")
        assert error.value.needed > error.value.free == 20_000
        assert counts(e) == before


def pool_for(sound, tmp_path, spare):
    """An engine whose pool holds the snapshot and `spare` bytes more."""
    (tmp_path / "s").write_bytes(sound)
    with open_engine() as e, e.load(tmp_path / "s") as s:
        return open_engine(pool_bytes=s.bytes_held + spare)


def test_marks_of_the_file_make_room_too(sound, tmp_path):
    """As with an eval: automatic marks go before PoolFull is raised."""
    with pool_for(sound, tmp_path, -1000) as e:
        before = counts(e)
        with e.load(tmp_path / "s") as s:
            s.check()
            assert s.auto_marks < 3 and s.pos == 200 and s.nearest_exact(60) < 60
            s.sync(TOKENS[:200])
            with open_engine() as big, big.session() as fresh:
                fresh.eval(TOKENS[:200])
                assert fresh.logits.tobytes() == s.logits.tobytes()
        assert counts(e) == before


def test_a_damaged_file_takes_no_marks_of_others(sound, tmp_path):
    """When marks would have to go for it, the file is verified first."""
    with pool_for(sound, tmp_path, 60_000) as e, e.session() as s:
        s.eval(TOKENS[:100])
        s.eval(TOKENS[100:200])
        with e.session() as filler:
            while e.ledger()["bytes_budget"] - e.ledger()["bytes_used"] > len(sound):
                filler.eval(TOKENS[:8])
            before, held = counts(e), state(s)
            assert s.auto_marks >= 2
            data = layout.put(sound, len(sound) - 1, "B", sound[-1] ^ 1)
            refused(e, data, tmp_path)
            assert counts(e) == before and state(s) == held


def test_marks_above_the_budget_go(tmp_path):
    """Marks of handles come back as automatic ones, which may hold an eighth of the pool."""
    with open_engine(pool_bytes=600_000) as e, e.session() as s:
        handles = []
        for i in range(30):
            s.eval(TOKENS[i * 20 : i * 20 + 20])
            handles.append(s.mark())
        s.save(tmp_path / "s")
        with e.load(tmp_path / "s") as t:
            t.check()
            assert 0 < t.auto_marks < 30
            assert e.ledger()["auto_mark_bytes"] <= 600_000 / 8
            t.truncate(handles[-1].pos)
        assert all(h.alive for h in handles)
