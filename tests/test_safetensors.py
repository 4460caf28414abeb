"""The safetensors parser, the strict JSON reader, and folders with one container or an index and shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from corrupt import make

from ds4.errors import Ds4Error, FileFormatError, SystemResourceError, UnsupportedError
from ds4.files import jsonfile, open_checkpoint, safetensors

safetensors_numpy = pytest.importorskip("safetensors.numpy")

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_reads_what_the_safetensors_library_writes():
    rng = np.random.default_rng(2)
    arrays = {
        "a.f32": rng.standard_normal((3, 4)).astype(np.float32),
        "b.f16": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "c.i64": np.arange(5),
        "d.u8": np.arange(7, dtype=np.uint8),
        "e.scalar": np.array(2.5, np.float64),
        "f.empty": np.zeros((0, 3), np.float32),
        "g.bool": np.array([True, False]),
    }
    formats = {
        "a.f32": "F32",
        "b.f16": "F16",
        "c.i64": "I64",
        "d.u8": "U8",
        "e.scalar": "F64",
        "f.empty": "F32",
        "g.bool": "BOOL",
    }
    raw = safetensors_numpy.save(arrays, metadata={"format": "np"})
    tensors = safetensors.parse(raw, "x")
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = tensors[name]
        assert (tensor.name, tensor.format, tensor.shape) == (name, formats[name], array.shape)
        assert bytes(tensor.data) == array.tobytes() and tensor.data.readonly


def test_a_file_cut_at_any_byte_is_refused():
    whole = make.hf_weights()
    for size in range(len(whole)):
        with pytest.raises(FileFormatError, match="^some.safetensors"):
            safetensors.parse(whole[:size], "some.safetensors")
    assert len(safetensors.parse(whole, "x")) == 12


def test_any_byte_of_the_header_may_be_anything():
    whole = make.hf_weights()
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        for value in (0, 0x22, 0x39, 0x7D, 0xFF):
            try:
                safetensors.parse(whole[:at] + bytes([value]) + whole[at + 1 :], "x")
            except Ds4Error:
                pass


def test_every_dtype_has_its_size():
    for dtype, bits in safetensors.DTYPES.items():
        header = {"t": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, bits]}}
        assert safetensors.parse(make.container(header, bytes(bits)), "x")["t"].format == dtype
        header["t"]["data_offsets"] = [0, bits + 1]
        with pytest.raises(
            FileFormatError, match=f"{dtype} .2, 4. takes {bits} bytes, but the offsets give {bits + 1}"
        ):
            safetensors.parse(make.container(header, bytes(bits + 1)), "x")


def test_padding_behind_the_header_is_read():
    header = json.dumps({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode() + b" " * 5
    assert bytes(safetensors.parse(make.container(header, b"ab"), "x")["t"].data) == b"ab"


def test_tensors_are_limited(monkeypatch):
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 11)
    with pytest.raises(FileFormatError, match="holds 12 tensors; at most 11"):
        safetensors.parse(make.hf_weights(), "x")


# ---- folders ----


def in_first(name: str) -> bool:
    return "mlp" not in name


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A model of two shards with its index."""
    (tmp_path / "config.json").write_text(json.dumps(make.CONFIG))
    (tmp_path / SHARDS[0]).write_bytes(make.hf_weights(in_first))
    (tmp_path / SHARDS[1]).write_bytes(make.hf_weights(lambda name: not in_first(name)))
    write_index(tmp_path, {name: SHARDS[not in_first(name)] for name in safetensors.parse(make.hf_weights(), "x")})
    return tmp_path


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_shards_together_are_the_single_file(sharded, tmp_path_factory):
    single = tmp_path_factory.mktemp("single")
    for name, raw in make.folder().items():
        (single / name).write_bytes(raw)
    with open_checkpoint(sharded) as one, open_checkpoint(str(single)) as two:
        assert (one.kind, one.architecture, one.metadata) == ("safetensors", "llama", make.CONFIG)
        assert one.tensors.keys() == two.tensors.keys()
        for name, tensor in one.tensors.items():
            other = two.tensors[name]
            assert (tensor.format, tensor.shape, bytes(tensor.data)) == (other.format, other.shape, bytes(other.data))
    assert all(mapping.closed for mapping in one._mappings)


def test_three_faults_have_three_messages(sharded):
    """Not in the checkpoint, its shard is missing, its shard lacks it: the reader must know which one to mend."""
    name = "model.layers.0.mlp.up_proj.weight"
    full = read_index(sharded)

    write_index(sharded, {k: v for k, v in full.items() if k != name})
    with (
        open_checkpoint(sharded) as checkpoint,
        pytest.raises(FileFormatError, match="there is no tensor") as not_named,
    ):
        checkpoint.tensor(name)
    write_index(sharded, {**full, name: SHARDS[0]})
    with pytest.raises(FileFormatError, match=f"{SHARDS[0]}: lacks the tensor '{name}'.*different revisions") as lacks:
        open_checkpoint(sharded)
    write_index(sharded, full)
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(FileFormatError, match=f"of 2 shards 1 are missing: {SHARDS[1]}") as missing:
        open_checkpoint(sharded)
    assert len({str(error.value) for error in (not_named, lacks, missing)}) == 3


def test_all_missing_shards_are_listed(sharded):
    write_index(sharded, {f"t{i}": f"s{i}.safetensors" for i in range(7)})
    with pytest.raises(FileFormatError, match="of 7 shards 7 are missing: s0.safetensors, .*s4.safetensors and 2 more"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_name_is_not_used(sharded):
    full = read_index(sharded)
    del full["lm_head.weight"]
    write_index(sharded, full)
    with open_checkpoint(sharded) as checkpoint:
        assert "lm_head.weight" not in checkpoint.tensors and len(checkpoint.tensors) == 11


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/tmp/x.safetensors", "a/x.safetensors", "..", "x.bin", "", 7, None]
)
def test_a_shard_name_cannot_leave_the_folder(sharded, shard):
    outside = sharded.parent / "x.safetensors"
    outside.write_bytes(make.hf_weights())
    write_index(sharded, {"lm_head.weight": shard})
    with pytest.raises(FileFormatError, match="a shard is a plain file name"):
        open_checkpoint(sharded)


def test_links_inside_the_folder_are_followed(sharded):
    """Download caches keep the bytes elsewhere and link to them."""
    real = sharded / "blob"
    os.rename(sharded / SHARDS[0], real)
    os.symlink(real, sharded / SHARDS[0])
    with open_checkpoint(sharded) as checkpoint:
        assert len(checkpoint.tensors) == 12


def test_the_single_file_wins_over_an_index(sharded):
    (sharded / "model.safetensors").write_bytes(make.hf_weights(lambda name: name == "model.norm.weight"))
    with open_checkpoint(sharded) as checkpoint:
        assert list(checkpoint.tensors) == ["model.norm.weight"]


def test_folders_in_the_place_of_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(FileFormatError, match="model.safetensors: is not a regular file"):
        open_checkpoint(tmp_path)
    os.rmdir(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FileFormatError, match="not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read(sharded):
    (sharded / "config.json").chmod(0)
    with pytest.raises(SystemResourceError, match="cannot be opened"):
        open_checkpoint(sharded)


# ---- JSON ----


def test_json_values_are_those_of_json():
    text = '{"a": [1, -2.5e3, "\\ud83d\\ude00 é", null, true, {}], "b": 12345678901234567890}'
    assert jsonfile.parse_json(text.encode(), "x") == json.loads(text)


@pytest.mark.parametrize(
    "text, words",
    [
        (b'{"a":1,"b":{"k":1,"k":2}}', "duplicate key 'k'"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":1e400}', "too large"),
        (b'{"a":' + b"1" * 41 + b"}", "41 digits"),
        (b'"\\udc00"', "surrogate"),
        (b'["\\ud800", "\\ud83d\\ude00"]', "surrogate"),
        (b"[" * 100_000, "nested"),
        (b'{"":' * 100_000, "nested"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"\xff\xfe{\0}\0", "byte 0 is not UTF-8"),
        (b"{} {}", "Extra data, line 1, column 4"),
        (b"", "Expecting value"),
        (b"{'a': 1}", "line 1, column 2"),
        (b'{"a": "\x01"}', "control character"),
    ],
)
def test_json_faults(text, words):
    with pytest.raises(FileFormatError) as caught:
        jsonfile.parse_json(text, "some.json")
    assert str(caught.value).startswith("some.json: ") and words in str(caught.value)


def test_json_numbers_do_not_hang():
    with pytest.raises(FileFormatError, match="5000000 digits"):
        jsonfile.parse_json(b"9" * 5_000_000, "x")


def test_json_size_limit(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"[" + b" " * 98 + b"]")
    assert jsonfile.read_json(str(path), 100) == []
    with pytest.raises(FileFormatError, match="has 100 bytes, more than the 99"):
        jsonfile.read_json(str(path), 99)
    with pytest.raises(FileFormatError, match="a list where a JSON object is expected"):
        jsonfile.read_object(str(path), 100)


def test_unknown_dtype_is_named():
    header = {"t": {"dtype": "F8_E9M9", "shape": [1], "data_offsets": [0, 1]}}
    with pytest.raises(UnsupportedError, match="'F8_E9M9'"):
        safetensors.parse(make.container(header, b"\0"), "x")
