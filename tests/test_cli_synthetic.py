"""`ds4 bench synthetic`: DeepSeek V4 of random weights. Only the tiny model is written and timed here."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import ds4
from ds4 import cli, models
from ds4.cli import roofs, speed, synthetic
from ds4.errors import SystemResourceError
from ds4.families import deepseek_v4
from ds4.families.options import Options
from ds4.plan import make_plan


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Less to measure, temporary files in a folder of the test."""
    monkeypatch.setattr(roofs, "READ", 1 << 26)
    monkeypatch.setattr(speed, "PREFILLS", (16, 40))
    monkeypatch.setitem(speed.COMPARED, "v4-tiny", 140)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def events_of(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- the models


def test_a_layer_of_each_kind_is_as_wide_as_in_flash():
    flash = deepseek_v4.sizes_of(Options(models.load("deepseek-v4-flash").config, "flash"))
    kinds = synthetic.kinds("v4-layer")
    assert [kind.sizes.ratios for kind in kinds] == [[0], [4], [128]]
    other = {"n_layers", "vocab", "ratios", "n_hash_layers", "has_mtp"}
    for kind in kinds:
        same = {key: value for key, value in vars(kind.sizes).items() if key not in other}
        assert same == {key: value for key, value in vars(flash).items() if key not in other}
        assert 3.5e9 < kind.bytes < 3.7e9
    assert kinds[0].sizes.n_hash_layers == 1 and kinds[1].sizes.n_hash_layers == 0


def test_fewer_experts_where_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 40}))
    count = [kind.sizes.n_experts for kind in synthetic.kinds_that_fit("v4-layer", tmp_path, 1 << 40)]
    assert count == [256] * 3
    found = synthetic.kinds_that_fit("v4-layer", tmp_path, 1_200_000_000)
    assert {kind.sizes.n_experts for kind in found} == {64} and max(kind.bytes for kind in found) < 1.2e9
    for name in synthetic.kinds("v4-tiny"), synthetic.kinds("v4-layer"):
        with pytest.raises(SystemResourceError, match="no room"):
            synthetic.kinds_that_fit("v4-tiny" if len(name) == 1 else "v4-layer", tmp_path, 100_000)


def test_the_files_are_in_the_official_formats(tmp_path):
    kinds, seen = synthetic.kinds("v4-tiny"), []
    (path,) = synthetic.Writer(tmp_path, kinds, lambda done, total: seen.append((done, total))).write()
    assert seen[-1][0] == seen[-1][1] == kinds[0].bytes
    with ds4.Engine(path, threads=1, pool_tokens=4096, rounding=True) as engine, engine.session() as session:
        assert {"FP8", "FP4", "BF16", "F32"} == {tensor.format for _, tensor in engine.spec.tensors}
        logits = session.eval(list(range(20)), logits="all")
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10


# ---- what a token costs


@pytest.mark.parametrize("kind", synthetic.kinds("v4-layer"), ids=lambda kind: f"ratio{kind.sizes.ratios[0]}")
def test_bytes_and_multiply_adds_of_one_token(kind):
    s, depth = kind.sizes, 4095
    size, macs = speed.work_of(s, depth, 1, "fp8")
    plan = make_plan(s, ctx=depth + 1, kv_dtype="fp8")
    assert size == pytest.approx(plan.read_weights + plan.read_rows, abs=2)
    ratio = s.ratios[0]
    keys = 128 + {0: 0, 4: 512, 128: 32}[ratio]
    matrices = sum(
        p.shape[0] * p.shape[1] * (6 / 256 if p.expert is not None else 1)
        for p in deepseek_v4.pieces(s, mtp=False)
        if len(p.shape) == 2 and p.stored != "I64" and p.core != "embed" and not p.core.endswith("ape")
    )
    assert macs == pytest.approx(matrices + 2 * 64 * 512 * keys + (64 * 128 * 1024 if ratio == 4 else 0))


def test_a_prefill_reads_a_matrix_once():
    s = synthetic.kinds("v4-layer")[0].sizes
    one, many = speed.work_of(s, 0, 1, "fp8"), speed.work_of(s, 0, 512, "fp8")
    assert 3.5e9 < many[0] < 3.7e9 and 13e6 * 6 < one[0] < 240e6
    assert 300 < many[1] / one[1] < 600


# ---- the command


@pytest.mark.parametrize("spelling", [["synthetic"], ["--synthetic"]])
def test_the_tiny_model_is_compared_and_timed(capsys, quick, spelling):
    assert cli.main(["bench", *spelling, "v4-tiny", "--depth", "150", "--threads", "1", "--json"]) == 0
    events = events_of(capsys)
    figures = [event for event in events if event["type"] == "figure"]
    assert [figure["work"] for figure in figures] == ["prefill of 16", "prefill of 40", "decode at 150"]
    assert events[0] == {
        "type": "models", "name": "v4-tiny", "layers": ["all kinds"], "experts": 8, "of": 8,
    }  # fmt: skip
    (roofs,) = (event for event in events if event["type"] == "roofs")
    assert roofs["read"] > 1e8 and roofs["macs"] > 1e8 and roofs["threads"] == 1
    for figure in figures:
        assert figure["bit_exact"] and figure["compared_tokens"] == 140
        assert figure["tokens_per_second"] == pytest.approx(figure["tokens"] / figure["seconds"])
        assert figure["of_read"] == pytest.approx(figure["bytes_per_second"] / roofs["read"])
        assert figure["of_roofline"] >= figure["of_read"] * 0.999 > 0
    phases = [event["phase"] for event in events if event["type"] == "progress"]
    assert {"weights", "roofs", "compare", "context", "prefill"} <= set(phases)
    assert not list(quick.iterdir())


def test_three_forms(capsys, quick):
    assert cli.main(["bench", "--synthetic", "v4-tiny", "--depth", "8", "--output", "csv"]) == 0
    out, notes = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3 and rows[2]["work"] == "decode at 8" and float(rows[2]["seconds"]) > 0
    for text in ("8 experts, 2 for a token", "first 140 tokens", "reading 67.1 MB", "bit for bit"):
        assert text in notes
    found = [speed.Speed("rows of 4", "decode at 8", 8, 1, 0.002, 500.0, 2e8, 3e8, 1e11, 1.5e11, 0.25, 0.5, 5)]
    assert [row[:4] for row in speed.table(found)][1] == ["rows of 4", "decode at 8", "2 ms", "500"]
    assert speed.table(found)[1][-5:] == ["200 MB", "100", "25%", "150", "50%"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "--synthetic"], "required: kind"),
        (["bench", "--synthetic", "v5"], "invalid choice: 'v5'"),
        (["bench", "synthetic", "v4-tiny", "--depth", "0"], "0 is not between 1"),
        (["bench", "--synthetic", "v4-tiny", "--nothing"], "--nothing"),
    ],
)
def test_wrong_usage(capsys, args, message):
    assert cli.main(args) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_timed_when_a_bit_differs(capsys, quick, monkeypatch):
    given = iter([b"these", b"others"])
    monkeypatch.setattr(speed.Bench, "_logits", lambda *unused: next(given))
    assert cli.main(["bench", "--synthetic", "v4-tiny", "--json"]) == 1
    events = events_of(capsys)
    assert not [event for event in events if event["type"] == "figure"]
    assert "differ from those of ref" in events[-1]["message"]
    assert not list(quick.iterdir())


@pytest.mark.parametrize("where", ["measure_roofs", "_touch_experts"])
def test_an_interrupt_leaves_no_files(capsys, quick, monkeypatch, where):
    def interrupted(*unused: object) -> None:
        assert len(list(quick.iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, where, interrupted)
    if where != "measure_roofs":
        monkeypatch.setattr(speed, "measure_roofs", lambda threads, out: speed.Roofs(1, 1e9, 1e9))
    assert cli.main(["bench", "--synthetic", "v4-tiny"]) == 130
    assert not list(quick.iterdir())
