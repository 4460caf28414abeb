"""Ctrl-C at the right moment: held back while a log and the state in memory take the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds SIGINT back until the end of the block, then lets it act as it would have. In other threads than the main
    one, which never see it, and where the handler is not Python's, this does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None or handler == signal.SIG_IGN:
        yield
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
