"""The C core as Python sees it: `ffi`, `lib`, `check`, and the way a progress callback and Ctrl-C reach a call that
sits in C.

DS4_CORE=test selects the test build (failure injection, NaN poisoning, toy streams), for the test suite.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import errors

if os.environ.get("DS4_CORE") == "test":
    from ds4._core_test import ffi, lib
else:
    from ds4._core import ffi, lib

__all__ = ["Progress", "check", "ffi", "lib"]

_CLASSES: dict[int, type[errors.Ds4Error]] = {
    lib.DS4_EINVAL: errors.ArgumentError,
    lib.DS4_ENOMEM: errors.SystemResourceError,
    lib.DS4_EPOSITION: errors.PositionError,
    lib.DS4_EINEXACT: errors.InexactError,
    lib.DS4_ECTX: errors.ContextFull,
    lib.DS4_EPOOL: errors.PoolFull,
    lib.DS4_EBUSY: errors.Busy,
    lib.DS4_EPOISONED: errors.Poisoned,
    lib.DS4_ECANCELLED: errors.Cancelled,
    lib.DS4_ELOGITS: errors.NoLogits,
    lib.DS4_EIO: errors.SystemResourceError,
    lib.DS4_ECORRUPT: errors.SnapshotError,
    lib.DS4_EIDENTITY: errors.IdentityError,
    lib.DS4_EFORKED: errors.ForkedError,
    lib.DS4_EMARK: errors.MarkError,
    lib.DS4_EFAILED: errors.ComputeError,
    lib.DS4_EDEVICE: errors.ComputeError,
    lib.DS4_ENONFINITE: errors.NonFiniteError,
    lib.DS4_EUNSUPPORTED: errors.UnsupportedError,
}
_NUMBERS = {
    lib.DS4_EPOSITION: ("wanted", "held"),
    lib.DS4_EINEXACT: ("wanted", "nearest"),
    lib.DS4_ECTX: ("wanted", "ctx"),
    lib.DS4_EPOOL: ("needed", "free"),
}


def check(status: int, err: Any) -> None:
    """Raises the error that a status of the core stands for; `err` is the ds4_error that the call filled."""
    if status == lib.DS4_OK:
        return
    error = _CLASSES.get(status, errors.Ds4Error)(ffi.string(err.text).decode("utf-8", "replace"))
    for name, value in zip(_NUMBERS.get(status, ()), (err.a, err.b), strict=False):
        setattr(error, name, value)
    raise error


class Progress:
    """Hands `callback(done, total)` to one call of the core and brings back what it raised, Ctrl-C included.

    The core calls at least every 50 ms, also without a callback: that is when Python can deliver a signal. An
    exception cancels the call and is raised again by `done`.
    """

    def __init__(self, callback: Callable[[int, int], Any] | None) -> None:
        self.callback = callback
        self.error: BaseException | None = None
        self.handle = ffi.new_handle(self)

    def done(self) -> None:
        """Raises what the callback raised."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def _failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> int:
    """A signal can arrive before the callback's first line: it is kept all the same."""
    user = trace.tb_frame.f_locals.get("user") if trace is not None else None
    if user is not None:
        ffi.from_handle(user).error = error
    return 1


@ffi.def_extern(error=1, onerror=_failed)  # type: ignore[untyped-decorator]
def ds4_py_progress(user: Any, done: int, total: int) -> int:
    progress = ffi.from_handle(user)
    if progress.callback is not None:
        progress.callback(done, total)
    return 0
