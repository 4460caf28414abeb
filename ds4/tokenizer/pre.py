"""Pre-tokenisers: how a text is cut into words before the merges of a byte-level BPE work inside each word.

GGUF files give theirs a name (tokenizer.ggml.pre), `PRE_TOKENIZERS` says what the names mean. tokenizer.json spells its
steps out, `read_steps` accepts those that are known. Both end as JSON steps of the `tokenizers` library.

To add one: a line in `PRE_TOKENIZERS`, its patterns in order, and its ids for the texts of tests/test_tokenizer.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files.base import quote

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = _CASED % (_SUFFIX, _SUFFIX) + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` are applied in order, each inside the pieces that the ones before have cut. GGUF files know no Unicode
    normalisation: a text with combining accents stays as it is."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges would do
    add_bos: bool = False  # what a file means that does not say


_plain_gpt2 = PreTokenizer((_GPT2,))
_single_digits = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _plain_gpt2,
    "phi-2": _plain_gpt2,
    "mpt": _plain_gpt2,
    "olmo": _plain_gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def steps_of(pre: PreTokenizer) -> list[dict[str, Any]]:
    """The library's JSON for a line of the table."""
    return [*map(_split, pre.patterns), _byte_level(add_prefix_space=False, use_regex=False)]


def read_steps(node: object, where: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer.json's pre_tokenizer, checked; the last one is ByteLevel.

    Raises UnsupportedError for a step or a pattern that this version does not know, FileFormatError for a malformed
    one.
    """
    steps = [_read_step(step, where) for step in flatten(node, "pretokenizers", where)]
    kinds = [step["type"] for step in steps]
    if kinds.count("ByteLevel") != 1 or kinds[-1] != "ByteLevel":
        shown = quote(", ".join(kinds) or "nothing")
        raise UnsupportedError(
            f"{where}: its pre-tokeniser is {shown}; only a byte-level BPE, whose last step is ByteLevel, is read."
        )
    return steps


def read_normalizer(node: object, where: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer.json's normalizer: Unicode forms only. Raises UnsupportedError for any other."""
    steps = []
    for step in flatten(node, "normalizers", where):
        if step.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
            raise UnsupportedError(
                f"{where}: the normaliser {quote(step.get('type'))} is not known; NFC, NFD, NFKC and NFKD are."
            )
        steps.append({"type": step["type"]})
    return steps


def flatten(node: object, inner: str, where: str, depth: int = 0) -> list[dict[str, Any]]:
    """The steps of a node that may be null, one step, or Sequences of steps."""
    if node is None:
        return []
    if not isinstance(node, dict):
        raise FileFormatError(f"{where}: a step is {quote(node)}; it must be an object.")
    if node.get("type") != "Sequence":
        return [node]
    parts = node.get(inner)
    if not isinstance(parts, list) or len(parts) > 32 or depth > 3:
        raise FileFormatError(f"{where}: {inner} must be a list of at most 32 steps, nested at most 3 deep.")
    return [step for part in parts for step in flatten(part, inner, where, depth + 1)]


def _read_step(step: dict[str, Any], where: str) -> dict[str, Any]:
    kind = step.get("type")
    if kind == "ByteLevel":
        return _byte_level(_flag(step, "add_prefix_space", True, where), _flag(step, "use_regex", True, where))
    if kind == "Digits":
        return {"type": "Digits", "individual_digits": _flag(step, "individual_digits", False, where)}
    if kind == "Punctuation":
        return {"type": "Punctuation", "behavior": _behavior(step.get("behavior", "Isolated"), where)}
    if kind == "Split":
        pattern = step.get("pattern")
        text = pattern.get("Regex") if isinstance(pattern, dict) and len(pattern) == 1 else None
        if not isinstance(text, str):
            raise UnsupportedError(f"{where}: a Split step has the pattern {quote(pattern)}; only a Regex is known.")
        _check_pattern(text, where)
        behavior = _behavior(step.get("behavior"), where)
        return {**_split(text), "behavior": behavior, "invert": _flag(step, "invert", False, where)}
    raise UnsupportedError(
        f"{where}: the pre-tokeniser step {quote(kind)} is not known; ByteLevel, Digits, Punctuation and Split are."
    )


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": False, "use_regex": use_regex
    }  # fmt: skip


def _flag(step: dict[str, Any], key: str, default: bool, where: str) -> bool:
    value = step.get(key, default)
    if not isinstance(value, bool):
        raise FileFormatError(f"{where}: {key} of a pre-tokeniser step is {quote(value)}; it must be true or false.")
    return value


def _behavior(value: object, where: str) -> str:
    known = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    if not isinstance(value, str) or value not in known:
        raise FileFormatError(f"{where}: a step's behavior is {quote(value)}; it must be one of {', '.join(known)}.")
    return value


# ---- patterns that a stranger wrote ----
# The library's regex engine backtracks without a time limit, and a call into it cannot be interrupted: some patterns
# take hours on a page of text. So every alternative must be one that a known model uses, or so simple that a failed
# match costs nothing: at most three single characters that may be optional, then one that may repeat. It is never empty
# either: the library loses text at an empty match.

MAX_PATTERN = 4096
_CLASS = r"\\[pP]\{\^?[A-Za-z_]{1,32}\}|\\[sSdDwWrnt]|\\[^\w\s]"
_ATOM = rf"(?:{_CLASS}|\[\^?(?:{_CLASS}|[^\[\]\\&])+\]|[^\\\[\](){{}}|*+?^$])"
_SIMPLE = re.compile(rf"(?:{_ATOM}\??){{0,3}}{_ATOM}(?:\+|\{{[1-9](?:,[1-9])?\}})?")
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+|.", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    """Cuts a pattern at the bars that stand outside groups and classes."""
    parts, depth = [""], 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


_KNOWN = {part for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns for part in _alternatives(pattern)}


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > MAX_PATTERN:
        raise UnsupportedError(
            f"{where}: a pre-tokeniser pattern has {len(pattern)} characters; at most {MAX_PATTERN} are read."
        )
    # JSON may spell a control character where the table has its escape
    plain = pattern.replace("\r", r"\r").replace("\n", r"\n")
    for part in _alternatives(plain):
        if part not in _KNOWN and not _SIMPLE.fullmatch(part):
            raise UnsupportedError(
                f"{where}: the pre-tokeniser pattern {quote(part)} is not known and could take hours on some texts; "
                "ds4/tokenizer/pre.py says how to add one."
            )
