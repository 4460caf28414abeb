"""Writes the corpus of broken files: `python tests/corrupt/make.py`. The same bytes on every run; they are committed.

Each case is a loadable tiny model with one fault, so that nothing but the fault can be the reason of the error (where
the weights are never reached, an empty container stands for them). `CASES` maps "folder/name" to (files by path inside
the case, or the bytes of a single file; words that the error must contain).
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))  # for `python tests/corrupt/make.py`

from tests.corrupt import make_spm  # noqa: E402

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

CASES: dict[str, tuple[bytes | dict[str, bytes], str]] = {}


def case(name: str, content: bytes | dict[str, bytes], words: str) -> None:
    assert name not in CASES
    CASES[name] = content, words


# ---- GGUF, byte by byte ----

SCALARS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    """One key-value; an array's value is (element type, items), raw bytes are taken as they are."""
    head = text(name) + struct.pack("<I", kind)
    if isinstance(value, bytes):
        return head + value
    if kind == STRING:
        return head + text(value)
    if kind == ARRAY:
        element, items = value
        body = b"".join(text(i) if element == STRING else struct.pack("<" + SCALARS[element], i) for i in items)
        return head + struct.pack("<IQ", element, len(items)) + body
    return head + struct.pack("<" + SCALARS[kind], value)


def entry(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


SHAPES = {
    "token_embd": [2, 4], "output": [2, 4], "output_norm": [2], "blk.0.attn_norm": [2], "blk.0.attn_q": [2, 2],
    "blk.0.attn_k": [2, 2], "blk.0.attn_v": [2, 2], "blk.0.attn_output": [2, 2], "blk.0.ffn_norm": [2],
    "blk.0.ffn_gate": [2, 2], "blk.0.ffn_up": [2, 2], "blk.0.ffn_down": [2, 2],
}  # fmt: skip
COUNTS = {name: dims[0] * (dims[1] if len(dims) > 1 else 1) for name, dims in SHAPES.items()}
OFFSETS = {name: sum(4 * n for n in list(COUNTS.values())[:i]) for i, name in enumerate(COUNTS)}
TOKENS = ["a", "b", "ab", "<|end|>"]


def values(name: str) -> bytes:
    """The weights of one tensor: a different small number in every place."""
    first = OFFSETS[name] // 4
    return struct.pack(f"<{COUNTS[name]}f", *(0.125 * (first + i) - 3 for i in range(COUNTS[name])))


class Gguf:
    """A valid tiny llama as a GGUF file, in pieces that a case may change before `bytes`."""

    def __init__(self) -> None:
        self.magic, self.version = b"GGUF", 3
        self.n_tensors: int | None = None
        self.n_keys: int | None = None
        self.keys = {
            "general.architecture": key("general.architecture", STRING, "llama"),
            "general.alignment": key("general.alignment", U32, 8),
            "llama.block_count": key("llama.block_count", U32, 1),
            "llama.context_length": key("llama.context_length", U32, 64),
            "llama.embedding_length": key("llama.embedding_length", U32, 2),
            "llama.feed_forward_length": key("llama.feed_forward_length", U32, 2),
            "llama.attention.head_count": key("llama.attention.head_count", U32, 1),
            "llama.attention.layer_norm_rms_epsilon": key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
            "tokenizer.ggml.tokens": key("tokenizer.ggml.tokens", ARRAY, (STRING, TOKENS)),
        }
        self.entries = {
            f"{name}.weight": entry(f"{name}.weight", dims, 0, OFFSETS[name]) for name, dims in SHAPES.items()
        }
        self.data = b"".join(values(name) for name in SHAPES)

    def head(self) -> bytes:
        n_tensors = len(self.entries) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        return self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)

    def bytes(self) -> bytes:
        table = self.head() + b"".join(self.keys.values()) + b"".join(self.entries.values())
        return table + bytes(-len(table) % 8) + self.data


def gguf(name: str, words: str, change: Callable[[Gguf], None], folder: str = "gguf") -> None:
    model = Gguf()
    change(model)
    case(f"{folder}/{name}.gguf", model.bytes(), words)


def with_tokenizer(change: Callable[[Gguf], Any] = lambda model: None) -> Callable[[Gguf], None]:
    def both(model: Gguf) -> None:
        for name, kind, value in (
            ("model", STRING, "gpt2"), ("pre", STRING, "smollm"), ("token_type", ARRAY, (I32, [1, 1, 1, 3])),
            ("merges", ARRAY, (STRING, ["a b"])), ("eos_token_id", U32, 3),
        ):  # fmt: skip
            set_key(f"tokenizer.ggml.{name}", kind, value)(model)
        change(model)

    return both


def set_key(name: str, kind: int, value: Any) -> Callable[[Gguf], None]:
    return lambda model: model.keys.update({name: key(name, kind, value)})


def set_entry(name: str, *args: Any, **more: Any) -> Callable[[Gguf], None]:
    return lambda model: model.entries.update({name: entry(name, *args, **more)})


def set_field(**fields: Any) -> Callable[[Gguf], None]:
    return lambda model: vars(model).update(fields)


def gguf_cuts() -> None:
    whole, model = Gguf().bytes(), Gguf()
    table = len(model.head()) + sum(map(len, model.keys.values()))
    entries = table + sum(map(len, model.entries.values()))
    array = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    for name, size, words in (
        ("empty", 0, "empty"),
        ("magic", 3, "not a GGUF file"),
        ("version", 6, "the version takes 4 bytes"),
        ("counts", 20, "the key count takes 8 bytes"),
        ("no_keys", 24, "claims 9 key-values"),
        ("in_key", 150, "cut"),
        ("array_type", array + 5, "cut"),
        ("array_count", array + 10, "cut"),
        ("array_items", array + 30, "cut"),
        ("in_array", table - 2, "string 3 of 4"),
        ("after_keys", table, "cut"),
        ("in_entry", entries - 6, "cut"),
        ("after_entries", entries, "cut"),
        ("no_data", len(whole) - len(model.data), "cut"),
        ("in_data", len(whole) - 20, "cut"),
    ):
        case(f"gguf/cut_{name}.gguf", whole[:size], words)


def gguf_cases() -> None:
    gguf_cuts()
    gguf("magic_of_old_ggml", "not a GGUF file", set_field(magic=b"ggjt"))
    gguf("version_1", "version 1", set_field(version=1))
    gguf("version_4", "version 4", set_field(version=4))
    gguf("big_endian", "big-endian", set_field(version=3 << 24))
    for name, count in (("max", 2**64 - 1), ("overflow", 2**64 // 32 + 1)):
        gguf(f"n_tensors_{name}", f"claims {count} tensors", set_field(n_tensors=count))
        gguf(f"n_keys_{name}", f"claims {count} key-values", set_field(n_keys=count))
    gguf("n_tensors_one_more", "at most 64", set_field(n_tensors=13))
    gguf("n_keys_one_more", "claims", set_field(n_keys=10))
    gguf("n_keys_0", "dimensions", set_field(n_keys=0))
    gguf("n_tensors_0", "no tensor", set_field(n_tensors=0))

    name = "general.name"
    for length in (2**64 - 1, 2**63, 1 << 40, 3000):
        gguf(f"string_length_{length}", f"key '{name}'", set_key(name, STRING, text("x", length)))
    gguf("string_not_utf8", "UTF-8", set_key(name, STRING, text(b"\xff\xfe\x80")))
    gguf("key_not_utf8", "UTF-8", lambda m: m.keys.update(x=key(b"a\xff", U8, 1)))
    gguf("key_too_long", "at most 65535", lambda m: m.keys.update(x=text("k", 65536) + bytes(8)))
    gguf("key_twice", "duplicate key", lambda m: m.keys.update(x=m.keys["llama.block_count"]))
    for kind in (13, 2**32 - 1):
        gguf(f"value_type_{kind}", f"type {kind}", set_key(name, kind, b"\0" * 8))
    gguf("bool_2", "bool", set_key(name, BOOL, b"\2"))
    for kind in (U8, I32, BOOL, F64, STRING):
        for word, count in (("max", 2**64 - 1), ("overflow", 2**64 // 8 + 1)):
            gguf(f"array_{word}_type_{kind}", f"'{name}'", set_key(name, ARRAY, struct.pack("<IQ", kind, count)))
    gguf("array_of_arrays", "array of arrays", set_key(name, ARRAY, struct.pack("<IQIQ", ARRAY, 1, U8, 0)))
    gguf("array_type_13", "type 13", set_key(name, ARRAY, struct.pack("<IQ", 13, 1)))
    gguf("array_bool_7", "bools", set_key(name, ARRAY, struct.pack("<IQB", BOOL, 1, 7)))
    strings = struct.pack("<IQ", STRING, 2) + text("a")
    gguf("array_string_length", "string 1 of 2", set_key(name, ARRAY, strings + text("", 2**64 - 1)))
    gguf("array_string_not_utf8", "UTF-8", set_key(name, ARRAY, (STRING, [b"ok", b"\xc3"])))

    for value in (0, 1, 33, 2**32 - 1):
        gguf(f"alignment_{value}", "general.alignment", set_key("general.alignment", U32, value))
    gguf("alignment_text", "general.alignment", set_key("general.alignment", STRING, "32"))
    gguf("alignment_64", "alignment 64", set_key("general.alignment", U32, 64))
    gguf_tensors()
    gguf_options()


def gguf_tensors() -> None:
    up = "blk.0.ffn_up.weight"
    gguf("tensor_twice", "duplicate tensor", lambda m: m.entries.update(x=m.entries[up]))
    gguf("tensor_name_too_long", "at most 64", set_entry("x" * 65, [2], 0, 0))
    gguf("tensor_name_not_utf8", "UTF-8", lambda m: m.entries.update(x=entry(b"\x80", [2])))
    gguf("tensor_dims_0", "0 dimensions", set_entry(up, []))
    gguf("tensor_dims_5", "5 dimensions", set_entry(up, [1, 1, 1, 1, 4]))
    gguf("tensor_dims_max", "4294967295 dimensions", set_entry(up, [2, 2], n_dims=2**32 - 1))
    gguf("tensor_dim_zero", "dimensions [2, 0]", set_entry(up, [2, 0]))
    gguf("tensor_dim_negative", "dimensions", set_entry(up, [2**64 - 2, 2]))
    gguf("tensor_product_overflow", "cut", set_entry(up, [2**32, 2**32]))
    gguf("tensor_product_wraps_to_4", "cut", set_entry(up, [2**62 + 1, 4]))
    gguf("tensor_bytes_overflow", "cut", set_entry(up, [2**62]))
    gguf("tensor_offset_max", "cut", set_entry(up, [2, 2], 0, 2**64 - 32))
    gguf("tensor_offset_past_end", "cut", set_entry(up, [2, 2], 0, sum(4 * n for n in COUNTS.values())))
    gguf("tensor_offset_unaligned", "alignment", set_entry(up, [2, 2], 0, 5))
    gguf("tensor_overlap", "overlap", set_entry(up, [2, 2], 0, 0))
    gguf("tensor_overlap_partly", "overlap", set_entry(up, [2, 3], 0, OFFSETS["blk.0.ffn_gate"] + 8))
    for kind, words in ((4, "Q4_2"), (31, "Q4_0_4_4"), (42, "number 42"), (2**32 - 1, "number 4294967295")):
        gguf(f"tensor_type_{kind}", words, set_entry(up, [2, 2], kind))
    gguf("tensor_block", "Q4_K block", set_entry(up, [2, 2], 12))
    gguf("tensor_type_iq1_s", "IQ1_S", with_more(up, [256], 19))
    gguf("tensor_shape", "shape [1, 2]", set_entry(up, [2, 1], 0, OFFSETS["blk.0.ffn_up"]))
    gguf("tensor_missing", f"no tensor '{up}'", lambda m: m.entries.pop(up))
    gguf("tensor_unknown", "'blk.0.attn_q.bias'", with_more("blk.0.attn_q.bias", [2]))
    gguf("rope_divisor_zero", "rope_freqs", with_more("rope_freqs.weight", [1], value=0.0))
    gguf("rope_divisor_nan", "rope_freqs", with_more("rope_freqs.weight", [1], value=float("nan")))
    gguf("rope_divisor_shape", "rope_freqs", with_more("rope_freqs.weight", [2]))


def with_more(name: str, dims: list[int], kind: int = 0, value: float = 1.0) -> Callable[[Gguf], None]:
    """Puts one more tensor behind the others."""

    def change(model: Gguf) -> None:
        model.entries[name] = entry(name, dims, kind, len(model.data))
        model.data += struct.pack("<f", value) * 40

    return change


def gguf_options() -> None:
    """A table that is well-formed and options that make no sense, or that this version does not know."""
    gguf("architecture_missing", "general.architecture", lambda m: m.keys.pop("general.architecture"))
    gguf("architecture_number", "general.architecture", set_key("general.architecture", U32, 1))
    gguf("architecture_unknown", "'mamba'", set_key("general.architecture", STRING, "mamba"))
    gguf("architecture_control_characters", "\\x1b", set_key("general.architecture", STRING, "\x1b[2J"))
    gguf("split", "join", set_key("split.count", U16, 3))
    gguf("adapter", "general.type", set_key("general.type", STRING, "adapter"))
    gguf("block_count_missing", "block_count is missing", lambda m: m.keys.pop("llama.block_count"))
    for word, words, name, kind, value in (
        ("0", "from 1 to", "block_count", U32, 0), ("text", "'1'", "block_count", STRING, "1"),
        ("float", "1.0", "block_count", F32, 1.0), ("bool", "true", "block_count", BOOL, 1),
        ("2_63", "from 1 to", "block_count", U64, 2**63), ("negative", "-1", "block_count", I32, -1),
        ("array", "for each layer", "block_count", ARRAY, (U32, [1])), ("2", "'blk.1.", "block_count", U32, 2),
        ("2_31", "from 1 to", "embedding_length", U32, 2**31), ("4", "shape", "embedding_length", U32, 4),
        ("3", "shape", "feed_forward_length", U32, 3), ("0", "from 1 to", "context_length", U32, 0),
        ("3", "divide", "attention.head_count", U32, 3), ("2", "divide", "attention.head_count_kv", U32, 2),
        ("3", "odd", "attention.key_length", U32, 3), ("2_20", "from 1 to", "attention.key_length", U32, 2**20),
        ("4", "value_length", "attention.value_length", U32, 4),
        ("nan", "nan", "attention.layer_norm_rms_epsilon", F32, float("nan")),
        ("1", "rope.dimension_count", "rope.dimension_count", U32, 1),
        ("tiny", "above 1", "rope.freq_base", F32, 1e-40),
        ("0", "above 0", "rope.scaling.factor", F32, 0.0),
        ("longrope", "'longrope'", "rope.scaling.type", STRING, "longrope"),
        ("1", "attn_factor", "rope.scaling.yarn_attn_factor", F32, 1.0), ("8", "expert_count", "expert_count", U32, 8),
        ("half", "'llama.logit_scale'", "logit_scale", F32, 0.5), ("5", "shape", "vocab_size", U32, 5),
        ("4096", "sliding_window", "attention.sliding_window", U32, 4096),
    ):  # fmt: skip
        gguf(f"{name.replace('.', '_')}_{word}", words, set_key(f"llama.{name}", kind, value))


# ---- safetensors ----


def container(header: Any, data: bytes, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


HF_NAMES = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm", "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj", "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj", "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj", "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}  # fmt: skip


def hf_weights(keep: Callable[[str], bool] = lambda name: True) -> bytes:
    """The tiny llama's tensors, those of them that `keep` wants, as one container."""
    header, data = {}, b""
    for name, dims in SHAPES.items():
        if keep(f"{HF_NAMES[name]}.weight"):
            raw = values(name)
            span = [len(data), len(data) + len(raw)]
            header[f"{HF_NAMES[name]}.weight"] = {"dtype": "F32", "shape": dims[::-1], "data_offsets": span}
            data += raw
    return container(header, data)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2, "intermediate_size": 2,
    "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 4, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}  # fmt: skip


EMPTY = container({}, b"")


def folder(config: Any = CONFIG, **files: Any) -> dict[str, bytes]:
    """The files of a model folder; `_` in a name stands for a dot, None leaves a file out."""
    found = {"config.json": config, "model.safetensors": hf_weights()}
    found |= {name.replace("_", "."): value for name, value in files.items()}
    as_bytes = lambda v: v if isinstance(v, bytes) else json.dumps(v, separators=(",", ":")).encode()  # noqa: E731
    return {name: as_bytes(value) for name, value in found.items() if value is not None}


def safetensors(name: str, words: str, content: bytes) -> None:
    case(f"safetensors/{name}", folder({"model_type": "llama"}, model_safetensors=content), words)


def safetensors_cases() -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

    def one(**change: Any) -> dict[str, Any]:
        return {"a": {**good, **change}}

    def two(*spans: list[int]) -> dict[str, Any]:
        return {f"t{i}": {"dtype": "U8", "shape": [s[1] - s[0]], "data_offsets": s} for i, s in enumerate(spans)}

    data = bytes(8)
    whole = hf_weights()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for cut, words in (
        (0, "empty"),
        (5, "less than"),
        (8, "cut"),
        (header_end - 1, "cut"),
        (header_end, "cut"),
        (len(whole) - 1, "cut"),
    ):
        safetensors(f"cut_{cut}", words, whole[:cut])
    for length in (0, 1):
        safetensors(f"header_length_{length}", "header", container(one(), data, length))
    for length in (101 << 20, 2**32, 2**63, 2**64 - 1):
        safetensors(f"header_length_{length}", f"header of {length}", container(one(), data, length))
    safetensors("header_longer_than_file", "cut", container(one(), data, 200))
    safetensors("header_not_json", "JSON", container(b"{'a': 1}", data))
    safetensors("header_not_utf8", "UTF-8", container(b'{"\xff": 1}', data))
    safetensors("header_list", "begin with", container([1], data))
    safetensors("header_with_nul", "JSON", container(json.dumps(one()).encode() + b"\0", data))
    safetensors("header_nan", "NaN", container(b'{"a":NaN}', data))
    safetensors("header_deep", "nested", container(b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}", data))
    safetensors("header_key_twice", "duplicate key 'a'", container(b'{"a":1,"a":2}', data))
    safetensors("entry_key_twice", "duplicate key 'dtype'", container(b'{"a":{"dtype":"F32","dtype":"F16"}}', data))
    safetensors("pickle", "header", b"PK\x03\x04" + bytes(60))
    safetensors("metadata_number", "`__metadata__`", container({"__metadata__": {"step": 3}, **one()}, data))
    safetensors("metadata_text", "`__metadata__`", container({"__metadata__": "pt", **one()}, data))
    for value in (None, [], "F32", 3):
        safetensors(f"entry_{json.dumps(value).strip(chr(34))}", "must be described", container({"a": value}, data))
    for left_out in good:
        safetensors(
            f"no_{left_out}", "exactly", container({"a": {k: v for k, v in good.items() if k != left_out}}, data)
        )
    safetensors("key_too_many", "exactly", container(one(strides=[1]), data))
    safetensors("dtype_unknown", "'F33'", container(one(dtype="F33"), data))
    safetensors("dtype_number", "dtype", container(one(dtype=0), data))
    for word, shape in (
        ("negative", [-2]), ("float", [2.0]), ("texts", ["2"]), ("bool", [True, 2]), ("2_64", [2**64]), ("text", "2"),
        ("null", None), ("nested", [2, [1]]), ("9_dims", [1] * 9),
    ):  # fmt: skip
        safetensors(f"shape_{word}", "the shape must be", container(one(shape=shape), data))
    safetensors("shape_overflow", "takes", container(one(shape=[2**62, 2**62, 2]), data))
    safetensors("shape_wraps", "takes", container(one(shape=[2**62, 4, 2]), data))
    safetensors("size_wrong", "takes 12", container(one(shape=[3]), data))
    for word, words, span in (
        ("reversed", "reversed", [8, 0]), ("past_end", "cut", [0, 16]), ("negative", "data_offsets", [-8, 0]),
        ("2_64", "data_offsets", [0, 2**64]), ("three", "data_offsets", [0, 8, 8]), ("one", "data_offsets", [0]),
        ("float", "data_offsets", [0, 8.0]), ("object", "data_offsets", {}), ("null", "data_offsets", None),
        ("texts", "data_offsets", ["0", "8"]),
    ):  # fmt: skip
        safetensors(f"offsets_{word}", words, container(one(data_offsets=span), data))
    safetensors("overlap", "overlap", container(two([0, 5], [3, 8]), data))
    safetensors("overlap_twice_the_same", "overlap", container(two([0, 8], [0, 8]), data))
    safetensors("hole", "hole of 2", container(two([0, 3], [5, 8]), data))
    safetensors("hole_at_start", "hole of 1", container(two([1, 8]), data))
    safetensors("trailing_bytes", "holds 8", container(two([0, 7]), data))
    safetensors(
        "subbyte_half", "takes 2 bytes", container({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0")
    )


# ---- the index of a sharded model ----


def index_cases() -> None:
    names = [f"{name}.weight" for name in HF_NAMES.values()]
    in_first = lambda name: "mlp" not in name  # noqa: E731
    first, second = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
    weights = {name: first if in_first(name) else second for name in names}
    shards = {first: hf_weights(in_first), second: hf_weights(lambda name: not in_first(name))}

    def index(
        name: str, words: str, content: Any, without: str = "", needs_shards: bool = True, **replaced: bytes
    ) -> None:
        files = folder(model_safetensors=None, model_safetensors_index_json=content) | (shards if needs_shards else {})
        if without:
            del files[without]
        for shard, raw in replaced.items():
            files[{"first": first, "second": second}[shard]] = raw
        case(f"index/{name}", files, words)

    good = {"metadata": {"total_size": 200}, "weight_map": weights}
    moved = "model.layers.0.mlp.up_proj.weight"
    index("cut", "JSON", json.dumps(good).encode()[:300])
    index("not_json", "JSON", b"weights")
    index("list", "object", [good])
    index("no_map", "weight_map", {"metadata": {}})
    index("map_empty", "weight_map", {"weight_map": {}})
    index("map_list", "weight_map", {"weight_map": names})
    index("key_twice", "duplicate key", b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}')
    index("shard_missing", f"1 are missing: {second}", good, without=second)
    index(
        "shard_lacks_tensor",
        "lacks the tensor 'model.layers.0.mlp.up_proj.weight'",
        {"weight_map": {**weights, moved: first}},
    )
    index("tensor_not_named", "no tensor 'model.layers.0.mlp.up_proj.weight'",
          {"weight_map": {k: v for k, v in weights.items() if k != moved}})  # fmt: skip
    index("shard_cut", "cut", good, second=shards[second][:-4])
    index("shard_empty", "empty", good, second=b"")
    index("shard_is_json", "header", good, second=b'{"a": "this is no container"}')
    for word, shard in (
        ("parent", "../secret.safetensors"), ("absolute", "/etc/model.safetensors"), ("subfolder", "a/b.safetensors"),
        ("dots", ".."), ("hidden", ".safetensors"), ("nul", "a\0.safetensors"), ("backslash", "..\\a.safetensors"),
        ("suffix", "pytorch_model.bin"), ("number", 1), ("null", None), ("empty", ""),
        ("long", "a" * 300 + ".safetensors"),
        ("newline", "a.safetensors\n"), ("surrogate", "\ud800.safetensors"),
    ):  # fmt: skip
        words = "surrogate" if word == "surrogate" else "a shard is a plain file name"
        index(f"shard_name_{word}", words, {"weight_map": {moved: shard}}, needs_shards=False)


# ---- config.json ----


def config_cases() -> None:
    def config(name: str, words: str, weights: bytes = EMPTY, **change: Any) -> None:
        options = {k: v for k, v in (CONFIG | change).items() if v != "absent"}
        case(f"config/{name}", folder(options, model_safetensors=weights), words)

    def raw(name: str, words: str, content: bytes) -> None:
        case(f"config/{name}", folder(content, model_safetensors=None), words)

    whole = json.dumps(CONFIG).encode()
    raw("empty_object", "model_type", b"{}")
    raw("cut", "JSON", whole[:100])
    raw("empty_file", "JSON", b"")
    raw("bom", "JSON", b"\xef\xbb\xbf" + whole)
    raw("utf16", "UTF-8", json.dumps(CONFIG).encode("utf-16"))
    raw("list", "object", b"[]")
    raw("deep_list", "nested", b"[" * 3000)
    raw("deep_object", "nested", b'{"a":' * 3000)
    raw("long_number", "digits", b'{"model_type": ' + b"9" * 5000 + b"}")
    raw("infinite_number", "1e999", b'{"model_type": "llama", "rms_norm_eps": 1e999}')
    raw("infinity", "Infinity", b'{"model_type": "llama", "rms_norm_eps": Infinity}')
    raw("key_twice", "duplicate key 'vocab_size'", b'{"model_type":"llama","vocab_size":4,"vocab_size":4}')
    raw("no_weights", "neither", whole)
    case("config/no_config", folder(None), "no config.json")
    config("model_type_null", "model_type", model_type=None)
    config("model_type_list", "model_type", model_type=["llama"])
    config("model_type_unknown", "'mixtral'", model_type="mixtral")
    config("classifier", "architectures", architectures=["LlamaForSequenceClassification"])
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        config(f"{name}_absent", f"{name} is missing", **{name: "absent"})
        for word, value in (
            ("0", 0),
            ("negative", -1),
            ("float", 2.0),
            ("text", "2"),
            ("huge", 10**30),
            ("true", True),
        ):
            config(f"{name}_{word}", name, **{name: value})
    config("layers_2", "no tensor 'model.layers.1.", hf_weights(), num_hidden_layers=2)
    config("vocab_5", "shape [4, 2]", hf_weights(), vocab_size=5)
    config("head_dim_3", "odd", head_dim=3)
    config("head_dim_huge", "head_dim", head_dim=2**40)
    config("heads_do_not_divide", "head_dim is missing", num_attention_heads=3)
    config("kv_heads_do_not_divide", "do not divide", num_attention_heads=2, head_dim=2, num_key_value_heads=3)
    config("eps_text", "rms_norm_eps", rms_norm_eps="1e-5")
    config("eps_0", "rms_norm_eps", rms_norm_eps=0)
    config("tied_but_another_head", "ties", hf_weights(), tie_word_embeddings=True)
    config("tied_text", "tie_word_embeddings", tie_word_embeddings="yes")
    config("ctx_huge", "max_position_embeddings", max_position_embeddings=2**31)
    for name, value in (
        ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "gptq"}), ("auto_map", {"AutoModel": "x.y"}),
        ("rope_interleaved", True),
        ("logit_scale", 0.5), ("layer_types", ["sliding_attention"]), ("num_local_experts", 8),
    ):  # fmt: skip
        config(f"refused_{name}", name, **{name: value})
    rope_cases(config)


def rope_cases(config: Callable[..., None]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for name, words, value in (
        ("rope_list", "rope_scaling", []), ("rope_text", "rope_scaling", "linear"),
        ("rope_dynamic", "'dynamic'", {"type": "dynamic", "factor": 2.0}),
        ("rope_longrope", "'longrope'", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
        ("rope_type_number", "rope_type", {"rope_type": 1}),
        ("rope_types_differ", "type", {"rope_type": "linear", "type": "yarn", "factor": 2.0}),
        ("rope_factor_absent", "factor is missing", {"rope_type": "linear"}),
        ("rope_factor_0", "factor", {"rope_type": "linear", "factor": 0}),
        ("rope_factor_negative", "factor", {"rope_type": "linear", "factor": -2.0}),
        ("rope_factor_text", "factor", {"rope_type": "linear", "factor": "2"}),
        ("rope_option_unknown", "'mscale'", {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}),
        ("rope_per_layer", "'full_attention'", {"full_attention": {"rope_type": "default"}}),
        ("llama3_bands", "low_freq_factor", {**llama3, "low_freq_factor": 4.0}),
        ("llama3_no_low", "low_freq_factor is missing", {k: v for k, v in llama3.items() if k != "low_freq_factor"}),
        ("yarn_range_empty", "YaRN", {**yarn, "beta_fast": 1e-9, "beta_slow": 1e9}),
        ("yarn_beta_tiny", "YaRN", {**yarn, "beta_fast": 5e-324}),
        ("rope_factor_tiny", "usable", {"rope_type": "linear", "factor": 1e-300}),
        ("yarn_attention_0", "attention_factor", {**yarn, "attention_factor": 0}),
        ("yarn_mscale_negative", "mscale", {**yarn, "mscale": -1.0, "mscale_all_dim": 1.0}),
        ("yarn_truncate_number", "truncate", {**yarn, "truncate": 1}),
        ("yarn_original_0", "original_max_position_embeddings", {**yarn, "original_max_position_embeddings": 0}),
    ):  # fmt: skip
        config(name, words, rope_scaling=value)
    for value in (0.0, 1.0, -10000.0, "10000", True, 10**40 - 1):
        config(f"rope_theta_{str(value)[:6]}", "rope_theta", rope_theta=value)
    config("rope_theta_twice", "rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config(
        "rope_both",
        "differs",
        rope_parameters={"rope_type": "default"},
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )


# ---- tokenizers: the model is sound, only its tokenizer is broken ----


def tokenizer_cases() -> None:
    def broken(name: str, words: str, change: Callable[[dict[str, Any]], Any]) -> None:
        parts = copy.deepcopy(TOKENIZER)
        change(parts)
        case(f"tokenizer/{name}", folder(tokenizer_json=parts, model_safetensors=EMPTY), words)

    def raw(name: str, words: str, content: bytes) -> None:
        case(f"tokenizer/{name}", folder(tokenizer_json=content, model_safetensors=EMPTY), words)

    whole = json.dumps(TOKENIZER).encode()
    raw("empty_file", "JSON", b"")
    raw("cut", "JSON", whole[:200])
    raw("list", "object", b"[]")
    raw("deep", "nested", b'{"model":' + b"[" * 3000)
    raw("not_utf8", "UTF-8", b'{"\xff":0}')
    raw("key_twice", "duplicate key 'a'", whole.replace(b'"b": 1', b'"a": 1'))
    broken("no_model", "model is", lambda t: t.pop("model"))
    broken("model_list", "model is", lambda t: t.update(model=[]))
    broken("model_unigram", "'Unigram'", lambda t: t["model"].update(type="Unigram"))
    broken("vocab_list", "vocab", lambda t: t["model"].update(vocab=["a", "b"]))
    for word, value in (("negative", -1), ("text", "1"), ("float", 1.5), ("huge", 2**40), ("twice", 0), ("null", None)):
        broken(f"id_{word}", "the id ", lambda t, value=value: t["model"]["vocab"].update(b=value))
    broken("merges_text", "merges is", lambda t: t["model"].update(merges="a b"))
    for word, words, value in (
        ("unknown", "'az'", "a z"), ("one_part", "merge 0 is 'ab'", "ab"), ("number", "merge 0 is 3", 3),
        ("three", "merge 0 is a list", ["a", "b", "ab"]), ("null", "merge 0 is null", None),
    ):  # fmt: skip
        broken(f"merge_{word}", words, lambda t, value=value: t["model"].update(merges=[value]))
    broken("added_text", "added_tokens is", lambda t: t.update(added_tokens="<|end|>"))
    broken("added_id_huge", "id 1099511627776", lambda t: t["added_tokens"][0].update(id=2**40))
    broken("added_id_negative", "id -3", lambda t: t["added_tokens"][0].update(id=-3))
    broken("added_id_taken", "the id 0", lambda t: t["added_tokens"][0].update(id=0))
    broken("added_no_content", "content", lambda t: t["added_tokens"][0].pop("content"))
    broken("pre_tokenizer_unknown", "'Whitespace'", lambda t: t.update(pre_tokenizer={"type": "Whitespace"}))
    broken("normalizer_unknown", "'Lowercase'", lambda t: t.update(normalizer={"type": "Lowercase"}))

    tokens, types, merges = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
    for name, words, change in (
        ("no_tokens", f"{tokens} is missing", lambda m: m.keys.pop(tokens)),
        ("tokens_numbers", f"{tokens} is an array", set_key(tokens, ARRAY, (U32, [1, 2, 3, 4]))),
        ("tokens_text", f"{tokens} is 'a b ab'", set_key(tokens, STRING, "a b ab")),
        ("tokens_twice", "token 'a'", set_key(tokens, ARRAY, (STRING, ["a", "a", "ab", "<|end|>"]))),
        ("types_too_few", "2 token types", set_key(types, ARRAY, (I32, [1, 1]))),
        ("types_text", types, set_key(types, ARRAY, (STRING, ["1", "1", "1", "3"]))),
        ("types_float", types, set_key(types, ARRAY, (F32, [1.0, 1.0, 1.0, float("nan")]))),
        ("types_unknown", "99", set_key(types, ARRAY, (I32, [1, 1, 1, 99]))),
        ("no_merges", f"{merges} is missing", lambda m: m.keys.pop(merges)),
        ("merges_numbers", f"{merges} is an array", set_key(merges, ARRAY, (U8, [1, 2]))),
        ("merges_unknown", "'az'", set_key(merges, ARRAY, (STRING, ["a z"]))),
        ("merges_one_part", "merge 0 is 'ab'", set_key(merges, ARRAY, (STRING, ["ab"]))),
        ("pre_unknown", "'unheard-of'", set_key("tokenizer.ggml.pre", STRING, "unheard-of")),
        ("pre_number", "tokenizer.ggml.pre is 1", set_key("tokenizer.ggml.pre", U32, 1)),
        ("model_unknown", "'t5'", set_key("tokenizer.ggml.model", STRING, "t5")),
        ("eos_out_of_range", "eos_token_id is 4", set_key("tokenizer.ggml.eos_token_id", U32, 4)),
        ("eos_text", "eos_token_id is '3'", set_key("tokenizer.ggml.eos_token_id", STRING, "3")),
        ("eos_max", f"eos_token_id is {2**64 - 1}", set_key("tokenizer.ggml.eos_token_id", U64, 2**64 - 1)),
    ):
        gguf(name, words, with_tokenizer(change), "tokenizer")


def spm_cases() -> None:
    def proto(name: str, content: bytes, words: str) -> None:
        files = folder(tokenizer_model=content, model_safetensors=EMPTY)
        case(f"tokenizer_spm/{name}", files, words)

    def keys(name: str, values: dict[str, Any], words: str) -> None:
        gguf(name, words, lambda m: m.keys.update(spm_keys(values)), "tokenizer_spm")

    make_spm.proto_cases(proto)
    make_spm.gguf_cases(keys)


def spm_keys(values: dict[str, Any]) -> dict[str, bytes]:
    """The key-values of `make_spm.gguf_keys`, as bytes."""
    return {f"tokenizer.ggml.{name}": key(f"tokenizer.ggml.{name}", *value) for name, value in values.items() if value}


def build() -> None:
    CASES.clear()
    gguf_cases()
    safetensors_cases()
    index_cases()
    config_cases()
    tokenizer_cases()
    spm_cases()


build()


def write(root: Path, cases: dict[str, tuple[bytes | dict[str, bytes], str]] = CASES) -> None:
    """Writes every case below `root`; folders that hold cases are emptied first."""
    for name in {name.split("/")[0] for name in cases}:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, (content, _) in cases.items():
        for inner, raw in ({"": content} if isinstance(content, bytes) else content).items():
            path = root / name / inner if inner else root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)


if __name__ == "__main__":
    write(HERE)
