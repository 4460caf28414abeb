"""Search for a regular expression, in a process of its own.

A pattern of a model can take exponential time on one line, and Python's `re` cannot be interrupted: no per-line cap
helps, only killing. So `search` starts this file as a program (it imports nothing of ds4, which keeps the start short),
hands it the open folder, and kills it at the time limit, on cancel, and on Ctrl-C. What was found until then is shown.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_MATCHES = 50
MAX_LINE = 1 << 20  # bytes of a longer line are searched in pieces
SHOWN = 200  # characters of a matching line
MEMORY = 1 << 30  # bytes for the search: some patterns need more to compile than any file to read
SKIPPED = (".git",)
POLL = 0.02


@dataclass
class Found:
    """`matches`: (path relative to the folder, line number, text). `stopped`: "", "matches", "time" or "cancel"."""

    matches: list[tuple[str, int, str]] = field(default_factory=list)
    files: int = 0
    stopped: str = ""
    error: str = ""


def search(folder: int, name: str, pattern: str, files: str, seconds: float, cancel: threading.Event) -> Found:
    """Searches the file `name` of an open folder, or with "" all files below it whose names fit `files`."""
    if not sys.executable:
        return Found(error="this program has no Python of its own to search with")
    request = json.dumps({"folder": folder, "name": name, "pattern": pattern, "files": files, "seconds": seconds})
    command = [sys.executable, "-I", "-S", __file__]
    with tempfile.TemporaryFile() as output:  # not a pipe: nothing to read while waiting
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, pass_fds=[folder]
        )
        stopped = ""
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request.encode())
            end = time.monotonic() + seconds
            while process.poll() is None:
                stopped = "cancel" if cancel.is_set() else "time" if time.monotonic() > end else ""
                if stopped:
                    break
                time.sleep(POLL)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        found = Found(stopped=stopped)
        for line in output:
            if line.endswith(b"\n"):
                _add(found, json.loads(line))
    if process.returncode and not stopped and not found.error:
        found.error = "it needs too much memory" if process.returncode > 0 else "it needs too much time"
    return found


def _add(found: Found, event: dict[str, Any]) -> None:
    if "match" in event:
        path, number, text = event["match"]
        found.matches.append((path, number, text))
    found.files = event.get("files", found.files)
    found.stopped = event.get("stopped", found.stopped)
    found.error = event.get("error", found.error)


# -- the program


def _main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    seconds = int(request["seconds"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # should nobody be left to kill it
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        pattern = re.compile(request["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        _tell(error=str(error))
        return
    matches = files = 0
    for path, fd in _files(request["folder"], request["name"], request["files"]):
        files += 1
        with os.fdopen(fd, "rb") as file:
            for number, text, at in _lines_with(pattern, file):
                _tell(match=[path, number, _around(text, at)], files=files)
                matches += 1
                if matches == MAX_MATCHES:
                    _tell(files=files, stopped="matches")
                    return
    _tell(files=files)


def _tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _files(folder: int, name: str, wanted: str) -> Iterator[tuple[str, int]]:
    """(path, descriptor) of each file. Links are not followed, and what is no regular file is not opened."""
    if name:
        yield from _opened(name, name, folder)
        return
    for base, folders, names, fd in os.fwalk(".", dir_fd=folder):
        folders[:] = sorted(one for one in folders if one not in SKIPPED)
        for one in sorted(names):
            if fnmatch.fnmatch(one, wanted):
                yield from _opened(os.path.normpath(os.path.join(base, one)), one, fd)


def _opened(path: str, name: str, folder: int) -> Iterator[tuple[str, int]]:
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except OSError:
        return
    if stat.S_ISREG(os.fstat(fd).st_mode):
        yield path, fd
    else:
        os.close(fd)


def _lines_with(pattern: re.Pattern[str], file: Any) -> Iterator[tuple[int, str, int]]:
    """(line number, line, where the match begins) of each line that matches, in a file that looks like text."""
    number, first = 1, True
    while raw := file.readline(MAX_LINE):
        if first and b"\0" in raw[:8192]:
            return
        first = False
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        if match := pattern.search(text):
            yield number, text, match.start()
        number += raw.endswith(b"\n")


def _around(text: str, at: int) -> str:
    """The part of a line that shows the match."""
    if len(text) <= SHOWN:
        return text
    begin = max(0, min(at - SHOWN // 4, len(text) - SHOWN))
    end = begin + SHOWN
    return "..." * (begin > 0) + text[begin:end] + "..." * (end < len(text))


if __name__ == "__main__":
    _main()
