"""Fuzzes the tokenizer: tokenizer.json, and the tokenizer's keys inside a GGUF file; what loads must also encode and
decode."""

import json
import sys
import tempfile
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4 import tokenizer  # noqa: E402
from ds4.files import Checkpoint, gguf  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import make  # noqa: E402

TEXT = "ab ba <|end|> \N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}\0"


def seeds() -> list[bytes]:
    whole = make.Gguf()
    make.with_tokenizer()(whole)
    pairs = json.loads(json.dumps(make.TOKENIZER))
    pairs["model"]["merges"] = [["a", "b"]]
    return [json.dumps(make.TOKENIZER).encode(), json.dumps(pairs).encode(), whole.bytes()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:

        def target(data: bytes) -> None:
            if data[:4] == b"GGUF":
                checkpoint = Checkpoint("x.gguf", "gguf", "llama", *gguf.parse(data, "x.gguf"))
            else:
                (Path(folder) / "tokenizer.json").write_bytes(data)
                checkpoint = Checkpoint(folder, "safetensors", "llama", dict(make.CONFIG), {})
            loaded = tokenizer.load(checkpoint)
            if loaded is not None:
                loaded.decode(loaded.encode(TEXT))
                loaded.decode(loaded.encode(TEXT, special=True))

        common.main("tokenizer", target, seeds())
