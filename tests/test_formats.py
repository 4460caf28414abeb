"""Weight formats: dequantisation against the gguf library, and dot products of every kernel against float64."""

import gguf
import numpy as np
import pytest

from ds4.core import check, ffi, lib
from ds4.errors import ArgumentError, UnsupportedError

FORMATS = {
    name: (getattr(lib, f"DS4_{name}"), gguf.GGMLQuantizationType[name])
    for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ4_NL MXFP4".split()
}
FLOAT = ("F32", "F16", "BF16")
INTEGER = tuple(name for name in FORMATS if name not in (*FLOAT, "MXFP4"))
SCALES = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}  # where the f16 scale and minimum lie; else at the front
MINIMUM = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
INTEGER_SCALES = {
    "Q2_K": slice(0, 16), "Q3_K": slice(96, 108), "Q4_K": slice(4, 16), "Q5_K": slice(4, 16), "Q6_K": slice(192, 208)
}  # fmt: skip
ISAS = ("scalar", "avx2", "avx512")
DIM, VOCAB = 512, 72  # 72 rows: the last group of 16 is not full


def random_weights(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Bytes of a tensor [rows, bytes of a row] whose blocks hold every bit pattern that a finite weight can have."""
    rng = np.random.default_rng(seed)
    if name in FLOAT:
        return gguf.quants.quantize(rng.standard_normal((rows, cols)).astype(np.float32), FORMATS[name][1]).view(
            np.uint8
        )
    block, size = gguf.GGML_QUANT_SIZES[FORMATS[name][1]]
    blocks = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(115, 125, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    at, n = SCALES.get(name, 0), 2 if name in MINIMUM else 1
    scales = (rng.standard_normal((rows, cols // block, n)) / 64).astype(np.float16)
    blocks[:, :, at : at + 2 * n] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantised(name: str, data: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(data, FORMATS[name][1]).astype(np.float32)


def numbers(name: str, data: np.ndarray, rows: int, cols: int) -> np.ndarray:
    out, err = np.empty((rows, cols), np.float32), ffi.new("ds4_error *")
    raw = np.ascontiguousarray(data)
    to = ffi.from_buffer("float[]", out, require_writable=True)
    check(lib.ds4_format_dequant(FORMATS[name][0], ffi.from_buffer(raw), raw.nbytes, rows, cols, to, err), err)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_dequantisation_equals_the_gguf_library(name: str) -> None:
    data = random_weights(name, 64, 512)
    assert numbers(name, data, 64, 512).tobytes() == dequantised(name, data).reshape(64, 512).tobytes()


def test_every_scale_of_mxfp4() -> None:
    """All 256 exponent bytes, the two subnormal ones too, times all 16 codes."""
    data = np.empty((256, 17), np.uint8)
    data[:, 0] = np.arange(256)
    data[:, 1:] = np.arange(16) * 17
    with np.errstate(over="ignore"):
        want = dequantised("MXFP4", data)
    assert numbers("MXFP4", data, 256, 32).tobytes() == want.tobytes()


def test_sizes_are_checked() -> None:
    err, size = ffi.new("ds4_error *"), ffi.new("uint64_t *")
    with pytest.raises(ArgumentError, match="33 columns"):
        check(lib.ds4_format_bytes(lib.DS4_Q8_0, 4, 33, size, err), err)
    with pytest.raises(ArgumentError, match="larger than memory"):
        check(lib.ds4_format_bytes(lib.DS4_F32, 2**40, 2**40, size, err), err)
    with pytest.raises(UnsupportedError, match="99"):
        check(lib.ds4_format_bytes(99, 4, 4, size, err), err)


def engine(tensors: dict[str, tuple[str, np.ndarray]], backend: str, dim: int):
    """A Llama of one layer that does nothing: its logits are `head` times the normed embedding.
    `tensors`: name -> (format, bytes)."""
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
    check(lib.ds4_engine_new(b"llama", backend.encode(), 2, out, err), err)
    handle = ffi.gc(out[0], lib.ds4_engine_free)
    settings = {"n_layers": 1, "vocab": VOCAB, "ctx": 64, "dim": dim, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
    settings |= {"ffn_dim": 32, "norm_eps": 1e-5, "rope_base": 10000, "rope_interleaved": 0}
    for key, value in settings.items():
        check(lib.ds4_engine_set(handle, key.encode(), [value], 1, err), err)
    zeros = {"q": (16, dim), "k": (8, dim), "v": (8, dim), "o": (dim, 16)}
    zeros |= {"gate": (32, dim), "up": (32, dim), "down": (dim, 32)}
    given = [(f"layers.0.{key}", "F32", *shape, np.zeros(shape, np.float32)) for key, shape in zeros.items()]
    given += [
        (key, "F32", 1, dim, np.ones(dim, np.float32)) for key in ("norm", "layers.0.attn_norm", "layers.0.ffn_norm")
    ]
    given += [(key, name, VOCAB, dim, np.ascontiguousarray(data)) for key, (name, data) in tensors.items()]
    for key, name, rows, cols, data in given:
        raw = ffi.from_buffer(data)
        check(lib.ds4_engine_tensor(handle, key.encode(), FORMATS[name][0], rows, cols, raw, data.nbytes, err), err)
    check(lib.ds4_engine_ready(handle, b"f32", 64, 0, bytes(32), err), err)
    return handle, given


def logits_of(tensors: dict[str, tuple[str, np.ndarray]], backend: str, n: int, dim: int = DIM) -> np.ndarray:
    handle, keep = engine(tensors, backend, dim)
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


def products(name: str, head: np.ndarray, embed: np.ndarray, backend: str, n: int) -> np.ndarray:
    return logits_of({"embed": ("F32", embed), "head": (name, head)}, backend, n, embed.shape[1])


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
    x = activations(embed, n, name in INTEGER)
    size = np.abs(x) @ np.abs(weights).T
    assert np.isfinite(got).all()
    worst = (np.abs(got - x @ weights.T) / size).max()
    # A value that lies between two int8 numbers may be rounded either way by float32 and float64.
    assert worst < (2e-4 if name in INTEGER else 1e-6), f"relative error {worst}"
    exact = activations(embed, n, quantised=False) @ weights.T
    assert np.abs(got - exact).max() / np.abs(exact).max() < (0.02 if name in INTEGER else 1e-6)


def with_extremes(name: str, data: np.ndarray) -> np.ndarray:
    """Makes the first rows extreme: all codes 0 or the largest, with integer scales of both signs; f16 scales stay."""
    if name in FLOAT:
        return data
    block, size = gguf.GGML_QUANT_SIZES[FORMATS[name][1]]
    blocks = data.reshape(VOCAB, -1, size).copy()
    float_scales = np.zeros(size, bool)
    at = SCALES.get(name, 0)
    float_scales[at : at + (4 if name in MINIMUM else 1 if name == "MXFP4" else 2)] = True
    for row, (code, scale) in enumerate((c, s) for c in (0, 255) for s in (0, 127, 128, 255)):
        blocks[row][:, ~float_scales] = code
        if name in INTEGER_SCALES:
            blocks[row][:, INTEGER_SCALES[name]] = scale
    return blocks.reshape(VOCAB, -1)


@pytest.mark.parametrize(
    ("name", "dim"), [*((n, DIM) for n in FORMATS), *((n, 96) for n in FORMATS if n[-2:] != "_K" and n != "IQ2_XXS")]
)
def test_every_kernel_gives_the_bits_of_ref(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    embed = (rng.standard_normal((VOCAB, dim)) * 10.0 ** rng.integers(-20, 10, (VOCAB, 1))).astype(np.float32)
    embed[:4] = np.array([0, 1, -1, 1])[:, None]  # every int8 is 127, or -127; the last row has both
    embed[3, ::2] = -1
    head = with_extremes(name, random_weights(name, VOCAB, dim, seed=11))
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


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_are_the_dequantised_ones(name: str) -> None:
    """Backend cpu reads them from its packed copy. A head that is the identity shows the row, normed; the same engine
    with the dequantised rows as F32 has to agree in every bit."""
    data = random_weights(name, VOCAB, DIM, seed=13)
    head = ("F32", np.eye(VOCAB, DIM, 100, dtype=np.float32) + np.eye(VOCAB, DIM, dtype=np.float32))
    rows = numbers(name, data, VOCAB, DIM)
    for backend in ("ref", "cpu"):
        got = logits_of({"embed": (name, data), "head": head}, backend, 40)
        assert got.tobytes() == logits_of({"embed": ("F32", rows), "head": head}, backend, 40).tobytes(), backend
        assert np.abs(got).max() > 0


def test_an_isa_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_ISA", "mmx")
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
    with pytest.raises(UnsupportedError, match="mmx"):
        check(lib.ds4_engine_new(b"llama", b"cpu", 1, out, err), err)
