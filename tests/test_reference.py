"""The tiny models against float32 logits of Hugging Face transformers, and the backends against each other.

The two backends give the same bits: `ref` = `cpu` on every instruction set, so the oracle needs no tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracle import BACKENDS, DATA, KV_DTYPES, OTHERS, TOYS, held_rows, some_tokens
from safetensors.numpy import load_file

LLAMAS = ("llama", "llama3rope")
MODELS = (*LLAMAS, "qwen3", "qwen3_moe", "gemma3")
TOLERANCE = 1e-4
TEXTS = ("s1", "s12", "s100", "s300")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [512, 7])
def test_logits_are_those_of_transformers(engine_of, model, backend, chunk):
    engine, ref = engine_of(model, backend=backend, kv_dtype="f32"), load_file(DATA / model / "ref.safetensors")
    for text in TEXTS:
        tokens, wanted = ref[f"tokens.{text}"], ref[f"logits.{text}"]
        with engine.session() as session:
            logits = session.eval(tokens, logits="all", chunk=chunk)[-len(wanted) :]
            assert session.logits.tobytes() == logits[-1].tobytes()
        assert np.isfinite(logits).all() and logits.shape == wanted.shape
        error = np.abs(logits - wanted).max()
        assert error <= TOLERANCE, f"{model} {text} on {backend}: the largest error is {error:.2e}"


def first_layer(engine, tokens):
    """K and V of the first layer as stored, uint8 [row, part and head, bytes]: they do not depend on how earlier rows
    were rounded."""
    stream = engine.streams[0]
    with engine.session() as session:
        session.eval(tokens)
        rows = np.frombuffer(session.rows(0, 0, len(tokens)), np.uint8)
    return rows.reshape(stream.n_layers, len(tokens), 4, -1)[0]  # 2 parts of 2 heads


def test_rows_are_those_of_f32_rounded_once(engine_of):
    tokens = some_tokens(100)
    exact = first_layer(engine_of(kv_dtype="f32"), tokens).view(np.float32)  # heads of 8 numbers
    assert exact.std() > 0.1
    assert (first_layer(engine_of(kv_dtype="f16"), tokens) == exact.astype(np.float16).view(np.uint8)).all()
    stored = first_layer(engine_of(kv_dtype="q8_0"), tokens)  # 8 numbers, then the f16 scale of their group
    scale = stored[..., 8:].copy().view(np.float16).astype(np.float32)
    assert (scale == (np.abs(exact).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float16)).all()
    assert (np.abs(stored[..., :8].view(np.int8) * scale - exact) <= scale * 0.5001).all()


@pytest.mark.parametrize("model", [*LLAMAS, "qwen3", "gemma3"])  # a router may turn a small error into another expert
def test_smaller_rows_cost_little(engine_of, model):
    """f16 keeps 11 bits and q8_0 seven: the errors of the logits must lie as far apart as that, give or take a factor
    of two."""
    ref, error = load_file(DATA / model / "ref.safetensors"), {}
    for kv_dtype in KV_DTYPES:
        with engine_of(model, kv_dtype=kv_dtype).session() as session:
            error[kv_dtype] = np.abs(session.eval(ref["tokens.s300"], logits="all")[-64:] - ref["logits.s300"]).mean()
    assert error["f32"] < 1e-5 < error["f16"] < 0.005
    assert 8 < error["q8_0"] / error["f16"] < 32


@pytest.mark.parametrize(
    "model, toy",
    [("llama", toy) for toy in TOYS if toy not in OTHERS] + [(m, "plain") for m in (*MODELS[1:], "deepseek_v4")],
)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_ref_and_cpu_are_equal_bit_for_bit(engine_of, model, toy, kv_dtype):
    tokens, results = some_tokens(120), []
    for backend, threads in (("ref", 1), ("cpu", 1), ("cpu", 2)):
        engine = engine_of(model, toy, backend=backend, kv_dtype=kv_dtype, threads=threads)
        with engine.session() as session:
            logits = [session.eval(tokens[:100], logits="all").tobytes()]
            logits += [session.eval([token], logits="all").tobytes() for token in tokens[100:]]
            results.append((logits, [held_rows(session, i) for i in range(len(engine.streams))]))
    for logits, rows in results[1:]:
        assert logits == results[0][0], "logits"
        assert rows == results[0][1], "rows"


def test_the_toy_streams_change_the_result(engine_of):
    """A window that hides nothing, or a group that nobody reads, would prove nothing."""
    tokens, logits = some_tokens(120), {}
    for toy in TOYS:
        with engine_of(toy=toy).session() as session:
            logits[toy] = session.eval(tokens, logits="all")
    plain = logits["plain"]
    for toy, first in (
        ("window", 24),
        ("wide", 100),
        ("both", 3),
    ):  # the first position that something is hidden from, or that sees a group
        assert logits[toy][:first].tobytes() == plain[:first].tobytes()
        assert (logits[toy][first:] != plain[first:]).any(axis=1).all()
