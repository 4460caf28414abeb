"""Whole conversations for DeepSeek V4, as its own encoder writes them: the messages of a chat completion request become
the parts of one text. Every quirk that shows in the text is kept, since the model was trained on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ds4.chat_formats.base import Tag
from ds4.chat_formats.deepseek_v4_texts import Texts
from ds4.chat_formats.dsml import END, THINK, THOUGHT, calls_parts
from ds4.chat_formats.toolcalls import json_value
from ds4.errors import ArgumentError
from ds4.files.base import quote

BEGIN, USER, ASSISTANT = Tag("<｜begin▁of▁sentence｜>"), Tag("<｜User｜>"), Tag("<｜Assistant｜>")
REMINDER = Tag("<｜latest_reminder｜>")
TASKS = {name: Tag(f"<｜{name}｜>") for name in ("action", "query", "authority", "domain", "title", "read_url")}
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")

_Message = dict[str, Any]


def result_parts(results: Iterable[str]) -> list[str]:
    """The results of tools, with an empty line between two."""
    parts: list[str] = []
    for text in results:
        parts += [*("\n\n",) * bool(parts), "<tool_result>", text, "</tool_result>"]
    return parts


def conversation(
    messages: list[_Message],
    texts: Texts,
    thinking: bool = True,
    effort: str | None = None,
    drop_thinking: bool = True,
    context: list[_Message] | None = None,
) -> list[str]:
    """The parts of a conversation, for `ChatFormat.ids`; joined they are its text.

    A message is a dict with "role" (one of `ROLES`) and "content" (text, None, or a list of parts of which only text is
    shown). An assistant's may have "reasoning_content", "tool_calls" (their "arguments" as JSON text, or as a dict) and
    "wo_eos" (its text is to be gone on with); a tool's has "tool_call_id"; a system's or developer's may have "tools"
    and "response_format"; a user's "task", one of `TASKS`.

    `effort` counts with `thinking` only. `drop_thinking`: without tools, earlier turns lose their reasoning. `context`:
    messages that are held already; they are considered and not written.
    """
    held, new = (_merged(map(_checked, _typed(given, list, "messages"))) for given in (context or [], messages))
    whole = [*held, *new]
    _order_results(whole)
    n_held = len(held)
    dropping = thinking and drop_thinking and not any(message.get("tools") for message in whole)
    if dropping:
        last = _last_user(whole)
        n_held -= sum(message["role"] == "developer" for message in whole[: min(last, n_held)])
        whole = [message for i, message in enumerate(whole) if i >= last or message["role"] != "developer"]
    last = _last_user(whole) if dropping else -1
    parts: list[str] = [] if held else [BEGIN, texts.effort(effort) if thinking else ""]
    for i in range(n_held, len(whole)):
        thinks = thinking and i >= last  # from the last question on, or everywhere where nothing is dropped
        parts += _written(whole[i], texts, thinks, i > 0 and "task" in whole[i - 1])
        parts += _transition(whole[i], whole[i + 1 : i + 2], thinks)
    return parts


# ---- the four steps of the encoder ----


def _merged(messages: Iterable[_Message]) -> list[_Message]:
    """Results of tools and what users say become the blocks of common user turns."""
    merged: list[_Message] = []
    for message in messages:
        role = message["role"]
        if role not in ("user", "tool"):
            merged.append(message)
            continue
        before = merged[-1] if merged and merged[-1]["role"] == "user" else None
        if before is not None and (role == "tool" or "task" not in before):
            before["blocks"].append(message)
        else:
            task = {"task": message["task"]} if role == "user" and "task" in message else {}
            merged.append({"role": "user", "blocks": [message], **task})
    return merged


def _order_results(messages: Sequence[_Message]) -> None:
    """Sorts the results in each turn as the calls before it were; what a user says between them stays in its place."""
    order: dict[str, int] = {}
    for message in messages:
        if message.get("tool_calls"):
            order = {call["id"]: i for i, call in enumerate(message["tool_calls"])}
        blocks = message.get("blocks", [])
        places = [i for i, block in enumerate(blocks) if block["role"] == "tool"]
        results = sorted((blocks[i] for i in places), key=lambda block: order.get(block["id"], 0))
        for i, block in zip(places, results, strict=True):
            blocks[i] = block


def _last_user(messages: Sequence[_Message]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] in ("user", "developer")), default=-1)


def _written(message: _Message, texts: Texts, thinks: bool, after_task: bool) -> list[str]:
    """One message without what leads to the next."""
    role, content = message["role"], message.get("content", "")
    if role == "assistant":
        thought = [message["reasoning_content"], THOUGHT] if thinks and not after_task else []
        calls = calls_parts((call["name"], call["arguments"]) for call in message["tool_calls"])
        return [*thought, content, *calls, *(END,) * (not message["wo_eos"])]
    if role == "user":
        parts: list[str] = [USER]
        for i, block in enumerate(message["blocks"]):
            text = block["content"]
            parts += [*("\n\n",) * bool(i), *(result_parts([text]) if block["role"] == "tool" else [text])]
        return parts
    if role == "latest_reminder":
        return [REMINDER, content]
    parts = [*(USER,) * (role == "developer"), content]
    if message.get("tools"):
        parts += ["\n\n", *texts.tools(message["tools"])]
    if message.get("response_format"):
        parts += ["\n\n", *texts.response_format(message["response_format"])]
    return parts


def _transition(message: _Message, following: Sequence[_Message], thinks: bool) -> list[str]:
    """What follows a message that an answer follows, or nothing at all."""
    if following and following[0]["role"] not in ("assistant", "latest_reminder"):
        return []
    think = THINK if thinks else THOUGHT
    task = message.get("task")
    if task is not None:
        return [ASSISTANT, think, TASKS[task]] if task == "action" else [TASKS[task]]
    return [ASSISTANT, think] if message["role"] in ("user", "developer") else []


# ---- what a request may hold ----


def _checked(message: object) -> _Message:
    """A message with the fields of its role, each of its type. Raises ArgumentError."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = quote(message.get("role")) if isinstance(message, dict) else quote(message)
        raise ArgumentError(f"a message is an object whose role is one of {', '.join(ROLES)}, not {role}.")
    role = message["role"]
    found = {"role": role, "content": _plain(message.get("content"))}
    if message.get("task") is not None:
        found["task"] = _one_of(message["task"], TASKS, "task")
    if role == "assistant":
        found["reasoning_content"] = _typed(message.get("reasoning_content") or "", str, "reasoning_content")
        found["tool_calls"] = [_call(call) for call in _typed(message.get("tool_calls") or [], list, "tool_calls")]
        found["wo_eos"] = bool(message.get("wo_eos"))
    elif role == "tool":
        found["id"] = _typed(message.get("tool_call_id") or "", str, "tool_call_id")
    elif role in ("system", "developer"):
        tools = _typed(message.get("tools") or [], list, "tools")
        found["tools"] = [_function(tool, "a tool") for tool in tools]
        found["response_format"] = message.get("response_format")
    return found


def _plain(content: object) -> str:
    """The text of a content; of its parts only those of text can be shown to this model."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in _typed(content, list, "content"):
        kind = _typed(part, dict, "a part of content").get("type")
        is_text = kind == "text"
        texts.append(_typed(part.get("text") or "", str, "text") if is_text else f"[Unsupported {kind}]")
    return "\n\n".join(texts)


def _call(call: object) -> dict[str, Any]:
    function = _function(call, "a tool call")
    name = _typed(function.get("name"), str, "the name of a tool call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    assert isinstance(call, dict)
    identity = _typed(call.get("id") or "", str, "the id of a tool call")
    return {"name": name, "arguments": _typed(arguments or {}, dict, "arguments"), "id": identity}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments in a JSON text; what is no JSON object becomes one argument of that name, as in the encoder."""
    try:
        value = json_value(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _function(value: object, what: str) -> dict[str, Any]:
    return _typed(_typed(value, dict, what).get("function", value), dict, f"the function of {what}")


def _one_of(value: object, known: Iterable[str], what: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{what} is {quote(value)}; it must be one of {', '.join(known)}.")
    return value


def _typed(value: Any, kind: type[str] | type[list[Any]] | type[dict[str, Any]], what: str) -> Any:
    if not isinstance(value, kind):
        wanted = "text" if kind is str else "a list" if kind is list else "an object"
        raise ArgumentError(f"{what} is {quote(value)}; it must be {wanted}.")
    return value
