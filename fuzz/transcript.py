"""Fuzzes the log of a conversation: damaged as it is, and its events damaged and sealed again, so that the checks
behind the checksums are reached. What opens can go on, and opens again as it was left."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4 import conversations  # noqa: E402
from ds4.chat_formats import ToolCall  # noqa: E402
from ds4.nodes import Node  # noqa: E402
from ds4.sealed import seal  # noqa: E402
from ds4.store import Store  # noqa: E402
from ds4.transcript import Held, Transcript  # noqa: E402
from fuzz import common  # noqa: E402

FOLDER = tempfile.TemporaryDirectory()
PATH = Path(FOLDER.name, "c")


def sealed(data: bytes) -> bytes:
    """The log whose events stand in a JSON object {"events": [...]}; other data as they are."""
    try:
        events = json.loads(data)["events"]
        lines, before = [], ""
        for event in events:
            line, before = seal({key: value for key, value in event.items() if key != "sum"} or {"": 0}, before)
            lines.append(line)
        return b"".join(lines)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data


def target(data: bytes) -> None:
    shutil.rmtree(PATH, ignore_errors=True)
    PATH.mkdir()
    log = PATH / "log-000001.jsonl"
    log.write_bytes(sealed(data))
    before = log.read_bytes()
    for damage in conversations.verify(PATH):
        assert str(damage).isprintable() and len(str(damage)) < 500, ascii(str(damage))
    conversations.conversations(PATH.parent)
    with Store.open(PATH) as store:
        transcript = Transcript(store)
        transcript.append(Node("user", (1, 2), "goes on"))
        transcript.replace(transcript.surface[-1:])
        transcript.undo()
        left = transcript.surface, transcript.held, transcript.seq, transcript.history(), transcript.checkpoints
        assert store.failed is None
        continued = store.damage is not None
    assert (log.read_bytes() == before) if continued else log.read_bytes().startswith(before), "rewritten in place"
    with Store.open(PATH) as store:
        assert store.damage is None, store.damage
        transcript = Transcript(store)
        found = transcript.surface, transcript.held, transcript.seq, transcript.history(), transcript.checkpoints
        assert found == left, "opened again it is another conversation"


def seeds() -> list[bytes]:
    transcript = Transcript(Store.create(PATH, {"model": "m", "tools": []}))
    transcript.append(Node("system", (1, 2), "s"), Node("user", (3,), "u"))
    transcript.append(Node("assistant", (4, 5), "a", calls=(ToolCall("read", {"path": "x", "n": [1, None]}, "c1"),)))
    transcript.hold(Held("tool", "result", "c1"))
    transcript.append(Node("tool", (6,), "r", result_of="c1"), release=True)
    spill = transcript.store.spill.prepare(transcript.surface[1:])
    checkpoint = Node("user", (7,), "sum", "checkpoint", data={"number": 1, "ledger": []})
    transcript.record("compaction_started", reason="x")
    transcript.replace([transcript.surface[0], checkpoint], spills=[spill], reason="x", before=6)
    transcript.undo()
    transcript.rewind(4)
    transcript.fork(PATH.parent / "f").store.close()
    transcript.store.close()
    found = []
    for path in (PATH, PATH.parent / "f"):
        log = (path / "log-000001.jsonl").read_bytes()
        found += [log, json.dumps({"events": [json.loads(line) for line in log.splitlines()]}).encode()]
    shutil.rmtree(PATH.parent / "f")
    return found


if __name__ == "__main__":
    common.main("transcript", target, seeds())
