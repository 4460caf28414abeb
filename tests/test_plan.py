"""The plan of a DeepSeek V4 that is not here: the census of the official files, and formulas that must agree with what
engines of the tiny models say and hold."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import make_deepseek_v4 as make
import pytest
from oracle import DATA, feed, make_engine, some_tokens

import ds4
from ds4 import models
from ds4.errors import ArgumentError, FileFormatError, UnsupportedError
from ds4.families import deepseek_v4, model_spec
from ds4.families.options import Options
from ds4.files import Checkpoint, Tensor
from ds4.plan import make_plan, streams_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def flash() -> deepseek_v4.Sizes:
    return deepseek_v4.sizes_of(Options(models.load("deepseek-v4-flash").config, "flash"))


def test_the_census_of_flash(flash):
    """Tensors and bytes of the published index, from the options alone."""
    found = [deepseek_v4.stored_bytes(piece) for piece in deepseek_v4.pieces(flash, mtp=True)]
    assert sum(count for count, _ in found) == 69187
    assert sum(size for _, size in found) == 159_609_485_896 == models.load("deepseek-v4-flash").size


def test_figures_of_flash_that_others_have_published(flash):
    plan = make_plan(flash, ctx=1_000_000, kv_dtype="fp8")
    rows4 = plan.streams[3]
    assert [part.bytes() for part in rows4.parts] == [583, 68]
    assert plan.read_weights == pytest.approx(11.2e9, rel=0.01)
    assert plan.token_bytes == pytest.approx(3510, rel=0.01)
    assert plan.mark_bytes == pytest.approx(25e6, rel=0.05) and plan.slack_bytes == pytest.approx(84e6, rel=0.03)
    assert make_plan(flash, ctx=131072, kv_dtype="f16").token_bytes == 3440 * 2


CASES = [("f32", False, False), ("f16", False, True), ("fp8", True, False)]


@pytest.mark.parametrize("kv_dtype, rounding, mtp", CASES)
@pytest.mark.parametrize("model", ["tiny", "reference"])
def test_streams_are_those_of_an_engine(model, kv_dtype, rounding, mtp, request):
    folder = DATA / "deepseek_v4" if model == "tiny" else request.getfixturevalue("reference") / "deepseek_v4"
    s = deepseek_v4.sizes_of(Options(json.loads((folder / "config.json").read_text()), "config.json"))
    with ds4.Engine(folder, kv_dtype=kv_dtype, rounding=rounding, mtp=mtp, pool_tokens=4096) as engine:
        for mine, theirs in zip(streams_of(s, kv_dtype, mtp), engine.streams, strict=True):
            for name in ("name", "n_layers", "stride", "reach", "page_rows", "row_bytes", "page_bytes"):
                assert getattr(mine, name) == getattr(theirs, name), f"{mine.name} {name}"
        plan = make_plan(s, ctx=4096, kv_dtype=kv_dtype, mtp=mtp)
        assert plan.mark_bytes == engine.mark_bytes and math.floor(plan.token_bytes) == engine.token_bytes


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
def test_a_session_holds_what_was_planned(kv_dtype):
    """Within 2 % at every length, by the ledger; below the first automatic mark, which is planned for apart."""
    with make_engine(toy="deepseek_v4", kv_dtype=kv_dtype, pool_tokens=30000) as engine, engine.session() as session:
        for n in (64, 300, 1000, 2000):
            feed(session, some_tokens(n)[session.pos :])
            plan, used = make_plan(make.sizes(), ctx=n, kv_dtype=engine.kv_dtype), engine.ledger()["bytes_used"]
            assert abs(used - plan.context_bytes) <= 0.02 * plan.context_bytes, n
        feed(session, some_tokens(3000)[session.pos :])
        plan, used = make_plan(make.sizes(), ctx=3000, kv_dtype=engine.kv_dtype), engine.ledger()["bytes_used"]
        assert session.auto_marks == 1 and plan.context_bytes <= used <= 1.02 * plan.context_bytes + plan.mark_bytes


def test_options_that_cannot_be_planned(flash):
    with pytest.raises(ArgumentError, match="ctx is 2000000"):
        make_plan(flash, ctx=2_000_000)
    with pytest.raises(ArgumentError, match="q8_0"):
        make_plan(flash, ctx=1000, kv_dtype="q8_0")


# ---- the command ----


def inspect(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ds4", "inspect", *args], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def test_the_command_plans_a_model_that_is_not_here():
    done = inspect("deepseek-v4-flash", "--plan", "ctx=1000000", "device_mem=141g", "bandwidth=4.8t", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    plan = next(e for e in events if e["type"] == "plan")
    assert (plan["ctx"], plan["kv_dtype"], plan["device_mem"]) == (1_000_000, "fp8", 141 * 10**9)
    assert sum(e["bytes"] for e in events if e["type"] == "weights") == plan["weight_bytes"]
    text = inspect("deepseek-v4-flash", "--plan", "ctx=1000000", "device_mem=141g").stdout
    assert "too little for the weights" in text and "a mark" in text


def test_the_command_refuses_by_name():
    for args, words in (
        (("deepseek-v4-flash", "--plan", "ctx=many"), "'ctx=many'"),
        (("deepseek-v4-flash", "--plan", "size=3"), "'size=3'"),
        ((str(DATA / "llama"), "--plan", "ctx=10"), "DeepSeek V4"),
        (("deepseek-v4-flash",), "does not fetch it"),
    ):
        done = inspect(*args)
        assert done.returncode and words in done.stderr, done.stderr


# ---- the registry ----


def test_an_entry_of_the_registry_switches_rounding_on(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    entry = 'title = "Toy"\nlicence = "none"\nhomepage = "here"\n[source]\nkind = "manual"\n[engine]\nrounding = true\n'
    (tmp_path / "models" / "toy-v4.toml").write_text(entry)
    with pytest.raises(ArgumentError, match=f"put its files .*here.* into {tmp_path}/weights/toy-v4/files"):
        ds4.Engine("toy-v4")
    (tmp_path / "weights" / "toy-v4").mkdir(parents=True)
    (tmp_path / "weights" / "toy-v4" / "files").symlink_to(DATA / "deepseek_v4")
    for options, wanted in (({}, 1.0), ({"rounding": False}, 0.0)):
        with ds4.Engine("toy-v4", pool_tokens=4096, **options) as engine:
            assert engine.spec.config["rounding"] == [wanted]
    (tmp_path / "models" / "toy-v4.toml").write_text(entry.replace("rounding = true", "rounding = 1"))
    with pytest.raises(FileFormatError, match="'rounding' has to be true or false"):
        models.load("toy-v4")


# ---- options of the family ----


def checkpoint(config: dict) -> Checkpoint:
    return Checkpoint("m", "safetensors", "deepseek_v4", config, {})


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"compress_ratios": [0, 4]}, FileFormatError, "compress_ratios"),
        ({"compress_ratios": [0, 8, 128, 4, 128, 0]}, UnsupportedError, "8"),
        ({"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
        ({"n_shared_experts": 2}, UnsupportedError, "n_shared_experts"),
        ({"n_group": 8}, UnsupportedError, "n_group"),
        ({"num_experts_per_tok": 5}, FileFormatError, "5 of 4 experts"),
        ({"o_groups": 3}, FileFormatError, "output groups"),
        ({"qk_rope_head_dim": 7}, FileFormatError, "rotary"),
        ({"index_head_dim": 24}, UnsupportedError, "power of two"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UnsupportedError, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64, "mscale": 1.0}},
         UnsupportedError, "mscale"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, UnsupportedError, "fmt"),
        ({"hc_mult": 0}, FileFormatError, "hc_mult"),
        ({"hc_mult": 1}, UnsupportedError, "1 residual streams"),
        ({"hidden_size": None}, FileFormatError, "hidden_size"),
    ],
)  # fmt: skip
def test_options_are_refused_by_name(change, error, words):
    with pytest.raises(error, match=words):
        model_spec(checkpoint({k: v for k, v in (make.CONFIG | change).items() if v is not None}))


def test_a_drafter_is_left_out():
    """The trunk of a model with `dspark_*` keys is the same; what is under mtp.* belongs to the drafter."""
    config = make.CONFIG | {
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [1, 2],
        "compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0],
    }
    s = deepseek_v4.sizes_of(Options(config, "config.json"))
    assert not s.has_mtp and s.ratios == [0, 4, 128, 4, 128]
    zeros = {p.official: tensor(p) for p in deepseek_v4.pieces(s, mtp=False)}
    zeros["mtp.2.something.weight"] = Tensor("mtp.2.something.weight", "F32", (1,), memoryview(bytes(4)))
    spec = model_spec(Checkpoint("m", "safetensors", "deepseek_v4", config, zeros))
    assert not any("mtp" in name for name, _ in spec.tensors)
    with pytest.raises(ArgumentError, match="no MTP block"):
        model_spec(Checkpoint("m", "safetensors", "deepseek_v4", config, zeros), mtp=True)


def tensor(piece: deepseek_v4.Piece, format: str = "F32") -> Tensor:
    format = "I64" if piece.stored == "I64" else format
    size = math.prod(piece.shape) * (8 if format == "I64" else 4)
    return Tensor(piece.official, format, piece.shape, memoryview(bytes(size)))


def test_base_models_with_f32_scales_are_refused_by_name():
    s = make.sizes()
    tensors = {p.official: tensor(p) for p in deepseek_v4.pieces(s, mtp=False)}
    name = "layers.0.attn.wq_a"
    tensors[f"{name}.weight"] = Tensor("x", "F8_E4M3", (16, 32), memoryview(bytes(512)))
    tensors[f"{name}.scale"] = Tensor("x", "F32", (1, 1), memoryview(bytes(4)))
    with pytest.raises(UnsupportedError, match="scales are read as F8_E8M0"):
        model_spec(Checkpoint("m", "safetensors", "deepseek_v4", make.CONFIG, tensors))
    tensors[f"{name}.scale"] = Tensor("x", "F8_E8M0", (1, 2), memoryview(bytes(2)))
    with pytest.raises(FileFormatError, match=r"shape \[1, 2\]"):
        model_spec(Checkpoint("m", "safetensors", "deepseek_v4", make.CONFIG, tensors))
