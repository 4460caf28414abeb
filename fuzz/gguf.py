"""Fuzzes GGUF: the tables, then what the family makes of them, then the fingerprint."""

import sys
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.families import model_spec  # noqa: E402
from ds4.files import Checkpoint, gguf  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import make  # noqa: E402


def target(data: bytes) -> None:
    metadata, tensors = gguf.parse(data, "x.gguf")
    checkpoint = Checkpoint("x.gguf", "gguf", "llama", metadata, tensors)
    checkpoint.fingerprint(model_spec(checkpoint))


def seeds() -> list[bytes]:
    yarn = make.Gguf()
    for name, kind, value in (
        ("rope.scaling.type", make.STRING, "yarn"), ("rope.scaling.factor", make.F32, 4.0),
        ("rope.scaling.original_context_length", make.U32, 16), ("attention.key_length", make.U32, 2),
    ):  # fmt: skip
        make.set_key(f"llama.{name}", kind, value)(yarn)
    full = make.Gguf()
    make.with_tokenizer(make.with_more("rope_freqs.weight", [1]))(full)
    return [make.Gguf().bytes(), yarn.bytes(), full.bytes()]


if __name__ == "__main__":
    common.main("gguf", target, seeds())
