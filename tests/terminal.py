"""A command in a terminal of its own: what a person would see, and the keys they would press."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time

_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")
_WHERE = b"\x1b[6n"  # the program asks where the cursor is


class Terminal:
    """`python -c SCRIPT ARGS` behind a pseudo-terminal. A context manager; leaving it kills what still runs."""

    def __init__(self, script: str, *args: str, env: dict[str, str]) -> None:
        self.code: int | None = None
        self.raw = ""
        """What came since the last `send`."""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            try:
                os.execve(sys.executable, [sys.executable, "-c", script, *args], {**os.environ, **env})
            finally:
                os._exit(127)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.code is None:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    @property
    def text(self) -> str:
        """The same without escape sequences and empty lines."""
        return re.sub(r"\s*[\r\n]\s*", "\n", _ESCAPE.sub("", self.raw))

    def send(self, keys: str) -> None:
        self.raw = ""
        data = keys.encode()
        while data:
            data = data[os.write(self._fd, data) :]

    def wait(self, pattern: str, seconds: float = 120) -> str:
        """What came until the pattern was there; without it the test fails with what there is instead."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"{pattern!r} did not come:\n{self.text}")
        return self.text

    def ended(self) -> int:
        """The exit code, when it has come to its end."""
        while self._read():
            pass
        self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.code

    def _read(self) -> bool:
        """Takes what comes soon; False at the end."""
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux says so when the last of the other side has gone
            return False
        for _ in range(data.count(_WHERE)):
            os.write(self._fd, b"\x1b[1;1R")
        self.raw += data.decode("utf-8", "replace")
        return bool(data)
