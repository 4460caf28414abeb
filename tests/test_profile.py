"""A profile: it counts what was asked for, its times add up, and it changes no bit."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oracle import BACKENDS, DATA, NEEDS_TEST_BUILD, TEST_BUILD, TOYS, assert_same, some_tokens

import ds4
from ds4 import cli
from ds4.errors import ArgumentError, Busy, SystemResourceError
from ds4.profile import HEAD, ProfileEntry, table, tokens_of

TOKENS = some_tokens(150)


def one(entries, op, many):
    (found,) = [e for e in entries if e.op == op and e.many == many]
    return found


@pytest.fixture
def profiled(engine_of):
    """An engine whose profile has just been started; it is stopped after the test."""
    used = []

    def get(*args, **options):
        used.append(engine_of(*args, **options))
        used[-1].profile("start")
        return used[-1]

    yield get
    for engine in used:
        engine.profile("stop")
        assert engine.profile() == []


# ---- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("toy", TOYS)
def test_a_profile_changes_no_bit(profiled, toy, backend):
    """The oracle of `assert_same` is an engine of its own, without a profile."""
    engine = profiled(toy=toy, backend=backend)
    session, other = engine.session(), engine.session()
    session.eval(TOKENS[:100], chunk=17)
    other.sync(TOKENS[:50])
    engine.eval_batch([(session, TOKENS[100:110]), (other, TOKENS[50:51])])
    with session.mark() as mark:
        session.score(TOKENS[110:120])
        session.rollback(mark)
    engine.profile("stop")  # and with it gone the session goes on
    session.eval(TOKENS[110:111])
    engine.profile("start")
    session.eval(TOKENS[111:112])
    assert_same(session, TOKENS[:112])
    assert_same(other, TOKENS[:51])
    assert {e.op for e in engine.profile() if not e.many} >= {"embed", "matmul", "rms_norm", "between ops", "session"}


# ---- what is counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_work_is_counted_exactly(profiled, backend):
    engine = profiled(backend=backend, threads=2 if backend == "cpu" else 1)
    config = {name: int(values[0]) for name, values in engine.spec.config.items()}
    layers, heads, dim, kv = (config[k] for k in ("n_layers", "n_heads", "head_dim", "n_kv_heads"))
    shapes = {name: t.shape for name, t in engine.spec.tensors if len(t.shape) == 2}
    head = shapes.get("head", shapes["embed"])
    matrices = sum(r * c for name, (r, c) in shapes.items() if name not in ("head", "embed"))
    with engine.session() as session:
        session.eval(TOKENS[:70], chunk=40)
        for token in TOKENS[70:73]:
            session.eval([token])
    found = engine.profile()
    assert (tokens_of(found, True), tokens_of(found, False)) == (70, 3)
    assert one(found, "between ops", True).calls == 2 and one(found, "between ops", False).calls == 3
    assert one(found, "session", True).calls == 1 and one(found, "session", False).calls == 3
    assert one(found, "between calls", True).calls + one(found, "between calls", False).calls == 3
    matmul, embed = one(found, "matmul", False), one(found, "embed", False)
    assert matmul.macs == 3 * (matrices + head[0] * head[1]) and matmul.calls == 3 * (4 * layers + 1)
    assert one(found, "matmul", True).macs == 70 * matrices + head[0] * head[1]
    assert matmul.format == embed.format == "F32" and embed.bytes == 3 * 4 * head[1]
    assert matmul.bytes >= 4 * matmul.macs  # groups of rows may be padded
    attend, write = one(found, "attend", False), one(found, "rows_write", False)
    assert attend.rows == layers * (71 + 72 + 73) and attend.format == "f16"
    assert attend.macs == attend.rows * heads * 2 * dim and attend.bytes == attend.rows * kv * dim * 2 * 2
    prefill = one(found, "attend", True)
    assert prefill.rows == layers * 70 * 71 // 2 and prefill.bytes == layers * (40 + 70) * kv * dim * 2 * 2
    assert write.rows == 3 * 2 * layers and write.bytes == write.rows * kv * dim * 2
    assert engine.profile("start") and engine.profile() == []  # it starts from zero


def test_times_add_up(profiled):
    """All times are parts of the time that passes outside, in between and inside; none is counted twice."""
    engine = profiled()
    start = time.perf_counter()
    with engine.session() as session:
        for n in range(0, 100, 10):
            session.eval(TOKENS[n : n + 10])
            session.eval([5])
    elapsed = time.perf_counter() - start
    found = engine.profile()
    assert all(e.seconds >= 0 for e in found)
    assert 0 < sum(e.seconds for e in found) <= elapsed


def test_formats_of_one_product_are_named_together():
    text = table([ProfileEntry("matmul", "Q4_K+Q6_K", False, 1, 2e-3, 10**6, 0, 0), _rounds(False, 4)])
    assert text[0] == list(HEAD)
    assert text[1] == ["one token", "matmul", "Q4_K+Q6_K", "1", "2.00", "66.7", "500.00", "0.50", ""]
    assert text[3] == ["one token", "4 tokens", "", "1", "3.00", "100.0", "750.00", "", ""]
    assert len(text) == 4  # and nothing of rounds that were not there


def _rounds(many, tokens):
    return ProfileEntry("between ops", "", many, 1, 1e-3, 0, 0, tokens)


# ---- starting and stopping ---------------------------------------------------------------------------------------


def test_refused_during_a_call_and_for_what_it_does_not_know(profiled):
    engine, refused = profiled(), []

    def look(done, total):
        for then in ("go on", "start", "stop"):
            with pytest.raises(Busy, match="when it has returned"):
                engine.profile(then)
            refused.append(then)

    with engine.session() as session:
        session.eval(TOKENS[:20], chunk=10, progress=look)
        assert refused and tokens_of(engine.profile(), True) == 20
        with pytest.raises(ArgumentError, match="'go on', 'start' and 'stop'"):
            engine.profile("begin")
        with pytest.raises(ArgumentError):  # a call that fails leaves nothing open
            session.eval([10**6])
        session.eval([3])
    assert tokens_of(engine.profile(), False) == 1


@pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
def test_without_memory_nothing_changes(engine_of):
    engine = engine_of()
    for k in (1, 2):
        engine.fault("alloc", k)
        with pytest.raises(SystemResourceError, match="nothing has changed"):
            engine.profile("start")
    engine.fault("alloc", 0)
    with engine.session() as session:
        session.eval(TOKENS[:5])
        assert engine.profile() == []
        engine.profile("start")
        session.eval([3])
        assert tokens_of(engine.profile("stop"), False) == 1


SCRIPT = """
import ds4, sys
engine = ds4.Engine(sys.argv[1], pool_tokens=4096)
session = engine.session()
session.eval([1, 2, 3])
session.eval([4])
engine.close()
print(engine is not None)
"""


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_the_environment_starts_one_and_its_table_goes_to_stderr(value, shown):
    env = os.environ | {"DS4_PROFILE": value, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", SCRIPT, str(DATA / "llama")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert ("ds4 profile: rounds of several tokens, 3 tokens" in done.stderr) == shown
    assert ("ds4 profile: rounds of one token, 1 tokens" in done.stderr) == shown
    lines = [line.split() for line in done.stderr.splitlines()]
    assert any(line[:2] == ["matmul", "F32"] for line in lines) == shown
    assert shown or not done.stderr


# ---- ds4 bench profile -------------------------------------------------------------------------------------------


def test_the_command_in_three_forms(capsys, tiny):
    arguments = ["bench", "profile", "-m", str(tiny), "-p", "20", "-n", "3", "-d", "10", "--quiet"]
    assert cli.main(arguments) == 0
    table_text = capsys.readouterr().out
    assert "| several   | matmul" in table_text and "| one token | 3 tokens" in table_text
    assert cli.main([*arguments, "--output", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert next(r for r in rows if r["op"] == "between ops" and r["many"] == "True")["rows"] == "20"
    assert cli.main([*arguments, "--output", "json"]) == 0
    entries = [ProfileEntry(**row) for row in json.loads(capsys.readouterr().out)]
    assert one(entries, "attend", False).rows == sum(range(31, 34)) * one(entries, "attend", False).calls // 3
    assert cli.main([*arguments, "-d", "100000"]) == 2
    assert "has a context of" in capsys.readouterr().err


def test_a_wrong_bit_is_never_shown(monkeypatch, capsys, tiny):
    real = ds4.Session.eval
    count = iter(range(100))

    def eval(self, tokens, **options):
        return real(self, [next(count)] if len(tokens) == 1 else tokens, **options)

    monkeypatch.setattr(ds4.Session, "eval", eval)
    assert cli.main(["bench", "profile", "-m", str(tiny), "-p", "20", "-n", "3"]) == 1
    captured = capsys.readouterr()
    assert "report this as a bug" in captured.err and "matmul" not in captured.out
