"""Fuzzes what DeepSeek V4 writes and brings: an assistant turn, whole and in pieces, by its spelling and by tokens; the
messages of a request; and the source file that a checkpoint's texts are searched in."""

import json
import sys
import warnings
from pathlib import Path

# this file's own folder must not stand first: it would hide the packages `gguf` and `safetensors`
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds4.chat_formats.deepseek_v4_messages import conversation  # noqa: E402
from ds4.chat_formats.deepseek_v4_texts import Texts, of_source  # noqa: E402
from ds4.chat_formats.dsml import CallFinished, Event, calls_parts, parsed  # noqa: E402
from ds4.chat_formats.dsml_reader import DsmlReader  # noqa: E402
from ds4.files.jsonfile import parse_object  # noqa: E402
from fuzz import common  # noqa: E402

EOS = "<｜end▁of▁sentence｜>"
CALLS = [("read", {"path": "a <b>.txt", "lines": [1, 20]}), ("now", {}), ("write", {"text": "x\n</think>", "n": None})]
SOURCE = """# an encoder
TOOLS_TEMPLATE = \"\"\"Call <{dsml_token}x> {{y}} {tool_schemas}
\"\"\"
response_format_template: str = "So: " '{schema}'
REASONING_EFFORT_PROMPTS = {"low": "", "high": ("a\\n" "b"), "max": 'c'}
"""


def turn(text: str, size: int, thinking: bool, spelled: bool) -> list[Event]:
    reader = DsmlReader(thinking, spelled)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def read(text: str) -> None:
    for thinking in (False, True):
        whole = turn(text, max(1, len(text)), thinking, spelled=True)
        found = parsed(whole)
        for size in (1, 3, 7):
            cut = turn(text, size, thinking, spelled=True)
            assert parsed(cut) == found, f"pieces of {size} give another turn"
            assert [e for e in cut if isinstance(e, CallFinished)] == [e for e in whole if isinstance(e, CallFinished)]
        quoted = parsed(turn(text, 5, thinking, spelled=False))
        assert not quoted.tool_calls and quoted.content + quoted.thinking == text, "spelled markup is text"
        json.dumps([call.arguments for call in found.tool_calls], allow_nan=False)


def target(data: bytes) -> None:
    if data[:1] == b"{":
        messages = parse_object(data, "a request").get("messages")
        conversation(messages, Texts("{tool_schemas}", "{schema}", {"max": "x"}), effort="max")
        return
    text = data.decode("utf-8", "replace")
    if "_TEMPLATE" in text[:200]:
        texts = of_source(text)
        texts.tools([{"name": "x"}])
        texts.response_format({})
        _ = [texts.effort(name) for name in texts.efforts]
        return
    read(text)


def seeds() -> list[bytes]:
    block = "".join(calls_parts(CALLS))
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": '{"y": [1]}'}}
    messages = [
        {"role": "system", "content": "S", "tools": [{"function": {"name": "x"}}], "response_format": {"a": 1}},
        {"role": "developer", "content": [{"type": "text", "text": "D"}, {"type": "image"}]},
        {"role": "user", "content": "q", "task": "action"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call], "wo_eos": True},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "latest_reminder", "content": "today"},
    ]
    texts = [f"hm</think>So:{block}{EOS}", f"{block} and {block[:-9]}", f"<think>{block}</think>a{block}{EOS}", SOURCE]
    return [*(text.encode() for text in texts), json.dumps({"messages": messages}).encode()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # that ds4's own wording is used
    common.main("dsml", target, seeds())
