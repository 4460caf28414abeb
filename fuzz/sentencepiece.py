"""Fuzzes SentencePiece models: tokenizer.model, and the vocabulary inside a GGUF file; what loads must also encode and
decode. A fault of the C++ library would end the process, so the name of the input is known by its run."""

import sys
import tempfile
from pathlib import Path

# this file's own folder must not stand first: it would hide the package `sentencepiece`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4 import tokenizer  # noqa: E402
from ds4.files import Checkpoint, gguf  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import make, make_spm  # noqa: E402

TEXT = "ab ba\u2581 <unk> <0x41> \N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}\0 aabb"
MORE = (*make_spm.PIECES, ("\u2581", -4.0, make_spm.NORMAL), ("\u2581\u2581", 0.0, make_spm.USER),
        ("abab", -0.5, make_spm.UNUSED), ("<s>", 0.0, make_spm.CONTROL))  # fmt: skip


def seeds() -> list[bytes]:
    whole = make.Gguf()
    whole.keys.update(make.spm_keys(make_spm.gguf_keys()))
    return [
        make_spm.model(),
        make_spm.model(trainer={3: 1}),
        make_spm.model(MORE, normalizer={3: 1, 4: 0}),
        make_spm.model(MORE, trainer={3: 1}),
        make_spm.model((*MORE, *make_spm.BYTES), trainer={3: 2, 35: 1}),
        whole.bytes(),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:

        def target(data: bytes) -> None:
            if data[:4] == b"GGUF":
                checkpoint = Checkpoint("x.gguf", "gguf", "llama", *gguf.parse(data, "x.gguf"))
            else:
                (Path(folder) / "tokenizer.model").write_bytes(data)
                checkpoint = Checkpoint(folder, "safetensors", "llama", {}, {})
            loaded = tokenizer.load(checkpoint)
            if loaded is not None:
                loaded.decode(loaded.encode(TEXT))
                loaded.decode(loaded.encode(TEXT, special=True))

        common.main("sentencepiece", target, seeds())
