"""Engine, Session and Mark: the C core with Python's manners. Knows token ids, nothing of chat.

>>> eng = ds4.Engine("smollm2-135m")
>>> s = eng.session(ctx=2048)
>>> s.eval(eng.tokenizer.encode("Once upon a time"))
>>> b = s.fork()            # shares every page with s
>>> s.truncate(2)           # the same bits as if only two tokens had ever been evaluated
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import families, files, models, sampling
from . import tokenizer as tokenizers
from .core import Progress, check, ffi, lib
from .errors import ArgumentError, Ds4Error, ForkedError, PoolFull, UnsupportedError
from .profile import ProfileEntry

ProgressCallback = Callable[[int, int], Any]
Tokens = Iterable[int] | npt.NDArray[np.int32]

_FORMATS = {name: getattr(lib, f"DS4_{name}") for name in (*families.MATRIX_FORMATS, *families.SCALED_FORMATS)}
_STATES = {lib.DS4_EMPTY: "EMPTY", lib.DS4_LIVE: "LIVE", lib.DS4_BUSY: "BUSY", lib.DS4_POISONED: "POISONED"}

_WANTS = {
    None: lib.DS4_WANT_NONE,
    "last": lib.DS4_WANT_LAST,
    "all": lib.DS4_WANT_ALL,
    "draft": lib.DS4_WANT_DRAFT,
}

_HERE = -(2**63)  # DS4_HERE
_PROFILE_ENTRIES = 256  # the core keeps no more


def _token_array(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as contiguous int32. Raises ArgumentError for anything else."""
    if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] <= 0x7FFFFFFF:
        return np.array(tokens, np.int32)  # a decode step; what follows costs more than all the rest of it in Python
    try:
        array = np.asarray(tokens if isinstance(tokens, (list, tuple, np.ndarray)) else list(tokens))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError("tokens must be a list of token ids.") from None
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(f"tokens must be a flat list of whole numbers, not {array.ndim}-dimensional {array.dtype}.")
    if array.min() < 0 or array.max() > 0x7FFFFFFF:
        raise ArgumentError(f"token ids lie between {array.min()} and {array.max()}; they must fit the vocabulary.")
    return np.ascontiguousarray(array, np.int32)


def _position(value: int) -> int:
    try:
        number = int(value.__index__())
    except AttributeError:
        raise ArgumentError(f"a position must be a whole number, not {type(value).__name__}.") from None
    return max(-(2**62), min(2**62, number))


def _count(name: str, value: int | None, most: int = 2**31 - 1) -> int:
    """An optional count for the core, 0 = its default."""
    if value is None:
        return 0
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 < value.__index__() <= most:
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number from 1 to {most}.")
    return value.__index__()


def _path(path: str | os.PathLike[str]) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise ArgumentError("a path cannot hold a NUL character.")
    return name


class _Closing:
    """A context manager whose exit is `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handle:
    """A pointer of the core with its free function, called when the last user lets go: a call in another thread keeps
    the pointer until it returns."""

    def __init__(self, pointer: Any, free: Any, what: str) -> None:
        self._pointer, self._what = ffi.gc(pointer, free), what

    def __call__(self) -> Any:
        if self._pointer is None:
            raise Ds4Error(f"this {self._what} is closed; make a new one.")
        return self._pointer

    @property
    def open(self) -> bool:
        return self._pointer is not None

    def release(self) -> None:
        self._pointer = None


@dataclass(frozen=True)
class Synced:
    """What a sync did: `reused` tokens kept, `evaluated` ones computed, in `seconds`."""

    reused: int
    evaluated: int
    seconds: float


@dataclass(frozen=True)
class StreamInfo:
    """One stream of rows. `reach` is None when it is unlimited; `row_bytes` and `page_bytes` are of all its layers."""

    name: str
    n_layers: int
    stride: int
    reach: int | None
    page_rows: int
    row_bytes: int
    page_bytes: int


class Engine(_Closing):
    """A loaded model on one backend, and the page pool that its sessions share. A context manager.

    `model`: a name of `ds4 models`, a .gguf file, or a folder with safetensors and config.json. `backend`: "cpu", or
    "ref" (plain C, slow, the oracle). `threads`: default all CPUs that this process may use. `kv_dtype`: "f32", "f16"
    or "q8_0". The pool: `pool_bytes`, or room for `pool_tokens` tokens, or half of the memory this process may use.
    `reach_slack`: positions behind a window that stay exact. `progress(done, total)`: bytes of weights loaded.
    `test_options`: settings that only a test build of the core knows.

    DeepSeek V4 only: `rounding` rounds rows and the indexer as the published inference code does (False: as Hugging
    Face; default: what the model's entry in `models/` says, else False), and with it kv_dtype may be "fp8"; it has no
    "q8_0". `mtp` loads the block that predicts the token after the next.

    Raises ArgumentError, FileFormatError, UnsupportedError (by name), SystemResourceError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        backend: str = "cpu",
        threads: int | None = None,
        kv_dtype: str = "f16",
        pool_tokens: int | None = None,
        pool_bytes: int | None = None,
        reach_slack: int = 256,
        rounding: bool | None = None,
        mtp: bool = False,
        progress: ProgressCallback | None = None,
        test_options: Mapping[str, float] | None = None,
    ) -> None:
        for name, value in (("backend", backend), ("kv_dtype", kv_dtype)):
            if not isinstance(value, str):
                raise ArgumentError(f"{name} is {value!r}; it must be text.")
        self.model = os.fspath(model)
        path = models.resolve(self.model)
        self.checkpoint = files.open_checkpoint(path)
        try:
            known = models.describe(self.model)
            if rounding is None:
                rounding = known is not None and known.engine.get("rounding", False)
            self.spec = families.model_spec(self.checkpoint, rounding=rounding, mtp=mtp)
            self.tokenizer = tokenizers.load(self.checkpoint)
            err, out = ffi.new("ds4_error *"), ffi.new("ds4_engine **")
            check(
                lib.ds4_engine_new(self.spec.arch.encode(), backend.encode(), _count("threads", threads), out, err), err
            )
            self._handle = _Handle(out[0], lib.ds4_engine_free, "engine")
            settings = {
                **self.spec.config,
                "reach_slack": [float(_count("reach_slack", reach_slack) if reach_slack else 0)],
            }
            settings |= {key: [float(value)] for key, value in (test_options or {}).items()}
            for key, values in settings.items():
                check(lib.ds4_engine_set(self._handle(), key.encode(), values, len(values), err), err)
            self._load(progress)
            words = self.tokenizer.fingerprint() if self.tokenizer is not None else b""
            identity = hashlib.sha256(self.checkpoint.fingerprint(self.spec) + words).digest()
            pool = (_count("pool_tokens", pool_tokens, 2**32), _count("pool_bytes", pool_bytes, 2**50))
            check(lib.ds4_engine_ready(self._handle(), kv_dtype.encode(), *pool, identity, err), err)
        except BaseException:
            self.checkpoint.close()
            raise
        self.identity = identity
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        info = ffi.new("ds4_engine_info *")
        lib.ds4_engine_get_info(self._handle(), info)
        self.vocab, self.ctx, self.page_rows, self.threads = info.vocab, info.ctx, info.page_rows, info.threads
        self.token_bytes, self.mark_bytes, self.weight_bytes = info.token_bytes, info.mark_bytes, info.weight_bytes
        self.pool_bytes, self.numerics, self.reach_slack = info.pool_bytes, info.numerics, info.reach_slack
        self.backend, self.isa, self.kv_dtype = (
            ffi.string(t).decode() for t in (info.backend, info.isa, info.kv_dtype)
        )
        self.arch = self.spec.arch

    def _load(self, progress: ProgressCallback | None) -> None:
        """Hands every tensor to the core; the pages of the file go back to the system when the backend has a copy."""
        err = ffi.new("ds4_error *")
        total, done, before = sum(t.bytes() for _, t in self.spec.tensors), 0, 0
        self._borrowed: list[Any] = []  # bytes that the backend goes on reading; they keep the mapping
        for name, tensor in self.spec.tensors:
            if tensor.format not in _FORMATS:
                raise UnsupportedError(
                    f"{self.checkpoint.path}: tensor {name} is {tensor.format}; this version computes with "
                    f"{', '.join(_FORMATS)}."
                )
            rows, cols = tensor.shape if len(tensor.shape) == 2 else (1, tensor.shape[0])
            data = ffi.from_buffer(tensor.data)
            scales = ffi.from_buffer(tensor.scales) if tensor.scales is not None else ffi.NULL
            self._borrowed.append((data, scales))
            sizes = len(tensor.data), scales, len(tensor.scales) if tensor.scales is not None else 0
            check(
                lib.ds4_engine_tensor_scaled(
                    self._handle(), name.encode(), _FORMATS[tensor.format], rows, cols, data, *sizes, err
                ),
                err,
            )
            after = self._own_weights()
            if after > before:
                self.checkpoint.forget(tensor)
                self._borrowed.pop()
            before, done = after, done + tensor.bytes()
            if progress is not None:
                progress(done, total)

    def _own_weights(self) -> int:
        info = ffi.new("ds4_engine_info *")
        lib.ds4_engine_get_info(self._handle(), info)
        return int(info.weight_bytes)

    @property
    def streams(self) -> list[StreamInfo]:
        """How the model's attention state is kept."""
        info, err = ffi.new("ds4_stream_info *"), ffi.new("ds4_error *")
        found: list[StreamInfo] = []
        while lib.ds4_engine_stream(self._handle(), len(found), info, err) == lib.DS4_OK:
            sizes = (info.page_rows, info.row_bytes, info.page_bytes)
            found.append(
                StreamInfo(ffi.string(info.name).decode(), info.n_layers, info.stride, info.reach or None, *sizes)
            )
        return found

    def ledger(self) -> dict[str, int]:
        """Counts of the pool (K7): pages, references, bytes, sessions, marks, logits. All but bytes_system (freed
        pages may keep their memory) return to their start when everything is closed."""
        led, err = ffi.new("ds4_ledger *"), ffi.new("ds4_error *")
        check(lib.ds4_engine_ledger(self._handle(), led, err), err)
        return {name: int(getattr(led, name)) for name, _ in ffi.typeof("ds4_ledger").fields}

    def profile(self, then: Literal["go on", "start", "stop"] = "go on") -> list[ProfileEntry]:
        """Where the time has gone since the profile was started: nothing while none runs. `then`: "start" counts from
        zero from now on, "stop" ends it. It never changes a bit; with DS4_PROFILE=1 in the environment one runs from
        the start, and its table goes to stderr when the engine ends. Raises Busy during a call of this engine.
        """
        steps = {"go on": lib.DS4_PROFILE_READ, "start": lib.DS4_PROFILE_START, "stop": lib.DS4_PROFILE_STOP}
        if then not in steps:
            raise ArgumentError(f"then is {then!r}; 'go on', 'start' and 'stop' are possible.")
        err, n, out = ffi.new("ds4_error *"), ffi.new("uint32_t *"), ffi.new("ds4_profile_entry[]", _PROFILE_ENTRIES)
        check(lib.ds4_engine_profile(self._handle(), steps[then], out, _PROFILE_ENTRIES, n, err), err)
        return [
            ProfileEntry(
                ffi.string(e.op).decode(), ffi.string(e.format).decode(), bool(e.many), e.calls, e.ns / 1e9, e.bytes,
                e.macs, e.rows,
            )
            for e in out[0 : n[0]]
        ]  # fmt: skip

    def session(self, ctx: int | None = None) -> Session:
        """An empty session. `ctx` bounds its positions and reserves nothing; default: the model's own."""
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_session **")
        check(lib.ds4_session_new(self._handle(), _count("ctx", ctx), out, err), err)
        return Session(self, out[0])

    def load(self, path: str | os.PathLike[str], ctx: int | None = None) -> Session:
        """A new session from a snapshot. Raises SnapshotError (damaged), IdentityError (another model, option, KV
        dtype or numerics number), PoolFull, ContextFull, SystemResourceError; nothing live changes then."""
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_session **")
        check(lib.ds4_session_load(self._handle(), _path(path), _count("ctx", ctx), out, err), err)
        return Session(self, out[0])

    def eval_batch(
        self,
        segments: Sequence[tuple[Session, Tokens]],
        *,
        chunk: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Appends tokens to many sessions in one pass over the weights; each ends with the logits of its last token.
        The bits are those of separate evals. An error carries `positions`: where each session stands."""
        parts = [(session, _token_array(tokens)) for session, tokens in segments]
        _eval(self, [_Segment(session, tokens, lib.DS4_WANT_LAST, None) for session, tokens in parts], chunk, progress)

    def fault(self, kind: Literal["alloc", "read", "write", "kernel", "device"], k: int) -> int:
        """Test builds: the k-th operation of this kind from now fails once (0 = off). Returns how many were seen
        since the last call."""
        if not lib.ds4_test_build():
            raise UnsupportedError("failure injection needs a test build of the core: DS4_BUILD_TEST=1, DS4_CORE=test.")
        return int(lib.ds4_engine_fault(self._handle(), getattr(lib, f"DS4_FAULT_{kind.upper()}"), k))

    def close(self) -> None:
        """Closes all sessions and gives all memory back. Safe to call twice."""
        for session in list(self._sessions):
            session.close()
        self._handle.release()
        self._borrowed.clear()
        self.checkpoint.close()


@dataclass(slots=True)
class _Segment:
    session: Session
    tokens: npt.NDArray[np.int32]
    want: int
    out: npt.NDArray[np.float32] | None


def _eval(engine: Engine, segments: Sequence[_Segment], chunk: int | None, progress: ProgressCallback | None) -> None:
    err, array = ffi.new("ds4_error *"), ffi.new("ds4_segment[]", max(1, len(segments)))
    keep: list[Any] = []
    for segment, to in zip(segments, array, strict=False):
        if segment.session.engine is not engine:
            raise ArgumentError("every session of a batch must belong to this engine.")
        keep.append(segment.session._handle())
        to.session, to.n, to.want = keep[-1], len(segment.tokens), segment.want
        keep.append(ffi.from_buffer("int32_t[]", segment.tokens))
        to.tokens = keep[-1]
        if segment.out is not None:
            keep.append(ffi.from_buffer("float[]", segment.out, require_writable=True))
            to.out = keep[-1]
    state, size = Progress(progress), _count("chunk", chunk)
    try:
        status = lib.ds4_eval(engine._handle(), array, len(segments), size, lib.ds4_py_progress, state.handle, err)
        state.done()
        check(status, err)
    except Ds4Error as error:
        if not isinstance(error, ForkedError):
            error.positions = [int(array[i].pos) for i in range(len(segments))]
            error.pos = error.positions[0] if len(segments) == 1 else None
        raise
    finally:
        keep.clear()  # an exception that somebody keeps must not keep the session


class Session(_Closing):
    """One mutable timeline: token log, KV rows, logits. One writer at a time (Busy). A context manager.

    Made by `Engine.session`, `Engine.load` and `Session.fork`.
    """

    def __init__(self, engine: Engine, pointer: Any) -> None:
        self.engine = engine
        self._handle = _Handle(pointer, lib.ds4_session_free, "session")
        self.ctx: int = self._info().ctx
        self.cancels = 0
        """How often `cancel` was called."""
        engine._sessions.add(self)

    def _info(self) -> Any:
        info, err = ffi.new("ds4_session_info *"), ffi.new("ds4_error *")
        check(lib.ds4_session_get_info(self._handle(), info, err), err)
        return info

    @property
    def pos(self) -> int:
        """Number of tokens held."""
        return int(self._info().pos)

    @property
    def state(self) -> str:
        """ "EMPTY", "LIVE", "BUSY" or "POISONED"."""
        return _STATES[self._info().state]

    @property
    def reserved(self) -> int:
        """The position up to which appending cannot run out of pages; 0 = nothing is reserved."""
        return int(self._info().reserved_pos)

    @property
    def bytes_held(self) -> int:
        """Bytes of the pages in this session's tables, shared ones included."""
        return int(self._info().bytes_held)

    @property
    def auto_marks(self) -> int:
        """How many automatic marks the engine keeps on this timeline."""
        return int(self._info().auto_marks)

    @property
    def tokens(self) -> list[int]:
        """A copy of the token log."""
        err, n = ffi.new("ds4_error *"), self.pos
        out = np.empty(n, np.int32)
        check(
            lib.ds4_session_tokens(self._handle(), 0, n, ffi.from_buffer("int32_t[]", out, require_writable=True), err),
            err,
        )
        return out.tolist()

    @property
    def logits_valid(self) -> bool:
        """Whether `logits` can be read."""
        return bool(self._info().logits_valid)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits of the last token, float32 [vocab], read-only; the array stays as it is whatever the session
        does. Raises NoLogits (K5)."""
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_logits **")
        check(lib.ds4_session_logits(self._handle(), out, err), err)
        held = out[0]
        data = ffi.gc(lib.ds4_logits_data(held), lambda _, free=lib.ds4_logits_free: free(held))
        array = np.frombuffer(ffi.buffer(data, self.engine.vocab * 4), np.float32)
        array.flags.writeable = False
        return array

    def _sample(self, options: Any) -> tuple[int, float]:
        """`ds4_sample` on the session's logits, without an array of them."""
        err, held, out = ffi.new("ds4_error *"), ffi.new("ds4_logits **"), ffi.new("ds4_sampled *")
        check(lib.ds4_session_logits(self._handle(), held, err), err)
        try:
            check(lib.ds4_sample(lib.ds4_logits_data(held[0]), self.engine.vocab, options, out, err), err)
        finally:
            lib.ds4_logits_free(held[0])
        return out.id, out.logprob

    def eval(
        self,
        tokens: Tokens,
        *,
        logits: Literal["last", "all", "draft"] | None = "last",
        chunk: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> npt.NDArray[np.float32] | None:
        """Appends tokens and computes their rows. `logits`: "last" (then `s.logits`), "all" (also returns float32 [n,
        vocab]; refused above 1 GB), or None; "draft" returns, as float32 [n, vocab], what the MTP block of an engine
        with `mtp` says of the same next tokens from the state one token before (zeros at position 0), and leaves no
        `s.logits`. `chunk`: tokens computed together, default 512; the bits do not depend on it.
        `progress(done, total)` is called at least every 50 ms.

        Raises ArgumentError, ContextFull, PoolFull, Busy, Poisoned before anything is computed; Cancelled and
        ComputeError leave the session at the last whole chunk (`error.pos`).
        """
        if logits not in _WANTS:
            raise ArgumentError(f"logits is {logits!r}; 'last', 'all', 'draft' and None are possible.")
        array, out = _token_array(tokens), None
        if logits in ("all", "draft"):
            if len(array) * self.engine.vocab * 4 > 1 << 30:
                raise ArgumentError(
                    f"the logits of {len(array)} tokens would take {len(array) * self.engine.vocab * 4} bytes, above "
                    "1 GB; use score, or shorter pieces."
                )
            out = np.empty((len(array), self.engine.vocab), np.float32)
        _eval(self.engine, [_Segment(self, array, _WANTS[logits], out)], chunk, progress)
        return out

    def score(
        self, tokens: Tokens, *, chunk: int | None = None, progress: ProgressCallback | None = None
    ) -> npt.NDArray[np.float32]:
        """Appends tokens and returns the log-probability of each, given all before it: float32 [n]. [n, vocab] is
        never in memory. Into an empty session a model that wants BOS gets it first; without one the first token has
        nothing before it and its value is 0.

        Raises like `eval`, and NonFiniteError when a log-probability is not a finite number.
        """
        array = _token_array(tokens)
        tok = self.engine.tokenizer
        if len(array) and tok is not None and tok.add_bos and tok.bos_id is not None and self.pos == 0:
            self.eval([tok.bos_id])
        out = np.zeros(len(array), np.float32)
        _eval(self.engine, [_Segment(self, array, lib.DS4_WANT_SCORE, out)], chunk, progress)
        return out

    def sync(self, tokens: Tokens, *, chunk: int | None = None, progress: ProgressCallback | None = None) -> Synced:
        """Makes the session hold exactly these tokens: keeps the longest exact prefix and evaluates the rest (K3).
        Logits are valid afterwards. Raises like `eval`."""
        array, start = _token_array(tokens), time.perf_counter()
        err, out, state = ffi.new("ds4_error *"), ffi.new("ds4_synced *"), Progress(progress)
        data = ffi.from_buffer("int32_t[]", array)
        with self._position_on_error():
            status = lib.ds4_session_sync(
                self._handle(), data, len(array), _count("chunk", chunk), lib.ds4_py_progress, state.handle, out, err
            )
            state.done()
            check(status, err)
        return Synced(out.reused, out.evaluated, time.perf_counter() - start)

    def refresh(self) -> None:
        """Evaluates the last token again when the logits are not valid. Raises NoLogits on an empty session."""
        err, state = ffi.new("ds4_error *"), Progress(None)
        with self._position_on_error():
            status = lib.ds4_session_refresh(self._handle(), lib.ds4_py_progress, state.handle, err)
            state.done()
            check(status, err)

    def _position_on_error(self) -> _PositionOnError:
        return _PositionOnError(self)

    def generate(
        self,
        options: sampling.Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        stop_ids: Iterable[int] | None = None,
        greedy: Callable[[], bool] | None = None,
    ) -> Generator[sampling.Token, None, None]:
        """Samples token after token, each yielded when it is in the session; see `ds4.sampling.generate`."""
        return sampling.generate(self, options, max_tokens, stop, stop_ids, greedy)

    def cancel(self) -> None:
        """Ends the call in progress on this session, from any thread; with none it does nothing."""
        self.cancels += 1
        lib.ds4_session_cancel(self._handle())

    def truncate(self, pos: int) -> None:
        """Cuts the session back to `pos`, 0 <= pos <= s.pos; afterwards it equals one that never saw the rest (K2).
        Raises PositionError, InexactError (K3); nothing has changed then."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_truncate(self._handle(), _position(pos), err), err)

    def nearest_exact(self, pos: int) -> int:
        """The largest q <= pos that truncate and fork accept: pos itself when it is exact, 0 always. Raises
        PositionError outside 0..s.pos."""
        err, out = ffi.new("ds4_error *"), ffi.new("uint32_t *")
        check(lib.ds4_session_nearest_exact(self._handle(), _position(pos), out, err), err)
        return int(out[0])

    def fork(self, pos: int | None = None) -> Session:
        """A new session that shares this one's pages up to `pos` (default: all, with the logits), copy on write.
        Raises like `truncate`."""
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_session **")
        target = _HERE if pos is None else _position(pos)
        check(lib.ds4_session_fork(self._handle(), target, out, err), err)
        return Session(self.engine, out[0])

    def mark(self) -> Mark:
        """Remembers this position: `rollback` to it is exact however far the session goes on."""
        err, out = ffi.new("ds4_error *"), ffi.new("ds4_mark **")
        check(lib.ds4_session_mark(self._handle(), out, err), err)
        return Mark(self, out[0])

    def mark_auto(self, *, pinned: bool = False) -> None:
        """Sets an automatic mark here, which goes when room is short; a pinned one (the end of a system prompt) goes
        last."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_mark_auto(self._handle(), pinned, err), err)

    def rollback(self, mark: Mark) -> None:
        """Returns to a mark of this session, with the logits it had. Raises MarkError when it is dead; nothing has
        changed then."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_rollback(self._handle(), mark._handle(), err), err)

    def reserve(self, tokens: int) -> None:
        """Sets pages aside so that `tokens` more positions cannot run out of them, also after truncate and rollback;
        0 gives them back. Raises PoolFull, ContextFull."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_reserve(self._handle(), _count("tokens", tokens) if tokens else 0, err), err)

    def clear(self) -> None:
        """Empties the session; works on a POISONED one too."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_clear(self._handle(), err), err)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to one file, durably (K9). After an error the old file is untouched, unless only the last
        step failed, making the new name durable: then the whole new file is there."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_save(self._handle(), _path(path), err), err)

    def rows(self, stream: int, first: int, n: int) -> bytes:
        """The rows [first, first + n) of one stream as they are stored, in the order layer, row, part, head. For
        tests and snapshots."""
        err = ffi.new("ds4_error *")
        info = self.engine.streams[stream]
        out = bytearray(n * info.row_bytes)
        check(
            lib.ds4_session_rows(
                self._handle(), stream, first, n, ffi.from_buffer(out, require_writable=True), len(out), err
            ),
            err,
        )
        return bytes(out)

    def check(self) -> None:
        """Recomputes everything that the session and the pool claim about themselves; raises ArgumentError naming
        what does not hold."""
        err = ffi.new("ds4_error *")
        check(lib.ds4_session_check(self._handle(), err), err)

    def close(self) -> None:
        """Frees the session; a call in progress is cancelled first. Safe to call twice."""
        self.engine._sessions.discard(self)
        if self._handle.open:
            self.cancel()
        self._handle.release()


class _PositionOnError:
    """Gives an error of a call the position at which the session stands."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Ds4Error) and not isinstance(error, ForkedError) and self.session._handle.open:
            error.pos = self.session.pos


class Mark(_Closing):
    """A remembered position; dropped handles release themselves. A context manager."""

    def __init__(self, session: Session, pointer: Any) -> None:
        self.session = session
        self._handle = _Handle(pointer, lib.ds4_mark_free, "mark")

    @property
    def pos(self) -> int:
        """The position remembered. Raises MarkError when the mark is dead."""
        err, out = ffi.new("ds4_error *"), ffi.new("uint32_t *")
        check(lib.ds4_mark_pos(self._handle(), out, err), err)
        return int(out[0])

    @property
    def alive(self) -> bool:
        """Whether `rollback` to it would work."""
        return bool(lib.ds4_mark_pos(self._handle(), ffi.new("uint32_t *"), ffi.NULL) == lib.DS4_OK)

    def release(self) -> None:
        """Lets go of the position. Safe to call twice."""
        self._handle.release()

    close = release


__all__ = ["Engine", "Mark", "PoolFull", "ProfileEntry", "Session", "StreamInfo", "Synced"]
