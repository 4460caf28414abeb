"""Strict JSON for files that strangers wrote: config.json, the index, safetensors headers, tokenizer.json.

Stricter than `json`: a key that comes twice, NaN and Infinity, numbers of absurd size, text that is not UTF-8, lone
surrogates, and documents whose values would take far more memory than the file are refused, each with its own sentence.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ds4.errors import FileFormatError
from ds4.files.base import quote, read_file

MAX_VALUES = 1 << 23  # a value takes about 60 bytes in Python however short it is in the file
MAX_DIGITS = 40


def read_json(path: str, limit: int) -> Any:
    """The value in a JSON file of at most `limit` bytes. Raises FileFormatError, naming the file and the fault."""
    return parse_json(read_file(path, limit), path)


def read_object(path: str, limit: int) -> dict[str, Any]:
    """Like `read_json`, for a file that must hold an object."""
    return _object(read_json(path, limit), path)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Like `parse_json`, for text that must be an object."""
    return _object(parse_json(data, where), where)


def parse_json(data: bytes, where: str) -> Any:
    """The value that UTF-8 JSON text holds; `where` begins every error."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{where}: byte {error.start} is not UTF-8, so this is no JSON; download it again."
        ) from None
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise FileFormatError(f"{where}: holds about {values} JSON values, more than the {MAX_VALUES} that are read.")
    try:
        value = _DECODER.decode(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise FileFormatError(f"{where}: the JSON is nested too deeply to be read.") from None
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{where}: is not valid JSON ({error.msg}, line {error.lineno}, column {error.colno}); download it again."
        ) from None
    except UnicodeEncodeError:
        raise FileFormatError(
            f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no character."
        ) from None
    except _Fault as fault:
        raise FileFormatError(f"{where}: {fault}") from None


class _Fault(Exception):
    """Raised inside the decoder, which does not know the name of the file."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Fault(f"duplicate key {quote(twice)}: which of the two counts is not defined.")
    return found


def _constant(name: str) -> Any:
    raise _Fault(f"holds {name}, which is not a JSON number.")


def _int(text: str) -> int:
    # int() of a million digits takes minutes
    if len(text) > MAX_DIGITS:
        raise _Fault(f"holds a number of {len(text)} digits; no field needs more than {MAX_DIGITS}.")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Fault(f"holds the number {quote(text)}, which is too large.")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileFormatError(f"{where}: holds {quote(value)} where a JSON object is expected.")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_int, parse_float=_float)
