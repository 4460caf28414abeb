"""What the tests of compaction share: chats on tiny engines, near-full conversations, and what must hold afterwards."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from oracle import DATA, NEEDS_TEST_BUILD, TEST_BUILD, Fresh, settled
from surfaces import assert_alternating, assert_paired
from tiny_tokenizer import CHATML, DEEPSEEK, QWEN, tokenizer_json

import ds4
from ds4.agent.chat import Chat
from ds4.chat_formats import ToolCall
from ds4.compaction import summary as summary_module
from ds4.compaction.live import common, open_calls
from ds4.compaction.policy import CompactionPolicy
from ds4.events import CompactionDone, CompactionFailed, Event
from ds4.nodes import Node, size_of
from ds4.sampling import Sampling

GEMMA = ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
CTX = 2048
# a tokenizer of bytes makes every text long: a small summary and an early trigger leave room for the request
POLICY = CompactionPolicy(
    soft_fraction=0.5, summary_max=64, summary_min_room=16, tail_fraction=0.05, request="short", generation_reserve=128
)
SUMMARY = "Six maps, quays."
RULE = "Do not change any file, deadline Friday 14:00."
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"test_options": {"toy_window": 24}},
    "stride": {"test_options": {"toy_window": 24, "toy_stride": 4}},
    "gemma3": {},
    "q8_0": {"kv_dtype": "q8_0"},
}

every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "stride" else kind for kind in KINDS]
)


def folder_of(kind: str, folder: Path) -> Path:
    """A tiny model with a tokenizer of bytes."""
    gemma = kind == "gemma3"
    path = folder / ("gemma3" if gemma else "chatml")
    if not path.exists():
        shutil.copytree(DATA / ("gemma3" if gemma else "llama"), path)
        text = tokenizer_json(GEMMA, []) if gemma else tokenizer_json(CHATML, QWEN)
        (path / "tokenizer.json").write_text(json.dumps(text))
        config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True} if gemma else {}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ds4.Engine]]:
    """get(kind, **options): an engine of a tiny model, made once."""
    folder = tmp_path_factory.mktemp("compacting")
    made: dict[str, ds4.Engine] = {}

    def get(kind: str = "plain", **options: Any) -> ds4.Engine:
        wanted = {"threads": 1, "pool_tokens": 32768, **KINDS[kind], **options}
        if "test_options" in wanted and not TEST_BUILD:
            pytest.skip(NEEDS_TEST_BUILD)
        key = repr((kind, sorted(options.items())))
        if key not in made:
            made[key] = ds4.Engine(folder_of(kind, folder), **wanted)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


@contextmanager
def leaving_nothing(engine: ds4.Engine) -> Iterator[None]:
    """O2: afterwards the pool's ledger is where it was."""
    start = settled(engine.ledger())
    yield
    assert settled(engine.ledger()) == start, "pages, marks or sessions were left behind"


def chat_on(engine: ds4.Engine, **options: Any) -> Chat:
    gemma = "<start_of_turn>" in engine.tokenizer.control
    bias = dict.fromkeys(engine.tokenizer.control.values(), -math.inf)
    given = {
        "chat_format": "gemma" if gemma else "chatml", "system": "Be brief.", "ctx": CTX, "max_tokens": 8,
        "sampling": Sampling(logit_bias=bias), "policy": POLICY, **options,
    }  # fmt: skip
    return Chat(engine, **given)


def reader(texts: Mapping[str, str]) -> tuple[Callable[..., str], list[str]]:
    """A tool `read(path)` that answers from a table, and the list of what it was asked for."""
    seen: list[str] = []

    def read(path: str) -> str:
        """Read a file."""
        seen.append(path)
        return texts[path]

    return read, seen


def drain(work: Generator[Any, None, Any]) -> Any:
    """Runs a generator to its end; what it returned."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value


def sync(chat: Chat) -> tuple[int, int]:
    """(reused, evaluated) of bringing the session to the surface."""
    return drain(chat.live.sync())


def text_of(i: int, words: int = 12) -> str:
    return " ".join(f"{i}x{j}" for j in range(words))


def fill(chat: Chat, tokens: int = 1050, words: int = 12, calls: bool = True) -> None:
    """Turns that the model and the user might have had, so that the context has exactly so many tokens; the session
    holds them afterwards."""
    i = 0
    while True:
        question = f"{RULE} Read {i}." if not i else f"Read {i}: {text_of(i, words)}"
        turn = [chat._question(question)]
        if calls and chat.format.tools:
            pair = [ToolCall("read", {"path": f"f{i}{j}.c"}, f"f{chat.transcript.seq}-{j}") for j in range(1 + i % 2)]
            turn.append(chat.writer.assistant("I look.", pair))
            turn += [chat.writer.result(c.id, text_of(i, 4), j, len(pair)) for j, c in enumerate(pair)]
        turn.append(chat.writer.assistant(f"It says {text_of(i, words)}."))
        if chat.live.used + size_of(turn) > tokens - 60:
            break
        for node in turn:
            chat.append(node)
        i += 1
    chat.append(chat._question("Next?"))
    left = tokens - chat.live.used - len(chat.writer.assistant(""))
    chat.append(chat.writer.assistant("x" * left))
    assert chat.live.used == tokens
    sync(chat)


def scripted(monkeypatch: pytest.MonkeyPatch, engine: ds4.Engine, text: str = SUMMARY) -> None:
    """The summary pass samples this text, each token evaluated for real."""
    ends = [i for name, i in engine.tokenizer.control.items() if name in ("<|im_end|>", "<end_of_turn>", DEEPSEEK[1])]
    ids = [*engine.tokenizer.encode(text, special=True), ends[0]]

    def sample(logits: Any, sampling: Any, history: Any, position: int, allowed: Any = None) -> tuple[int, float]:
        return ids[len(history)], 0.0

    monkeypatch.setattr(summary_module, "sample", sample)


class Stand:
    """How a conversation stands, to be found unchanged."""

    def __init__(self, chat: Chat) -> None:
        self.surface, self.held = chat.transcript.surface, chat.held
        self.tokens = list(chat.transcript.tokens)
        assert sync(chat)[1] == 0, "the session held the surface before"
        self.fresh = Fresh(chat.engine, self.tokens)
        assert chat.session.logits.tobytes() == self.fresh.logits

    def check(self, chat: Chat, evaluated: int | None = 0) -> None:
        """Nothing has changed, nothing has to be evaluated again (`evaluated` None: that may be), next logits are the
        same bits."""
        assert chat.transcript.surface == self.surface
        assert chat.held == self.held
        assert chat.live.working is None and not chat.compactor.busy
        chat.session.check()
        again = sync(chat)[1]
        assert evaluated is None or again == evaluated, f"{again} tokens had to be evaluated again"
        same_bits(chat, self.fresh)


def same_bits(chat: Chat, fresh: Fresh | None = None) -> None:
    """The session holds the surface, and its logits and the next ones are those of a fresh session."""
    tokens = list(chat.transcript.tokens)
    sync(chat)
    assert chat.session.tokens == tokens
    fresh = fresh or Fresh(chat.engine, tokens)
    assert chat.session.logits.tobytes() == fresh.logits
    with chat.session.fork() as child:
        child.eval([tokens[0]])
        assert child.logits.tobytes() == fresh.next_logits
    chat.session.check()


def whole_surface(chat: Chat, waiting: Iterable[str] = ()) -> None:
    """The rules that every surface keeps."""
    surface = chat.transcript.surface
    assert_paired(surface, list(waiting) or open_calls(surface))
    assert_alternating(chat.writer, surface)
    assert len({node.number for node in surface}) == len(surface)


def checkpoint(chat: Chat) -> Node:
    """The only checkpoint of the surface."""
    [node] = [node for node in chat.transcript.surface if node.kind == "checkpoint"]
    return node


def compact(chat: Chat, **options: Any) -> CompactionDone:
    """A compaction that must succeed."""
    *_, last = chat.compact(**options)
    done = last if isinstance(last, CompactionDone) else None
    assert done is not None, last
    return done


def prefix(before: Iterable[int], after: Iterable[int]) -> int:
    return common(list(before), list(after))


def call(path: str) -> ToolCall:
    return ToolCall("read", {"path": path})


def kinds(events: list[Any]) -> list[str]:
    """The types of events without what is streamed."""
    return [e.type for e in events if e.type not in ("prefill", "text", "summary")]


# the schema of a tool takes 500 tokens here
WIDE = 3072
LATE = CompactionPolicy(
    soft_fraction=0.7, summary_max=64, summary_min_room=16, tail_fraction=0.05, request="short", generation_reserve=128
)


def tool_chat(engine: Any, texts: dict[str, str], **options: Any) -> tuple[Any, list[str]]:
    read, seen = reader(texts)
    return chat_on(engine, tools=[read], **{"ctx": WIDE, "policy": LATE, **options}), seen


@contextmanager
def closing(chat: Chat) -> Iterator[None]:
    """Closes the chat; nothing is left of it."""
    try:
        yield
    finally:
        chat.close()
    led = settled(chat.engine.ledger())
    assert not led["sessions"] and not led["pages_used"] and not led["bytes_reserved"] and not led["marks"]


# ---- ways to be interrupted


def run(events: Generator[Event, None, Any], at: int, how: str, cancel: Callable[[], None]) -> tuple[list[Event], bool]:
    """Reads events; at number `at` the user cancels, closes, or presses Ctrl-C. Returns the events, and whether the
    place was reached."""
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        if len(seen) != at:
            continue
        if how == "cancel":
            cancel()
        elif how == "close":
            events.close()
        else:
            with pytest.raises(KeyboardInterrupt):
                events.throw(KeyboardInterrupt())
    return seen, len(seen) >= at


def ended(events: list[Event]) -> str:
    return (
        "done"
        if any(isinstance(e, CompactionDone) for e in events)
        else ("failed" if any(isinstance(e, CompactionFailed) for e in events) else "open")
    )
