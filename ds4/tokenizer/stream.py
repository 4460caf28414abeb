"""Text out of tokens as they come: a token may end in the middle of a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4.tokenizer.base import Tokenizer


class Detokenizer:
    """Turns token ids into text one by one; all it returns, joined, equals `Tokenizer.decode` of all the ids, and has
    the space that some models put before a text: what is streamed goes on behind other text.

    At most three bytes are ever held back: the beginning of a character whose rest may still come. Bytes that cannot
    become a character turn into U+FFFD as soon as that is known.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is complete with this token, often "". Raises ArgumentError outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The end: U+FFFD for a character that was cut, else "". The next `feed` begins a new text."""
        return self._decoder.decode(b"", final=True)
