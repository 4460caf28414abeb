"""Weight formats: dequantisation against the gguf library, and dot products of every kernel against float64."""

import gguf
import numpy as np
import pytest
from oracle import ISAS

from ds4.core import check, ffi, lib
from ds4.errors import ArgumentError, NonFiniteError, UnsupportedError

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


def engine(tensors: dict[str, tuple], backend: str, dim: int):
    """A Llama of one layer that does nothing: its logits are `head` times the normed embedding.
    `tensors`: name -> (format, bytes, and scales where the format has them)."""
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
    given += [
        (key, name, VOCAB, dim, np.ascontiguousarray(data), *more) for key, (name, data, *more) in tensors.items()
    ]
    for key, name, rows, cols, data, *more in given:
        scales = (ffi.from_buffer(more[0]), more[0].nbytes) if more else (ffi.NULL, 0)
        what = handle, key.encode(), getattr(lib, f"DS4_{name}"), rows, cols
        check(lib.ds4_engine_tensor_scaled(*what, ffi.from_buffer(data), data.nbytes, *scales, err), err)
    check(lib.ds4_engine_ready(handle, b"f32", 64, 0, bytes(32), err), err)
    return handle, given


def logits_of(tensors: dict[str, tuple], backend: str, n: int, dim: int = DIM) -> np.ndarray:
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


# ---- formats whose scales are a tensor of their own ----

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = codes.astype(int) >> 3 & 15, codes.astype(int) & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size)


def scaled_weights(name: str, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random bytes, scales, and the numbers that they stand for."""
    rng = np.random.default_rng(23)
    if name == "FP8":
        codes = rng.integers(0, 255, (VOCAB, dim), dtype=np.uint8)
        codes[codes & 127 == 127] = 0x7E
        scales = rng.integers(118, 126, (-(-VOCAB // 128), -(-dim // 128)), dtype=np.uint8)
        return codes, scales, e4m3(codes) * 2.0 ** (scales.repeat(128, 0)[:VOCAB].repeat(128, 1)[:, :dim] - 127.0)
    codes = rng.integers(0, 256, (VOCAB, dim // 2), dtype=np.uint8)
    scales = rng.integers(118, 126, (VOCAB, dim // 32), dtype=np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(VOCAB, dim)
    values = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
    return codes, scales, values * 2.0 ** (scales.repeat(32, 1) - 127.0)


@pytest.mark.parametrize("dim", [96, 128, 416, 512])  # FP8: tiles of 128 columns, the last one short
@pytest.mark.parametrize("name", ["FP8", "FP4"])
def test_scaled_formats_on_every_kernel(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales, weights = scaled_weights(name, dim)
    embed = np.random.default_rng(5).standard_normal((VOCAB, dim)).astype(np.float32)
    tensors = {"embed": ("F32", embed), "head": (name, codes, scales)}
    want, n = logits_of(tensors, "ref", 21, dim), 21
    x = embed[:n].astype(np.float64)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    assert (np.abs(want - x @ weights.T) / (np.abs(x) @ np.abs(weights).T)).max() < 1e-6
    looked_up = {"embed": (name, codes, scales), "head": ("F32", embed)}
    rows = logits_of({"embed": ("F32", weights.astype(np.float32)), "head": ("F32", embed)}, "ref", n, dim)
    for isa in ISAS:
        monkeypatch.setenv("DS4_ISA", isa)
        try:
            assert logits_of(tensors, "cpu", n, dim).tobytes() == want.tobytes(), isa
            assert logits_of(looked_up, "cpu", n, dim).tobytes() == rows.tobytes(), isa
        except UnsupportedError:
            continue
    assert logits_of(looked_up, "ref", n, dim).tobytes() == rows.tobytes()


def test_every_code_of_fp8_and_fp4() -> None:
    for name, codes, wanted in (
        ("FP8", np.arange(256, dtype=np.uint8), e4m3(np.arange(256))),
        ("FP4", np.arange(16, dtype=np.uint8) * 17, np.repeat(np.r_[E2M1, -E2M1], 2)),
    ):
        out, err = np.empty(wanted.size, np.float32), ffi.new("ds4_error *")
        to = ffi.from_buffer("float[]", out, require_writable=True)
        number = getattr(lib, f"DS4_{name}")
        check(lib.ds4_format_dequant(number, ffi.from_buffer(codes), codes.size, 1, out.size, to, err), err)
        assert np.array_equal(out, wanted, equal_nan=True)


def test_scales_are_checked() -> None:
    codes, scales, _ = scaled_weights("FP8", 128)
    embed = np.ones((VOCAB, 128), np.float32)
    for head, error, words in (
        (("FP8", codes), ArgumentError, "0 bytes of scales"), (("FP8", codes, scales[:, :0]), ArgumentError, "of scales"),
        (("FP8", codes | 127, scales), NonFiniteError, "no number"), (("FP8", codes, scales | 255), NonFiniteError, "no number"),
        (("F32", embed, scales), ArgumentError, "1 bytes of scales"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            engine({"embed": ("F32", embed), "head": head}, "cpu", 128)


def test_an_isa_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_ISA", "mmx")
    err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
    with pytest.raises(UnsupportedError, match="mmx"):
        check(lib.ds4_engine_new(b"llama", b"cpu", 1, out, err), err)
