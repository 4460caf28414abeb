"""What a file says about its tokens, in one form for all containers, and the checks that all readers share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds4.errors import FileFormatError
from ds4.files.base import quote

if TYPE_CHECKING:
    from ds4.files.checkpoint import Checkpoint

MAX_TOKENS = 1 << 22

# control tokens that end a turn or a text in the models that have them, whether or not the file lists them as such
END_TEXTS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
)  # fmt: skip
_TAG = re.compile(r"<[^\s<>]{2,}>|\[[^\s\[\]]{2,}\]|.*｜.*")
_HTML = re.compile(
    r"</?(a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup|table|"
    r"tbody|td|tfoot|th|thead|tr|u|ul)>"
)


@dataclass(frozen=True)
class Added:
    """A token that stands for one whole text and that no merge makes.

    `control`: part of the protocol between program and model, recognised only where the program asks for it. The
    others (runs of spaces, words added later) are ordinary text and always recognised. `lstrip`, `rstrip`: white space
    beside it belongs to it. `word`: not inside a longer word.
    """

    id: int
    control: bool
    lstrip: bool = False
    rstrip: bool = False
    word: bool = False


@dataclass
class Vocabulary:
    """`tokens[id]` is the text of a token as the file spells it, None for an id without one; `added` is by text.
    `where` begins every error about it."""

    where: str
    tokens: list[str | None]
    added: dict[str, Added] = field(default_factory=dict)
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: frozenset[int] = frozenset()

    def token_id(self, value: object, what: str) -> int | None:
        """An id that the file gives for a purpose, None when it gives none.

        Raises FileFormatError when no token has that id.
        """
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens) or self.tokens[value] is None:
            raise FileFormatError(
                f"{self.where}: {what} is {quote(value)}, but no token has that id; the last is {len(self.tokens) - 1}."
            )
        return value

    def set_ends(self, ids: Iterable[int | None]) -> None:
        """Sets `eos_ids`: the ids that the file names, and the control tokens that are known to end a text."""
        known = (self.added[text] for text in END_TEXTS if text in self.added)
        self.eos_ids = frozenset(i for i in ids if i is not None) | {a.id for a in known if a.control}


def is_marker(text: str, made: set[str]) -> bool:
    """Whether an added token that the file does not call a control token is one: it is spelled like markup, and is not
    among the texts that merges `made`.

    Files flag <think>, <tool_call> or ｜DSML｜ as ordinary additions, yet text that quotes them must not become them.
    """
    return text not in made and any(c in "<>[]|｜" for c in text)


def is_tag(text: str) -> bool:
    """The same for a user-defined piece of SentencePiece, which no merge makes: HTML, runs of spaces and words are text
    that the model was trained on, <start_of_image>, [INST] or <think> are control tokens."""
    return _TAG.fullmatch(text) is not None and _HTML.fullmatch(text) is None


def model_rows(checkpoint: Checkpoint, n_tokens: int, where: str) -> int:
    """How many token ids the model has: rows of its embedding, at least `n_tokens`.

    Raises FileFormatError when the tokenizer has more tokens than the model has rows.
    """
    rows = _embedding_rows(checkpoint)
    if rows is None:
        return n_tokens
    if n_tokens > rows:
        raise FileFormatError(
            f"{where}: the tokenizer has {n_tokens} tokens, the model {rows} rows; they do not belong together."
        )
    return rows


def _embedding_rows(checkpoint: Checkpoint) -> int | None:
    for name in ("token_embd.weight", "model.embed_tokens.weight", "embed.weight"):
        tensor = checkpoint.tensors.get(name)
        if tensor is not None and len(tensor.shape) == 2:
            return tensor.shape[0]
    rows = checkpoint.metadata.get("vocab_size")
    return rows if type(rows) is int and 0 < rows <= MAX_TOKENS else None
