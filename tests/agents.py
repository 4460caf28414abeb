"""What the tests of the agent loop share: chats on tiny engines, models that write what they are told, and what must
hold of a conversation whatever happened to it."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from oracle import DATA, NEEDS_TEST_BUILD, TEST_BUILD, fresh_logits, settled
from tiny_tokenizer import CHATML, DEEPSEEK, QWEN, tokenizer_json

import ds4
from ds4.agent.chat import Chat
from ds4.chat_formats import ToolCall
from ds4.compaction import spantool
from ds4.events import Event, Text, TurnEnd
from ds4.nodes import Node
from ds4.sampling import Sampling
from ds4.transcript import fold

LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA = ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
# name: control tokens, other added tokens, chat format, options of the test core
KINDS: dict[str, tuple[list[str], list[str], str, dict[str, float]]] = {
    "tags": (CHATML, QWEN, "chatml", {}),  # tool calls and thinking between tokens of their own, as Qwen has them
    "text": (CHATML, [], "chatml", {}),  # between tags that are text, as SmolLM2 has them
    "window": (CHATML, QWEN, "chatml", {"toy_window": 24}),
    "llama3": (LLAMA3, [], "llama3", {}),
    "gemma": (GEMMA, [], "gemma", {}),
    "v4": (DEEPSEEK, [], "deepseek-v4", {}),
}
_engines: dict[str, ds4.Engine] = {}


def engine(kind: str = "tags") -> ds4.Engine:
    """An engine of the tiny Llama with a tokenizer of bytes, made once."""
    control, user, _, options = KINDS[kind]
    if options and not TEST_BUILD:
        pytest.skip(NEEDS_TEST_BUILD)
    if kind not in _engines:
        folder = Path(tempfile.mkdtemp(prefix="ds4-agents-"))
        shutil.copytree(DATA / "llama", folder, dirs_exist_ok=True)
        options_of = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**options_of, "max_position_embeddings": 16384}))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(control, user)))
        config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True} if kind == "gemma" else {}
        config |= {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]} if kind == "v4" else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        _engines[kind] = ds4.Engine(folder, threads=1, pool_tokens=65536, test_options=options)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _engines[kind]


def begin(kind: str = "tags", **options: Any) -> Chat:
    """A chat whose model writes a few plain characters when nothing else is said."""
    made = engine(kind)
    plain = Sampling(logit_bias=dict.fromkeys(made.tokenizer.control.values(), -math.inf))
    given = {"chat_format": KINDS[kind][2], "system": "Be brief.", "ctx": 4096, "max_tokens": 6, "sampling": plain,
             "policy": None}  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:  # a tokenizer of bytes makes descriptions long
        for name in ("SCHEMA", "EXPAND_SCHEMA"):
            patched.setattr(spantool, name, _undescribed(getattr(spantool, name)))
        return Chat(made, **{**given, **options})


def _undescribed(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema without its prose."""
    properties = {name: {"type": value["type"]} for name, value in schema["parameters"]["properties"].items()}
    return {**schema, "description": "", "parameters": {**schema["parameters"], "properties": properties}}


@contextmanager
def chatting(kind: str = "tags", **options: Any) -> Iterator[Chat]:
    """A chat, of which nothing is left in the pool afterwards."""
    start = settled(engine(kind).ledger())
    with begin(kind, **options) as chat:
        yield chat
    assert settled(engine(kind).ledger()) == start, "pages, marks or sessions were left behind"


class Script:
    """Sampling that writes these texts, one for each answer, with the tokens of the tags in them; each ends its turn
    unless it is cut before. Behind the last one: "end". `press[n]` is called before token n of an answer is chosen."""

    def __init__(self, made: ds4.Engine, *answers: str, press: Mapping[int, Callable[[], None]] | None = None) -> None:
        tokenizer = made.tokenizer
        ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", DEEPSEEK[1])
        end = next(tokenizer.control[name] for name in ends if name in tokenizer.control)
        self._answers = iter([[*tokenizer.encode(text, special=True), end] for text in answers])
        self._last, self._now, self._press = [*tokenizer.encode("end"), end], [], dict(press or {})
        self.sampling = Sampling(mask=self._allowed)

    def _allowed(self, sampled: Any) -> list[int]:
        if not len(sampled):
            self._now = next(self._answers, self._last)
        self._press.pop(len(sampled), bool)()
        return [self._now[len(sampled)]]


def scripted(chat: Chat, *answers: str, press: Mapping[int, Callable[[], None]] | None = None) -> None:
    """The model writes these answers from now on."""
    chat.sampling = Script(chat.engine, *answers, press=press).sampling


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def written(*calls: ToolCall, before: str = "", after: str = "") -> str:
    """Calls as a ChatML model writes them."""
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    return before + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies) + after


def kinds(events: Iterable[Event]) -> list[str]:
    """The types of events; what is streamed in pieces is one."""
    found: list[str] = []
    for event in events:
        if event.type != "prefill" and not (event.type in ("text", "thinking") and found[-1:] == [event.type]):
            found.append(event.type)
    return found


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def end_of(events: list[Event]) -> TurnEnd:
    assert isinstance(events[-1], TurnEnd), events[-1]
    return events[-1]


def nodes(chat: Chat) -> list[tuple[str, str]]:
    """(role or kind, text) of what the model sees behind the system prompt."""
    return [(node.kind or node.role, node.text) for node in chat.transcript.surface if node.role != "system"]


def results(chat: Chat) -> list[str]:
    return [node.text for node in chat.transcript.surface if node.role == "tool"]


def last(chat: Chat) -> Node:
    return chat.transcript.surface[-1]


def assert_whole(chat: Chat, waiting: bool = False) -> None:
    """No call without its result, no result without its call, and each in the order and at the place of its message.
    `waiting`: the last message may have calls whose results are still to come."""
    surface, i = chat.transcript.surface, 0
    while i < len(surface):
        node, i = surface[i], i + 1
        assert node.role != "tool", f"#{node.number} is a result without its call"
        for place, one in enumerate(node.calls):
            if i == len(surface) and waiting:
                break
            answer = surface[i] if i < len(surface) else None
            assert answer is not None and answer.result_of == one.id, f"the call {one.id} has no result"
            assert (answer.index, answer.count) == (place, len(node.calls))
            i += 1


def assert_same_bits(chat: Chat) -> None:
    """Brought to the surface, the session is one that was prefilled once with its tokens, and the log leads there."""
    for _ in chat.live.sync():
        pass
    tokens = chat.transcript.tokens
    assert chat.session.tokens == tokens
    assert chat.session.logits.tobytes() == fresh_logits(chat.engine, tokens), "the next logits differ"
    chat.session.check()
    assert fold(chat.transcript.store.events()).surface == list(chat.transcript.surface)
