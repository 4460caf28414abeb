"""Tool calls as JSON objects, read tolerantly: between two tags, as Hermes and Qwen write them, or bare (Llama 3)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ds4.chat_formats.base import ToolCall
from ds4.errors import ArgumentError
from ds4.tokenizer.base import characters

MAX_FAULTS = 32  # a model that writes more broken calls is in a loop; the rest stays text unread
_FILLER = re.compile(r"(?:[\s,;}\]]|```(?:json)?)*")


def parse_tool_calls(text: str, opener: str, closer: str) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
    """(the text without the calls, the calls, a sentence for each one that could not be read and so stays text).

    Accepted beyond the plain form: a missing closer behind a complete object, several objects or a list between one
    pair of tags, a code fence, line breaks inside strings, a brace too many, arguments as a JSON text, "parameters" for
    "arguments", the call inside "function". A cut object is never completed: half a command must not run.
    """
    rest: list[str] = []
    calls: list[ToolCall] = []
    faults: list[str] = []
    pos = 0
    while len(faults) < MAX_FAULTS and (begin := text.find(opener, pos)) >= 0:
        end, values = values_at(text, begin + len(opener))
        read = [call_of(value) for value in values]
        wrong = [call for call in read if isinstance(call, str)] if read else ["holds no complete JSON object"]
        if wrong:
            faults.append(f"Tool call {len(calls) + len(faults) + 1} {wrong[0]}.")
            end = _end_of_fault(text, begin + len(opener), opener, closer)
            rest.append(text[pos:end])
        else:
            calls += [call for call in read if isinstance(call, ToolCall)]
            rest.append(text[pos:begin])
            end += len(closer) * text.startswith(closer, end)
        pos = end
    rest.append(text[pos:])
    left = "\n".join(part.strip() for part in rest if part.strip()) if calls else text
    return left, tuple(calls), tuple(faults)


def _end_of_fault(text: str, pos: int, opener: str, closer: str) -> int:
    """Where the text of a call that cannot be read ends: behind its closer, else at the next call, else at the end."""
    following = text.find(opener, pos)
    stop = len(text) if following < 0 else following
    close = text.find(closer, pos, stop)
    return close + len(closer) if close >= 0 else stop


def values_at(text: str, pos: int) -> tuple[int, list[Any]]:
    """Where the JSON objects that follow each other from `pos` on end, and the objects, lists opened. no objects when
    one of them is cut."""
    values: list[Any] = []
    while True:
        start = _end_of_filler(text, pos)
        if not text.startswith(("{", "["), start):
            return start if values else pos, values
        try:
            value, pos = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return start, []
        values += value if isinstance(value, list) else [value]


def call_of(value: Any) -> ToolCall | str:
    """The call that a JSON value describes, or what is wrong with it."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return 'is no object with a "name"'
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except ValueError:
            return 'has "arguments" that are no JSON'
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return 'has "arguments" that are no object'
    return ToolCall(characters(value["name"]), _without_surrogates(arguments))


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError when it is none."""
    try:
        return _without_surrogates(_DECODER.decode(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_surrogates(value: Any) -> Any:
    """\\ud800 alone is legal in JSON and no character: no file or terminal would take it."""
    spelled = json.dumps(value, ensure_ascii=False)
    clean = characters(spelled)
    return value if clean == spelled else json.loads(clean)


def _end_of_filler(text: str, pos: int) -> int:
    match = _FILLER.match(text, pos)
    return match.end() if match else pos


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


# strict=False: small models break lines inside strings
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)


def json_text(value: object) -> str:
    """A tool's schema or arguments on one line. Raises ArgumentError when they are no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"a tool's schema or arguments cannot be written as JSON: {error}.") from None
