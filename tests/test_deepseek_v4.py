"""DeepSeek V4 against Hugging Face, the published inference code, and its own definition: logits, what the layers
compute inside, picks and routing, rounding, MTP, and the official storage formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import BACKENDS, DATA, NEEDS_TEST_BUILD, TEST_BUILD, some_tokens
from safetensors.numpy import load_file

import ds4
from ds4.core import ffi, lib
from ds4.errors import ArgumentError, UnsupportedError

TEXTS = ("s1", "s3", "s12", "s37", "s140", "s300")
TINY = DATA / "deepseek_v4"


@pytest.fixture(scope="module")
def engine(request):
    """engine(folder, **options), made once."""
    made: dict[str, ds4.Engine] = {}

    def get(folder: Path, **options) -> ds4.Engine:
        key = repr((str(folder), sorted(options.items())))
        if key not in made:
            made[key] = ds4.Engine(folder, **{"threads": 1, "kv_dtype": "f32", "pool_tokens": 4096, **options})
        return made[key]

    yield get
    for one in made.values():
        one.close()


def evaluated(engine: ds4.Engine, tokens, want="all", **options) -> np.ndarray:
    with engine.session() as session:
        return session.eval(tokens, logits=want, **options)


# ---- against Hugging Face and the published code ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_logits_are_those_of_transformers(engine, reference, backend, text):
    folder = reference / "deepseek_v4"
    ref = load_file(folder / "ref.safetensors")
    logits = evaluated(engine(folder, backend=backend), ref[f"tokens.{text}"])
    assert np.abs(logits - ref[f"logits.{text}"]).max() <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", TEXTS[2:])
def test_logits_from_the_official_storage_formats(engine, reference, backend, text):
    """F8_E4M3 with E8M0 block scales, packed FP4 experts, BF16, I64."""
    folder = reference / "deepseek_v4_fp"
    ref = load_file(folder / "ref.safetensors")
    one = engine(folder, backend=backend)
    assert {"FP8", "FP4", "BF16", "F32"} == {tensor.format for _, tensor in one.spec.tensors}
    logits = evaluated(one, ref[f"tokens.{text}"])
    assert np.abs(logits - ref[f"logits.{text}"]).max() <= 2e-4
    assert evaluated(engine(folder, backend="ref"), ref[f"tokens.{text}"]).tobytes() == logits.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", TEXTS[2:])
def test_the_mtp_block(engine, reference, backend, text):
    """Row i is what the block says behind token i, from the state behind token i - 1."""
    folder = reference / "deepseek_v4"
    tokens, ref = load_file(folder / "ref.safetensors")[f"tokens.{text}"], load_file(folder / "ref_mtp.safetensors")
    one = engine(folder, backend=backend, mtp=True)
    drafted = evaluated(one, tokens, "draft")
    assert np.abs(drafted[1:] - ref[f"mtp_logits.{text}"]).max() <= 1e-4
    assert not drafted[0].any()
    assert evaluated(one, tokens, "draft", chunk=7).tobytes() == drafted.tobytes()
    assert np.abs(evaluated(one, tokens) - ref[f"logits.{text}"]).max() <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text, tolerance", [("s12", 1e-4), ("s37", 1e-4), ("s140", 1e-4), ("s300", 2e-2)])
def test_rounding_is_that_of_the_published_code(engine, reference, backend, text, tolerance):
    """Rounded rows and a choice among them: a small error can turn a pick, so the long text gets a wider bound."""
    folder = reference / "deepseek_v4"
    tokens, ref = (
        load_file(folder / "ref.safetensors")[f"tokens.{text}"],
        load_file(folder / "ref_rounding.safetensors"),
    )
    one = engine(folder, backend=backend, rounding=True, mtp=True)
    assert np.abs(evaluated(one, tokens) - ref[f"logits.{text}"]).max() <= tolerance
    assert np.abs(evaluated(one, tokens, "draft")[1:] - ref[f"mtp_logits.{text}"]).max() <= tolerance


def traced(engine: ds4.Engine, tokens) -> list[dict[str, np.ndarray]]:
    """What each layer computed inside for these tokens, in one round."""
    config = {key: values[0] for key, values in engine.spec.config.items()}
    n, ratios = len(tokens), engine.spec.config["ratios"]
    dim, keep, used = (int(config[key]) for key in ("dim", "index_keep", "n_experts_used"))
    out = np.zeros(len(ratios) * n * (keep + 1 + 2 * used + (2 + int(config["streams"])) * dim), np.float32)
    lib.ds4_engine_trace(engine._handle(), ffi.from_buffer("float[]", out, require_writable=True), out.size)
    evaluated(engine, tokens, None, chunk=2048)
    written = lib.ds4_engine_trace(engine._handle(), ffi.NULL, 0)
    at, layers = 0, []
    for ratio in ratios:
        widths = {"far": keep, "far_n": 1} if ratio == 4 else {}
        widths |= {"attn_out": dim, "experts": used, "weights": used, "ffn_out": dim}
        widths["streams"] = int(config["streams"]) * dim
        layers.append({})
        for name, width in widths.items():
            layers[-1][name] = out[at : at + n * width].reshape(n, width)
            at += n * width
    assert at == written
    return layers


@pytest.mark.skipif(not TEST_BUILD, reason=NEEDS_TEST_BUILD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_computes_what_transformers_does(engine, reference, backend):
    ref = load_file(reference / "deepseek_v4" / "trace.safetensors")
    one = engine(reference / "deepseek_v4", backend=backend)
    for i, layer in enumerate(traced(one, ref["tokens"])):
        for name in ("attn_out", "ffn_out", "streams"):
            wanted = ref[f"layer{i}.{name}"].reshape(300, -1)
            assert np.abs(layer[name] - wanted).max() <= 1e-4, f"layer {i} {name}"
        order = np.argsort(ref[f"layer{i}.router_idx"], axis=1)
        assert (layer["experts"] == np.take_along_axis(ref[f"layer{i}.router_idx"], order, 1)).all(), f"layer {i}"
        assert np.abs(layer["weights"] - np.take_along_axis(ref[f"layer{i}.router_weights"], order, 1)).max() <= 1e-5
        if "far" not in layer:
            continue
        for t in range(300):
            picks = layer["far"][t][: int(layer["far_n"][t, 0])]
            wanted = ref[f"layer{i}.index_topk"][t]
            assert picks.tolist() == sorted(r for r in wanted.tolist() if 0 <= r < (t + 1) // 4), f"layer {i} token {t}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_compressed_rows_are_those_of_transformers(engine, reference, backend):
    ref = load_file(reference / "deepseek_v4" / "trace.safetensors")
    one = engine(reference / "deepseek_v4", backend=backend)
    names = [stream.name for stream in one.streams]
    with one.session() as session:
        session.eval(ref["tokens"])
        for name, layers in (("rows4", (2, 4)), ("rows128", (3, 5))):
            index, n = names.index(name), 300 // one.streams[names.index(name)].stride
            rows = np.frombuffer(session.rows(index, 0, n), np.float32).reshape(len(layers), n, -1)
            for k, layer in enumerate(layers):
                wanted = ref[f"layer{layer}.compressed_kv"]
                assert np.abs(rows[k, :, : wanted.shape[1]] - wanted).max() <= 1e-4, f"layer {layer}"


# ---- options ----


def test_options_that_do_not_fit_are_refused_by_name(engine):
    for options in ({"kv_dtype": "q8_0"}, {"kv_dtype": "q8_0", "rounding": True}, {"kv_dtype": "fp8"}):
        with pytest.raises(UnsupportedError, match=f"{options['kv_dtype']}.*deepseek_v4.*f32, f16"):
            ds4.Engine(TINY, **options)
    with pytest.raises(ArgumentError, match="options of DeepSeek V4"):
        ds4.Engine(DATA / "llama", rounding=True)
    with pytest.raises(UnsupportedError, match="no MTP block"):
        evaluated(engine(TINY), [1, 2], "draft")


def e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))
    return np.where(codes & 128, -size, size)


def test_fp8_rows_hold_rounded_rows_without_loss(engine):
    """E4M3 numbers, their scale, the rotary part as bf16; and E2M1 numbers of the indexer. The rows of the first layer
    depend on nothing that was stored before."""
    tokens, rows = some_tokens(200), {}
    for kv_dtype in ("f32", "fp8"):
        one = engine(TINY, kv_dtype=kv_dtype, rounding=True)
        with one.session() as session:
            session.eval(tokens)
            stream = one.streams[0]
            size = stream.row_bytes // stream.n_layers
            data = session.rows(0, 200 - 16, 16)
            rows[kv_dtype] = np.frombuffer(data, np.uint8).reshape(stream.n_layers, 16, size)[0]
    exact, stored = rows["f32"].view(np.float32), rows["fp8"]
    assert stored.shape == (16, 8 + 1 + 2 * 8)
    assert (e4m3(stored[:, :8].astype(int)) * 2.0 ** (stored[:, 8:9].astype(float) - 127) == exact[:, :8]).all()
    bits = stored[:, 9:].copy().view(np.uint16).astype(np.uint32) << 16
    assert (np.abs(bits.view(np.float32) - exact[:, 8:]) <= np.abs(exact[:, 8:]) * 2.0**-8).all()
