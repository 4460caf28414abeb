"""Fuzzes snapshots: damaged as they are, and with true checksums again, so that the checks behind them are reached."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ds4  # noqa: E402
from ds4.errors import Ds4Error  # noqa: E402
from fuzz import common  # noqa: E402
from tests.corrupt import snapshot  # noqa: E402

# windows make the lists of pages and marks longer; only a test build has them
TOYS = {"toy_window": 24, "toy_stride": 4} if os.environ.get("DS4_CORE") == "test" else None
MODEL = common.ROOT / "tests" / "data" / "llama"
FOLDER = tempfile.TemporaryDirectory()
PATH = Path(FOLDER.name, "s")
ENGINE = ds4.Engine(MODEL, threads=1, pool_tokens=4096, reach_slack=8, kv_dtype="q8_0", test_options=TOYS)


def load(data: bytes) -> None:
    before = {name: n for name, n in ENGINE.ledger().items() if name != "bytes_system"}
    PATH.write_bytes(data)
    try:
        with ENGINE.load(PATH) as s:
            s.check()
            s.sync([*s.tokens[:-1], 1, 2, 3][-s.ctx :])
            s.check()
    finally:
        after = {name: n for name, n in ENGINE.ledger().items() if name != "bytes_system"}
        if after != before:
            raise AssertionError(f"the ledger was {before} and is {after}")


def target(data: bytes) -> None:
    sealed = snapshot.seal(data)
    if sealed != data:
        with contextlib.suppress(Ds4Error):
            load(data)
    load(sealed)


def seeds() -> list[bytes]:
    files = []
    with ENGINE.session(ctx=256) as s:
        for n in (0, 30, 90, 40):
            s.eval([(7 * i + 3) % 512 for i in range(s.pos, s.pos + n)])
            if n == 30:
                s.mark_auto(pinned=True)
            s.save(PATH)
            files.append(PATH.read_bytes())
    return files


if __name__ == "__main__":
    common.main("snapshot", target, seeds())
