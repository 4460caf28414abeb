"""The fixed texts of DeepSeek V4's chat encoding: how tools are told, the answer's format, the efforts of reasoning.

They belong to the checkpoint. They are read from its encoding/encoding_dsv4.py, a Python file that is searched for the
string literals given to a few names and never run; whatever else the file holds is not looked at. Where a text is
missing, ds4 has its own for the same purpose.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds4.chat_formats.base import Tag
from ds4.chat_formats.dsml import DSML, THINK, THOUGHT
from ds4.chat_formats.toolcalls import json_text
from ds4.errors import ArgumentError
from ds4.files.base import quote, read_file

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

FILE = os.path.join("encoding", "encoding_dsv4.py")
MAX_FILE = 1 << 20

OWN_TOOLS = """# Tools

The functions at the end of this text, one JSON schema a line, are at your disposal. A call is written like this:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="FUNCTION">
<{dsml_token}parameter name="ARGUMENT" string="true">text</{dsml_token}parameter>
<{dsml_token}parameter name="ARGUMENT" string="false">JSON</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

Text is given as it is, with string="true"; numbers, booleans, lists and objects are given as JSON, with string="false".
Each invoke element is one call, and a block may hold several. The block ends your answer; it never stands before \
{thinking_end_token}. The results come in the next message, each in a tool_result element.

{tool_schemas}
"""
OWN_RESPONSE_FORMAT = "# Form of the answer\n\nAnswer with JSON that this schema accepts, and nothing else:\n{schema}"
OWN_EFFORTS = {
    "low": "",
    "high": "Effort: high. Take the problem apart before you answer, try your reasoning against unusual cases, and "
    "write down every step and every assumption of it.\n\n",
    "max": "Effort: the highest. Do not answer before you have found the cause behind each symptom, checked your "
    "result in more than one way, and left no assumption untested; write all of this down.\n\n",
}


class Texts:
    """The texts of one checkpoint. `efforts` are the names of the efforts that it knows.

    `tools` has the places {dsml_token}, {thinking_start_token}, {thinking_end_token} and {tool_schemas},
    `response_format` has {schema}; `efforts` gives each name its text. None: ds4's own.
    """

    def __init__(
        self,
        tools: str | None = None,
        response_format: str | None = None,
        efforts: Mapping[str, str] | None = None,
    ) -> None:
        self._own = {
            name for name, text in (("tools", tools), ("format", response_format), ("efforts", efforts)) if text is None
        }
        self._tools = OWN_TOOLS if tools is None else tools
        self._format = OWN_RESPONSE_FORMAT if response_format is None else response_format
        self._efforts = OWN_EFFORTS if efforts is None else efforts
        self.efforts = tuple(self._efforts)

    def tools(self, tools: Iterable[dict[str, Any]]) -> list[str]:
        """The parts that tell of tools; a schema may stand inside "function"."""
        self._tell("tools")
        schemas = "\n".join(json_text(tool.get("function", tool)) for tool in tools)
        return _fill(self._tools, {
            "dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": THOUGHT, "tool_schemas": schemas,
        })  # fmt: skip

    def response_format(self, schema: object) -> list[str]:
        """The parts that ask for an answer of a form."""
        self._tell("format")
        return _fill(self._format, {"schema": json_text(schema)})

    def effort(self, name: str | None) -> str:
        """The text of an effort, "" for None. Raises ArgumentError for a name that the checkpoint does not have."""
        if name is None:
            return ""
        if name not in self._efforts:
            raise ArgumentError(f"this model has no effort {quote(name)}; it has {', '.join(self.efforts)}.")
        if self._efforts[name]:
            self._tell("efforts")
        return self._efforts[name]

    def _tell(self, name: str) -> None:
        """Says, once, that the model was trained on other words."""
        if name in self._own:
            self._own.clear()
            warnings.warn(
                f"this checkpoint comes without the model's own texts for tools, answer formats and efforts ({FILE}); "
                "ds4's own wording of the same rules is used.",
                stacklevel=4,
            )


def of_checkpoint(checkpoint: Checkpoint | None) -> Texts:
    """The texts of a checkpoint: those that its file has. Raises FileFormatError when that is no ordinary file."""
    path = os.path.join(checkpoint.path, FILE) if checkpoint is not None and checkpoint.kind == "safetensors" else ""
    if not path or not os.path.exists(path):
        return Texts()
    return of_source(read_file(path, MAX_FILE).decode("utf-8", "replace"))


def of_source(source: str) -> Texts:
    """The texts in an encoder's source: a later generation has a table of efforts, the first one has a single text."""
    efforts = _table(source, "REASONING_EFFORT_PROMPTS")
    if efforts is None:
        most = _text(source, "REASONING_EFFORT_MAX")
        efforts = None if most is None else {"high": "", "max": most}
    return Texts(_text(source, "TOOLS_TEMPLATE"), _text(source, "response_format_template"), efforts)


# ---- a template ----

_PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}|" + "|".join(map(re.escape, (DSML, THINK, THOUGHT))))


def _fill(template: str, values: Mapping[str, str]) -> list[str]:
    """The template as parts: its own protocol tokens are tags, what is put into its places stays what it is."""
    parts: list[str] = []
    end = 0
    for place in _PLACE.finditer(template):
        parts.append(template[end : place.start()])
        end = place.end()
        text, name = place[0], place[1]
        if name is not None:
            parts.append(values.get(name, text))
        else:
            parts.append(text[0] if text in ("{{", "}}") else Tag(text))
    return [*parts, template[end:]]


# ---- string literals in source text ----

_LITERAL = re.compile(
    r'[rRuU]?(?:"""(?:[^\\]|\\.)*?"""|' r"'''(?:[^\\]|\\.)*?'''|" r'"(?:[^"\\\n]|\\.)*"|' r"'(?:[^'\\\n]|\\.)*')",
    re.DOTALL,
)
_GAP = re.compile(r"(?:[ \t]|\\\n)*")
_WIDE_GAP = re.compile(r"(?:\s|\\\n|#[^\n]*)*")
_STATEMENT_END = re.compile(r"[ \t]*(?:#|;|\r?\n|\Z)")


def _value_of(source: str, name: str) -> int | None:
    """Where the value begins that the last assignment to a name gives, at the file's top level."""
    found = [m.end() for m in re.finditer(rf"^{name}[ \t]*(?::[^=\n]*)?=[ \t]*", source, re.MULTILINE)]
    return found[-1] if found else None


def _text(source: str, name: str) -> str | None:
    """The text that is assigned to a name, None unless it is made of string literals alone."""
    at = _value_of(source, name)
    found = _operand(source, at) if at is not None else None
    return found[0] if found and _STATEMENT_END.match(source, found[1]) else None


def _table(source: str, name: str) -> dict[str, str] | None:
    """The same for a dict of texts."""
    at = _value_of(source, name)
    if at is None or not source.startswith("{", at):
        return None
    table: dict[str, str] = {}
    at = _after(source, at + 1)
    while not source.startswith("}", at):
        key = _operand(source, at, inside=True)
        colon = _after(source, key[1]) if key else at
        value = _operand(source, _after(source, colon + 1), inside=True) if source.startswith(":", colon) else None
        if key is None or value is None:
            return None
        table[key[0]] = value[0]
        at = _after(source, value[1])
        if source.startswith(",", at):
            at = _after(source, at + 1)
        elif not source.startswith("}", at):
            return None
    return table or None


def _operand(source: str, at: int, inside: bool = False) -> tuple[str, int] | None:
    """(the text of the literals that stand here in a row, where they end); one pair of parentheses may be around them.
    `inside` brackets they may stand on several lines."""
    if not source.startswith("(", at):
        return _row(source, at, inside)
    found = _row(source, _after(source, at + 1), inside=True)
    end = _after(source, found[1]) if found else at
    return (found[0], end + 1) if found and source.startswith(")", end) else None


def _row(source: str, at: int, inside: bool) -> tuple[str, int] | None:
    texts: list[str] = []
    end = at
    while literal := _LITERAL.match(source, at):
        text, end = _unquoted(literal[0]), literal.end()
        if text is None:
            return None
        texts.append(text)
        at = _after(source, end) if inside else _GAP.match(source, end).end()  # type: ignore[union-attr]
    return ("".join(texts), end) if texts else None


def _after(source: str, at: int) -> int:
    """Where white space and comments end."""
    return _WIDE_GAP.match(source, at).end()  # type: ignore[union-attr]


def _unquoted(literal: str) -> str | None:
    """The text of one string literal, which has no parts that could be run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that mean nothing
            text = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return None
    return text if isinstance(text, str) else None
