"""Weight formats: dequantisation against the gguf library, and dot products of every kernel against float64."""

import gguf
import numpy as np
import pytest

from ds4.core import check, ffi, lib
from ds4.errors import ArgumentError, UnsupportedError

FORMATS = {
    "F32": (lib.DS4_F32, gguf.GGMLQuantizationType.F32),
    "F16": (lib.DS4_F16, gguf.GGMLQuantizationType.F16),
    "BF16": (lib.DS4_BF16, gguf.GGMLQuantizationType.BF16),
    "Q4_1": (lib.DS4_Q4_1, gguf.GGMLQuantizationType.Q4_1),
    "Q8_0": (lib.DS4_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
QUANTISED = ("Q4_1", "Q8_0")
ISAS = ("scalar", "avx2", "avx512")
DIM, VOCAB = 96, 72  # 72 rows: the last group of 16 is not full


def random_weights(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Bytes of a tensor [rows, bytes of a row] whose blocks hold every bit pattern that a finite weight can have."""
    rng = np.random.default_rng(seed)
    if name not in QUANTISED:
        return gguf.quants.quantize(rng.standard_normal((rows, cols)).astype(np.float32), FORMATS[name][1]).view(
            np.uint8
        )
    size = gguf.GGML_QUANT_SIZES[FORMATS[name][1]][1]
    blocks = rng.integers(0, 256, (rows, cols // 32, size), dtype=np.uint8)
    scales = rng.standard_normal((rows, cols // 32, 2)).astype(np.float16) / 64
    blocks[:, :, :2] = scales[:, :, :1].copy().view(np.uint8)
    if name == "Q4_1":
        blocks[:, :, 2:4] = scales[:, :, 1:].copy().view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantised(name: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, FORMATS[name][1]).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantisation_equals_the_gguf_library(name: str) -> None:
    data = random_weights(name, 64, 256)
    out, err = np.empty((64, 256), np.float32), ffi.new("ds4_error *")
    raw = np.ascontiguousarray(data)
    status = lib.ds4_format_dequant(
        FORMATS[name][0],
        ffi.from_buffer(raw),
        raw.nbytes,
        64,
        256,
        ffi.from_buffer("float[]", out, require_writable=True),
        err,
    )
    check(status, err)
    assert out.tobytes() == dequantised(name, data).reshape(64, 256).tobytes()


def test_sizes_are_checked() -> None:
    err, size = ffi.new("ds4_error *"), ffi.new("uint64_t *")
    with pytest.raises(ArgumentError, match="33 columns"):
        check(lib.ds4_format_bytes(lib.DS4_Q8_0, 4, 33, size, err), err)
    with pytest.raises(ArgumentError, match="larger than memory"):
        check(lib.ds4_format_bytes(lib.DS4_F32, 2**40, 2**40, size, err), err)
    with pytest.raises(UnsupportedError, match="99"):
        check(lib.ds4_format_bytes(99, 4, 4, size, err), err)


def engine(name: str, head: np.ndarray, embed: np.ndarray, backend: str):
    """A Llama of one layer that does nothing: its logits are `head` times the normed embedding."""
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
    check(lib.ds4_engine_new(b"llama", backend.encode(), 2, out, err), err)
    handle = ffi.gc(out[0], lib.ds4_engine_free)
    settings = {"n_layers": 1, "vocab": VOCAB, "ctx": 64, "dim": DIM, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
    settings |= {"ffn_dim": 32, "norm_eps": 1e-5, "rope_base": 10000, "rope_interleaved": 0}
    for key, value in settings.items():
        check(lib.ds4_engine_set(handle, key.encode(), [value], 1, err), err)
    zeros = {"q": (16, DIM), "k": (8, DIM), "v": (8, DIM), "o": (DIM, 16)}
    zeros |= {"gate": (32, DIM), "up": (32, DIM), "down": (DIM, 32)}
    tensors = {f"layers.0.{key}": np.zeros(shape, np.float32) for key, shape in zeros.items()}
    tensors |= {key: np.ones((1, DIM), np.float32) for key in ("norm", "layers.0.attn_norm", "layers.0.ffn_norm")}
    tensors["embed"] = embed
    keep = [np.ascontiguousarray(head)]
    for key, value in tensors.items():
        keep.append(value)
        check(
            lib.ds4_engine_tensor(
                handle, key.encode(), lib.DS4_F32, *value.shape, ffi.from_buffer(value), value.nbytes, err
            ),
            err,
        )
    check(
        lib.ds4_engine_tensor(
            handle, b"head", FORMATS[name][0], VOCAB, DIM, ffi.from_buffer(keep[0]), keep[0].nbytes, err
        ),
        err,
    )
    check(lib.ds4_engine_ready(handle, b"f32", 64, 0, bytes(32), err), err)
    return handle, keep


def products(name: str, head: np.ndarray, embed: np.ndarray, backend: str, n: int) -> np.ndarray:
    handle, keep = engine(name, head, embed, backend)
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_session **")
    check(lib.ds4_session_new(handle, 0, out, err), err)
    session = ffi.gc(out[0], lib.ds4_session_free)
    logits, tokens = np.empty((n, VOCAB), np.float32), np.arange(n, dtype=np.int32)
    segment = ffi.new("ds4_segment *", {"session": session, "n": n, "want": lib.DS4_WANT_ALL})
    segment.tokens = ffi.from_buffer("int32_t[]", tokens)
    segment.out = ffi.from_buffer("float[]", logits, require_writable=True)
    check(lib.ds4_eval(handle, segment, 1, 0, ffi.NULL, ffi.NULL, err), err)
    del keep
    return logits


def activations(embed: np.ndarray, n: int, quantised: bool) -> np.ndarray:
    """What the head multiplies, in float64: normed rows, for the integer formats rounded to int8 in blocks of 32."""
    x = embed[:n].astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    if not quantised:
        return x
    blocks = x.astype(np.float32).reshape(n, DIM // 32, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(blocks / scale).astype(np.float64) * scale.astype(np.float64)).reshape(n, DIM)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", ("ref", *ISAS))
def test_dot_products_against_float64(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float formats: within float32 rounding of the exact product. Integer formats: the same, of the rounded
    activations; and near the unrounded ones."""
    if isa != "ref":
        monkeypatch.setenv("DS4_ISA", isa)
    rng = np.random.default_rng(5)
    embed = rng.standard_normal((VOCAB, DIM)).astype(np.float32)
    head, n = random_weights(name, VOCAB, DIM, seed=3), 21
    weights = dequantised(name, head).reshape(VOCAB, DIM).astype(np.float64)
    try:
        got = products(name, head, embed, "ref" if isa == "ref" else "cpu", n)
    except UnsupportedError as error:
        pytest.skip(f"this processor lacks {isa}: {error}")
    x = activations(embed, n, name in QUANTISED)
    size = np.abs(x) @ np.abs(weights).T
    assert np.isfinite(got).all()
    worst = (np.abs(got - x @ weights.T) / size).max()
    # A value that lies between two int8 numbers may be rounded either way by float32 and float64.
    assert worst < (2e-4 if name in QUANTISED else 1e-6), f"relative error {worst}"
    exact = activations(embed, n, quantised=False) @ weights.T
    assert np.abs(got - exact).max() / np.abs(exact).max() < (0.02 if name in QUANTISED else 1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_every_kernel_gives_the_bits_of_ref(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    embed = (rng.standard_normal((VOCAB, DIM)) * 10.0 ** rng.integers(-20, 10, (VOCAB, 1))).astype(np.float32)
    embed[3] = 0
    head = random_weights(name, VOCAB, DIM, seed=11)
    want = products(name, head, embed, "ref", 41)
    compared = 0
    for isa in ISAS:
        monkeypatch.setenv("DS4_ISA", isa)
        try:
            got = products(name, head, embed, "cpu", 41)
        except UnsupportedError:
            continue  # not on this processor
        assert got.tobytes() == want.tobytes(), isa
        compared += 1
    assert compared, "no kernel of backend cpu ran"


def test_an_isa_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_ISA", "mmx")
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
    with pytest.raises(UnsupportedError, match="mmx"):
        check(lib.ds4_engine_new(b"llama", b"cpu", 1, out, err), err)
