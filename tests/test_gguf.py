"""The GGUF parser against files written by the `gguf` library, by hand, and by strangers."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from corrupt import make

from ds4.errors import ArgumentError, Ds4Error, FileFormatError, UnsupportedError
from ds4.files import gguf as parser
from ds4.files import open_checkpoint


@pytest.fixture
def written(tmp_path):
    """(path, expected metadata, expected tensors) of a file with every value kind and several tensor types."""
    path = str(tmp_path / "all.gguf")
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    scalars = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.15625, "float64": 1e-300, "bool": True,
        "string": "Grüße, 😀",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    values = {f"k.{kind}": value for kind, value in scalars.items()} | {"k.empty": ""}
    writer.add_key_value("k.empty", "", gguf.GGUFValueType.STRING)  # add_string leaves empty texts out
    values["a.text"] = ["Ġ", "<|im_start|>", "日本"]
    writer.add_array("a.text", values["a.text"])
    tensors = {
        "f32": (gguf.GGMLQuantizationType.F32, rng.standard_normal((3, 5)).astype(np.float32)),
        "f16": (gguf.GGMLQuantizationType.F16, rng.standard_normal(7).astype(np.float16)),
        "q4_1": (gguf.GGMLQuantizationType.Q4_1, rng.standard_normal((4, 64)).astype(np.float32)),
        "q8_0": (gguf.GGMLQuantizationType.Q8_0, rng.standard_normal((2, 96)).astype(np.float32)),
        "bf16": (gguf.GGMLQuantizationType.BF16, rng.standard_normal((2, 3)).astype(np.float32)),
        "i32": (gguf.GGMLQuantizationType.I32, np.arange(6, dtype=np.int32).reshape(1, 2, 3)),
    }
    expected = {}
    for name, (kind, array) in tensors.items():
        exact = array.dtype != np.float32 or kind == gguf.GGMLQuantizationType.F32
        raw = array if exact else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        expected[name] = (kind.name, array.shape, raw.tobytes())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values, expected


def test_every_value_and_tensor_is_read(written):
    path, values, tensors = written
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.architecture, checkpoint.path) == ("gguf", "llama", path)
        for name, value in values.items():
            found = checkpoint.metadata[name]
            assert type(found) is type(value) and found == value, name
        assert list(checkpoint.tensors) == list(tensors)
        for name, (format, shape, raw) in tensors.items():
            tensor = checkpoint.tensors[name]
            assert (tensor.name, tensor.format, tensor.shape) == (name, format, shape)
            assert tensor.data.readonly and bytes(tensor.data) == raw


def test_type_table_is_that_of_the_gguf_library():
    ours = {number: entry for number, entry in parser.TYPES.items() if entry[0] != "Q8_1"}
    theirs = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
        if kind.name != "Q8_1"
    }
    assert {number: ours.get(number) for number in theirs} == theirs
    # never in a file; ggml computes with 2 halves and 32 bytes, the library counts two floats
    assert parser.TYPES[9] == ("Q8_1", 32, 36)


ARRAYS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12}


@pytest.mark.parametrize("code", ARRAYS)
def test_an_array_has_the_declared_element_type(code):
    """Reading u8 elements as i32 walks past their end (a fault of readers that trust the key's name)."""
    items = np.array([0, 1, 2, 100], "<" + code)
    raw = struct.pack("<IQ", ARRAYS[code], 4) + items.tobytes()
    model = make.Gguf()
    model.keys["x"] = make.key("x", make.ARRAY, raw)
    found = parser.parse(model.bytes(), "x")[0]["x"]
    assert found.dtype == items.dtype and found.tolist() == items.tolist() and not found.flags.writeable


def test_bool_arrays_and_empty_arrays():
    model = make.Gguf()
    model.keys["b"] = make.key("b", make.ARRAY, struct.pack("<IQ3B", make.BOOL, 3, 1, 0, 1))
    model.keys["e"] = make.key("e", make.ARRAY, struct.pack("<IQ", make.F64, 0))
    model.keys["s"] = make.key("s", make.ARRAY, struct.pack("<IQ", make.STRING, 0))
    metadata, _ = parser.parse(model.bytes(), "x")
    assert metadata["b"].dtype == np.bool_ and metadata["b"].tolist() == [True, False, True]
    assert metadata["e"].dtype == np.float64 and len(metadata["e"]) == 0 and metadata["s"] == []


def test_version_2_and_default_alignment():
    model = make.Gguf()
    model.version = 2
    del model.keys["general.alignment"]
    model.entries = {"t": make.entry("t", [3, 2], 0, 0), "u": make.entry("u", [2], 24, 32)}
    table = model.head() + b"".join(model.keys.values()) + b"".join(model.entries.values())
    raw = bytes(range(24))
    tensors = parser.parse(table + bytes(-len(table) % 32) + raw + bytes(8) + b"ab", "x")[1]
    assert tensors["t"].shape == (2, 3) and bytes(tensors["t"].data) == raw
    assert tensors["u"].format == "I8" and bytes(tensors["u"].data) == b"ab"


def test_a_file_cut_at_any_byte_is_refused():
    whole = make.Gguf().bytes()
    for size in range(len(whole)):
        with pytest.raises(FileFormatError, match="^some.gguf: "):
            parser.parse(whole[:size], "some.gguf")
    parser.parse(whole, "some.gguf")


def test_a_vocabulary_without_tensors_cut_at_any_byte_is_refused():
    """Nothing follows the last string, so only its own check can see the cut."""
    model = make.Gguf()
    model.entries, model.data = {}, b""
    model.keys["x"] = make.key("x", make.ARRAY, (make.STRING, ["one", "two", "three"]))
    whole = model.head() + b"".join(model.keys.values())
    for size in range(len(whole)):
        with pytest.raises(FileFormatError, match="^v.gguf: "):
            parser.parse(whole[:size], "v.gguf")
    assert parser.parse(whole, "v.gguf")[0]["x"] == ["one", "two", "three"]


def test_the_smallest_overlap_is_seen():
    model = make.Gguf()
    up, gate = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"
    end = len(model.data)
    model.entries[gate] = make.entry(gate, [9], 24, end)  # I8: 9 bytes
    model.entries[up] = make.entry(up, [2, 2], 0, end + 8)
    model.data += bytes(64)
    with pytest.raises(FileFormatError, match="'blk.0.ffn_gate.weight' and 'blk.0.ffn_up.weight' overlap at byte"):
        parser.parse(model.bytes(), "x")
    model.entries[gate] = make.entry(gate, [8], 24, end)
    parser.parse(model.bytes(), "x")


def test_any_byte_may_be_anything():
    """Every byte of the tables in turn gets every extreme value: only our own errors may come out."""
    whole = make.Gguf().bytes()
    for at in range(len(whole) - len(make.Gguf().data)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            try:
                parser.parse(whole[:at] + bytes([value]) + whole[at + 1 :], "x")
            except Ds4Error:
                pass


@pytest.mark.timeout(30)
def test_200k_strings():
    """A check per string must not make loading slow; benchmarks/loading.py has the figures."""
    words = [f"Ġtoken{i}" for i in range(200_000)]
    model = make.Gguf()
    model.keys["x"] = make.key("x", make.ARRAY, (make.STRING, words))
    raw = model.bytes()
    assert parser.parse(raw, "x")[0]["x"] == words


def test_strings_in_arrays_are_limited(monkeypatch):
    monkeypatch.setattr(parser, "MAX_STRINGS", 5)
    model = make.Gguf()  # holds four already
    model.keys["x"] = make.key("x", make.ARRAY, (make.STRING, ["a"]))
    parser.parse(model.bytes(), "x")
    model.keys["y"] = make.key("y", make.ARRAY, (make.STRING, ["a"]))
    with pytest.raises(FileFormatError, match="brings the file to 6 strings"):
        parser.parse(model.bytes(), "x")


def test_metadata_is_limited(monkeypatch):
    monkeypatch.setattr(parser, "MAX_METADATA", 700)
    model = make.Gguf()
    model.keys["x"] = make.key("x", make.STRING, "y" * 650)
    with pytest.raises(FileFormatError, match="more than 700 bytes"):
        parser.parse(model.bytes(), "x")


def test_gaps_between_tensors_are_allowed_and_order_is_free():
    model = make.Gguf()
    up, gate = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"
    end = len(model.data)
    model.entries[up] = make.entry(up, [2, 2], 0, end + 64)
    model.entries[gate] = make.entry(gate, [2, 2], 0, end + 16)
    model.data += bytes(16) + struct.pack("<4f", 1, 2, 3, 4) + bytes(32) + struct.pack("<4f", 5, 6, 7, 8)
    tensors = parser.parse(model.bytes(), "x")[1]
    assert struct.unpack("<4f", tensors[up].data) == (5, 6, 7, 8)
    assert struct.unpack("<4f", tensors[gate].data) == (1, 2, 3, 4)


def test_not_a_file(tmp_path):
    with pytest.raises(ArgumentError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(Ds4Error, match="cannot be opened"):
        open_checkpoint("a\0b.gguf")
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_checkpoint("/dev/zero")
    (tmp_path / "model.safetensors").write_bytes(make.EMPTY)
    with pytest.raises(ArgumentError, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "m.gguf").write_bytes(make.Gguf().bytes())
    with pytest.raises(FileFormatError, match="no config.json.*give the path of that file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="must be text"):
        open_checkpoint(b"m.gguf")


def test_close_gives_the_mapping_back_when_nothing_uses_it(tmp_path):
    (tmp_path / "m.gguf").write_bytes(make.Gguf().bytes())
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        tensor = checkpoint.tensors["token_embd.weight"]
        assert len(bytes(tensor.data)) == 32
    assert all(mapping.closed for mapping in checkpoint._mappings)
    with pytest.raises(ValueError):
        bytes(tensor.data)
    checkpoint.close()  # twice is fine

    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    array = np.frombuffer(checkpoint.tensors["token_embd.weight"].data, "<f4")
    expected = array.copy()
    checkpoint.close()
    assert array.tolist() == expected.tolist()  # the bytes stay for as long as the array lives
    assert not checkpoint._mappings[0].closed


def test_removed_and_unknown_types_are_named():
    for number, words in ((36, "IQ4_NL_4_4"), (5, "Q4_3"), (99, "number 99")):
        model = make.Gguf()
        make.set_entry("blk.0.ffn_up.weight", [2, 2], number)(model)
        with pytest.raises(UnsupportedError, match=words):
            parser.parse(model.bytes(), "x")


@pytest.mark.model
def test_smollm2_opens_whole(smollm2):
    with open_checkpoint(smollm2) as checkpoint:
        assert checkpoint.architecture == "llama" and len(checkpoint.tensors) == 272
        tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == 49152 and tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert checkpoint.metadata["tokenizer.ggml.token_type"].dtype == np.int32
        assert len(checkpoint.metadata["tokenizer.ggml.merges"]) == 48900
        embed = checkpoint.tensors["token_embd.weight"]
        assert (embed.format, embed.shape, len(embed.data)) == ("Q8_0", (49152, 576), 49152 * 18 * 34)
        assert {t.format for t in checkpoint.tensors.values()} == {"F32", "Q4_1", "Q8_0"}


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_as_the_gguf_library_reads_it(smollm2):
    reader = gguf.GGUFReader(smollm2)
    with open_checkpoint(smollm2) as checkpoint:
        assert list(checkpoint.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = checkpoint.tensors[theirs.name]
            assert ours.format == theirs.tensor_type.name and ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert np.array_equal(np.frombuffer(ours.data, np.uint8), theirs.data.reshape(-1).view(np.uint8))
