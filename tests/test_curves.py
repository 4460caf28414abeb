"""Cost curves: the work of a token grows with its depth along a straight line, and that of a prefill along the sum of
it. Work is counted by the profile, so nothing depends on the machine; benchmarks/curves.py times the same curves."""

from __future__ import annotations

import json
import shutil

import pytest
from oracle import DATA, kv_options, some_tokens

import ds4

DEPTHS = [1024, 2048, 3072, 4096]
FAR = [1024, 4096, 8192, 16384, 32768]
CHUNK = 512


@pytest.fixture
def long_engine(tmp_path, request):
    """An engine of a tiny model whose context is long."""
    model, kv_dtype = request.param
    folder = shutil.copytree(DATA / model, tmp_path / model)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40000}), "utf-8")
    options = kv_options(model, {"kv_dtype": kv_dtype, "threads": 2, "pool_tokens": 80000})
    with ds4.Engine(folder, **options) as engine:
        yield engine


def work_of(engine, many):
    """What one call did, op by op; nothing of it is a time."""
    found = engine.profile("start")
    return {
        (e.op, e.format, what): getattr(e, what)
        for e in found
        if e.many == many and e.op not in ("between calls", "session")
        for what in ("calls", "rows", "macs", "bytes")
    }


def assert_straight(depths, works):
    """Every count is a + b * depth, with the same a and b at all depths, exactly."""
    assert works[0].keys() == works[-1].keys()
    for key, first in works[0].items():
        slope = (works[-1][key] - first) / (depths[-1] - depths[0])
        off = [w[key] - first - slope * (d - depths[0]) for d, w in zip(depths, works, strict=True)]
        assert not any(off), f"{key} leaves the line by {off} at depths {depths}"


def curves(engine, depths):
    """Counts of one decoded token and of one chunk of prefill, both behind each depth; unlimited pages held."""
    tokens = some_tokens(depths[-1] + CHUNK, 5)
    decode, prefill, pages = [], [], []
    with engine.session() as session:
        for depth in depths:
            session.eval(tokens[session.pos : depth], logits=None, chunk=CHUNK)
            with session.fork() as child:
                engine.profile("start")
                child.eval(tokens[depth : depth + CHUNK], chunk=CHUNK)
                prefill.append(work_of(engine, True))
            with session.fork() as child:
                engine.profile("start")
                child.eval([3])
                decode.append(work_of(engine, False))
            pages.append(session.bytes_held)
    return decode, prefill, pages


NEAR_CASES = [("llama", "f16"), ("gemma3", "f16"), ("deepseek_v4", "f16"), ("deepseek_v4", "q8_0")]
FAR_CASES = [("gemma3", "f16"), ("deepseek_v4", "f16")]


@pytest.mark.parametrize(
    ("long_engine", "depths"),
    [pytest.param(case, DEPTHS, id=f"{case[0]}-{case[1]}-4k") for case in NEAR_CASES]
    + [pytest.param(case, FAR, id=f"{case[0]}-{case[1]}-32k", marks=pytest.mark.slow) for case in FAR_CASES],
    indirect=["long_engine"],
)
def test_work_against_depth_is_a_straight_line(long_engine, depths):
    decode, prefill, pages = curves(long_engine, depths)
    assert_straight(depths, decode)
    assert_straight(depths, prefill)
    if long_engine.arch == "llama":
        layers = int(long_engine.spec.config["n_layers"][0])
        rows = [w["attend", "f16", "rows"] for w in decode]
        assert rows == [layers * (d + 1) for d in depths], "every layer reads every row once"
        assert pages == [d * long_engine.token_bytes for d in depths], "pages hold the rows and nothing else"
        assert {w["between ops", "", "rows"] for w in prefill} == {CHUNK}
    else:  # windows and what is picked do not grow with the depth
        name = "attend" if long_engine.arch == "gemma3" else "attend_sparse"
        first, last = (sum(v for k, v in decode[i].items() if k[0] == name and k[2] == "rows") for i in (0, -1))
        growth = (last - first) / (depths[-1] - depths[0])
        assert 0 < growth < len(long_engine.streams) * 4


def test_a_curve_that_bends_is_seen():
    bent = [{("attend", "f16", "rows"): d * d} for d in DEPTHS]
    with pytest.raises(AssertionError, match="leaves the line"):
        assert_straight(DEPTHS, bent)
    assert_straight(DEPTHS, [{("attend", "f16", "rows"): 3 * d + 7} for d in DEPTHS])
