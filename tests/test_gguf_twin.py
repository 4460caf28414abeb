"""One model in both containers: a GGUF file written from a tiny checkpoint says the same as its safetensors folder."""

from __future__ import annotations

import gguf
import gguf_twin
import numpy as np
import pytest
from oracle import DATA, some_tokens

import ds4
from ds4.families import model_spec
from ds4.files import open_checkpoint

MODELS = ("llama", "qwen3", "qwen3_moe", "gemma3")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """twin(model, quantize): the path of the GGUF file, written once."""
    folder, written = tmp_path_factory.mktemp("twins"), {}

    def get(model: str, quantize: bool):
        path = folder / f"{model}-{'q8_0' if quantize else 'f32'}.gguf"
        return written.setdefault(path, path if path in written else gguf_twin.write(DATA / model, path, quantize))

    return get


def logits(path) -> np.ndarray:
    with ds4.Engine(path, threads=1, kv_dtype="f32", pool_tokens=2048) as engine, engine.session() as session:
        return np.array(session.eval(some_tokens(150), logits="all"))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_option_and_byte_is_the_same(twin, model, quantize):
    with open_checkpoint(DATA / model) as ours, open_checkpoint(twin(model, quantize)) as other:
        one, two = model_spec(ours), model_spec(other)
        assert one.arch == two.arch
        eps = {"norm_eps": [float(np.float32(one.config["norm_eps"][0]))]}  # GGUF keeps it in 32 bits
        pairs = {"rope_interleaved": [1.0]} if model == "llama" else {}
        assert two.config == one.config | eps | pairs
        held, formats = dict(two.tensors), set()
        assert held.keys() == dict(one.tensors).keys()
        for name, tensor in one.tensors:
            assert held[name].shape == tensor.shape, name
            formats.add(held[name].format)
            if model == "llama" and name.endswith((".q", ".k")):
                continue  # rows in another order: the logits tell
            values = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
            if held[name].format == "Q8_0":
                values = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            assert bytes(held[name].data) == values.tobytes(), name
        assert formats == ({"F32", "Q8_0"} if quantize else {"F32"})


@pytest.mark.parametrize("model", MODELS)
def test_f32_gives_the_same_logits(twin, model):
    ours, other = logits(DATA / model), logits(twin(model, False))
    if model == "llama":
        assert np.abs(ours - other).max() < 1e-4  # pairs in another order are added in another order
    else:
        assert ours.tobytes() == other.tobytes()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("model", MODELS)
def test_q8_0_gives_nearly_the_same_logits(twin, model):
    """Weights and activations lose a few bits. Where two experts are nearly equal the router may pick the other one, so
    single positions may lie far off, but not many."""
    ours, other = log_softmax(logits(DATA / model)), log_softmax(logits(twin(model, True)))
    kl = (np.exp(ours) * (ours - other)).sum(axis=1)
    assert np.isfinite(kl).all() and 0 < np.median(kl) < 0.01 and (kl > 0.1).mean() < 0.1
    assert (ours.argmax(axis=1) == other.argmax(axis=1)).mean() > 0.85
