"""The errors of ds4: one class per cause, each a sentence that says what to do next.

All derive from `Ds4Error`; those that are also wrong arguments derive from `ValueError` too, so that plain Python
code catches them as usual.
"""

from __future__ import annotations


class Ds4Error(Exception):
    """Base of every error of this package."""

    pos: int | None = None
    """Where the session stands now, on errors of a call that may have completed whole chunks (K6)."""
    positions: list[int] | None = None
    """The same for each session of an `eval_batch`."""


class ArgumentError(Ds4Error, ValueError):
    """An argument is out of range; nothing has changed."""


class PositionError(ArgumentError):
    """A position outside 0..pos. `wanted` and `held` are the two numbers."""

    wanted: int
    held: int


class InexactError(Ds4Error, ValueError):
    """The state at `wanted` is gone (K3); `nearest` is the largest exact position below it."""

    wanted: int
    nearest: int


class ContextFull(Ds4Error):
    """More positions than the session's ctx: `wanted` and `ctx`."""

    wanted: int
    ctx: int


class PoolFull(Ds4Error):
    """Too few free pages; nothing has changed. `needed` and `free` are bytes."""

    needed: int
    free: int


class Busy(Ds4Error):
    """Another call is working on this session."""


class Poisoned(Ds4Error):
    """A device failed under this session: only clear, sync and close work on it."""


class Cancelled(Ds4Error):
    """The call was cancelled; the session stands at the last whole chunk, `pos`."""


class NoLogits(Ds4Error):
    """The session holds no valid logits (K5)."""


class MarkError(Ds4Error):
    """The mark is dead: its position is no longer on the session's timeline."""


class ComputeError(Ds4Error):
    """A kernel or a device failed; the chunk was not committed."""


class NonFiniteError(Ds4Error, ValueError):
    """NaN or infinity where a number is needed."""


class SystemResourceError(Ds4Error):
    """The system refused memory, a thread or a file operation."""


class ForkedError(Ds4Error):
    """The process was forked after the engine was made: create the engine after the fork."""


class FileFormatError(Ds4Error, ValueError):
    """A file is damaged, cut or not what its name says. The sentence names the file, the place and both numbers."""


class SnapshotError(FileFormatError):
    """A snapshot is damaged; nothing has changed."""


class IdentityError(SnapshotError):
    """A snapshot of another model, option, KV dtype or numerics number; nothing has changed."""


class UnsupportedError(Ds4Error):
    """An architecture, tensor format, tokenizer or option that this version does not know, by name. Never ignored."""


class PullError(Ds4Error):
    """A model could not be fetched; nothing is half-installed."""


class StoreError(Ds4Error):
    """A folder that holds no conversation, or one that this version cannot open."""


class StoreBusy(StoreError):
    """Another process, or another `Chat` of this one, has the conversation open."""
