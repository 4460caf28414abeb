"""Fuzzes GGUF: the tables, then what the family makes of them, then the fingerprint."""

import sys
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.families import FAMILIES, model_spec  # noqa: E402
from ds4.files import Checkpoint, gguf  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import families, make  # noqa: E402


def target(data: bytes) -> None:
    metadata, tensors = gguf.parse(data, "x.gguf")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or ("gguf", architecture) not in FAMILIES:
        architecture = "llama"
    checkpoint = Checkpoint("x.gguf", "gguf", architecture, metadata, tensors)
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
    gemma = families.gemma()
    pattern = "gemma3.attention.sliding_window_pattern"
    make.set_key(pattern, make.ARRAY, (make.BOOL, [1]))(gemma)
    others = [families.moe(), families.gemma(), gemma]
    return [model.bytes() for model in (make.Gguf(), yarn, full, *others)]


if __name__ == "__main__":
    common.main("gguf", target, seeds())
