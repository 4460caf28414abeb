"""Fuzzes model.safetensors.index.json, beside two sound shards."""

import json
import sys
import tempfile
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.families import model_spec  # noqa: E402
from ds4.files import open_checkpoint  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import make  # noqa: E402

SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def in_first(name: str) -> bool:
    return "mlp" not in name


def prepare(folder: Path) -> list[bytes]:
    """Writes everything but the index; returns a sound index."""
    (folder / "config.json").write_text(json.dumps(make.CONFIG))
    (folder / SHARDS[0]).write_bytes(make.hf_weights(in_first))
    (folder / SHARDS[1]).write_bytes(make.hf_weights(lambda name: not in_first(name)))
    names = [f"{name}.weight" for name in make.HF_NAMES.values()]
    weight_map = {name: SHARDS[0] if in_first(name) else SHARDS[1] for name in names}
    return [json.dumps({"metadata": {"total_size": 200}, "weight_map": weight_map}).encode()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def target(data: bytes) -> None:
            (folder / "model.safetensors.index.json").write_bytes(data)
            with open_checkpoint(folder) as checkpoint:
                model_spec(checkpoint)

        common.main("index", target, prepare(folder))
