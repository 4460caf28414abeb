"""Tools: plain Python callables with a JSON schema, and the box that runs the calls a model writes.

>>> @tool
... def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
...     '''The weather of a city.
...
...     city: its English name
...     '''
>>> Toolbox([weather]).call(ToolCall("weather", {"city": "Oslo"}))

A call never raises: whatever goes wrong with it is a result that tells the model what would work. Only what is no
`Exception` (KeyboardInterrupt, SystemExit) passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ds4.agent.schema import check, fit, from_signature, short, usage
from ds4.chat_formats.base import ToolCall
from ds4.chat_formats.toolcalls import json_text
from ds4.errors import ArgumentError, Cancelled, Ds4Error
from ds4.tokenizer.base import characters

POLL = 0.05  # seconds between two looks at the cancel event
GRACE = 2.0  # seconds that a cancelled async tool has to end; one that does not is left behind
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENT_LINE = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?\s*:\s+(\S.*)")


@dataclass(frozen=True)
class Result:
    """What the model gets to read; a tool that has failed with a text of its own returns one itself."""

    text: str
    failed: bool = False


CANCELLED = Result("cancelled by the user", failed=True)


@dataclass(frozen=True)
class Tool:
    """One tool; `tool` makes it from a callable.

    `parameters` is a JSON schema of type "object"; `run` takes its properties by name. `needs_permission`: the user
    is asked before it runs. `describe(arguments)`: what the user is shown then, one line. `cancel_argument`: the
    parameter of `run` that gets the event which is set when the user cancels.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., Any]
    is_async: bool = False
    needs_permission: bool = False
    describe: Callable[[dict[str, Any]], str] | None = None
    cancel_argument: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ArgumentError(f"the tool name {self.name!r} is not 1 to 64 letters, digits, _ and -; give name=.")
        json_text(self.schema)
        check(self.parameters, self.name)

    @property
    def schema(self) -> dict[str, Any]:
        """What the model is told of it."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


# -- from a callable


@overload
def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    needs_permission: bool = False,
    describe: Callable[[dict[str, Any]], str] | None = None,
) -> Tool: ...
@overload
def tool(
    function: None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    needs_permission: bool = False,
    describe: Callable[[dict[str, Any]], str] | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    needs_permission: bool = False,
    describe: Callable[[dict[str, Any]], str] | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """A tool from a callable, sync or async; also a decorator, with and without options.

    The schema follows from the signature: str, int, float, bool, list[...], dict, Literal, Enum, `| None`, defaults,
    `Annotated[T, "description"]`. The docstring's first paragraph is the description, its lines `name: text` describe
    parameters. A parameter of type `threading.Event` is not the model's: it gets the event that is set when the user
    cancels. Raises ArgumentError for any other signature, unless `parameters` (a JSON schema) is given.
    """
    if function is None:
        return lambda function: tool(
            function,
            name=name,
            description=description,
            parameters=parameters,
            needs_permission=needs_permission,
            describe=describe,
        )
    if not callable(function):
        raise ArgumentError(f"a tool is made from a callable, not from {function!r:.80}.")
    name = name if name is not None else getattr(function, "__name__", type(function).__name__)
    first, lines = _docstring(function)
    run, schema, cancel_argument = from_signature(function, name, lines, parameters)
    return Tool(
        name=name,
        description=description if description is not None else first,
        parameters=schema,
        run=run,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        needs_permission=needs_permission,
        describe=describe,
        cancel_argument=cancel_argument,
    )


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the text of each line `name: text`."""
    # a callable object without a docstring of its own has that of its class; a partial only has functools' own
    text = "" if isinstance(function, functools.partial) else inspect.getdoc(function) or ""
    first: list[str] = []
    lines: dict[str, str] = {}
    in_first = True
    for line in text.splitlines():
        if match := _ARGUMENT_LINE.fullmatch(line):
            lines[match[1]] = match[2].rstrip()
        in_first = in_first and bool(line.strip()) and match is None
        if in_first:
            first.append(line.strip())
    return " ".join(first), lines


# -- running


@dataclass(frozen=True)
class _Ready:
    """A call whose arguments fit."""

    tool: Tool
    arguments: dict[str, Any]

    def start(self, cancel: threading.Event) -> Any:
        own = {self.tool.cancel_argument: cancel} if self.tool.cancel_argument else {}
        return self.tool.run(**self.arguments, **own)


class Toolbox:
    """Tools by name. Takes `Tool`s and plain callables; raises ArgumentError when two have the same name. `others`: the
    names of tools that the model has as well and somebody else runs."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = (), others: Iterable[str] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._others = tuple(others)
        for item in tools:
            one = item if isinstance(item, Tool) else tool(item)
            if one.name in self._tools:
                raise ArgumentError(f"two tools have the name {one.name}; give one of them another name=.")
            self._tools[one.name] = one
        self.schemas = tuple(one.schema for one in self._tools.values())
        """What the model is told: a dict with "name", "description", "parameters" for each tool, in the order given."""

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def describe(self, call: ToolCall) -> str:
        """One line for the user on what the call does, whole: control and invisible characters are shown as escapes."""
        ready = self._ready(call)
        line = f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=repr)}"
        if isinstance(ready, _Ready) and ready.tool.describe is not None:
            with contextlib.suppress(Exception):  # the plain line says the same
                line = ready.tool.describe(ready.arguments)
        return visible(line)

    def permission(self, call: ToolCall) -> str | None:
        """What to ask the user before the call runs; None when nothing need be asked: the tool is harmless, or the
        call is faulty and will not run."""
        ready = self._ready(call)
        return self.describe(call) if isinstance(ready, _Ready) and ready.tool.needs_permission else None

    def call(self, call: ToolCall, cancel: threading.Event | None = None) -> Result:
        """Runs one call."""
        return [result for _, result in self.call_all([call], cancel)][0]

    def call_all(
        self, calls: Sequence[ToolCall], cancel: threading.Event | None = None, concurrent: bool = True
    ) -> Iterator[tuple[int, Result]]:
        """Runs the calls of one message; yields (index in `calls`, result) of each when it is finished.

        Sync tools run in order in the thread that reads this; async ones all at once in an event loop on a thread of
        their own, so that a caller may be inside a loop itself. `concurrent=False`: everything in order. When `cancel`
        is set, calls that have not finished yield `CANCELLED`: async ones are stopped, a sync one is waited for (it
        may take the event as an argument and stop itself), what has not begun does not begin.
        """
        cancel = cancel if cancel is not None else threading.Event()
        ready = [self._ready(call) for call in calls]
        together = {i: r for i, r in enumerate(ready) if concurrent and isinstance(r, _Ready) and r.tool.is_async}
        with _Batch(together, cancel) as batch:
            for index, one in enumerate(ready):
                if index not in together:
                    yield index, _run(one, cancel)
                    yield from batch.finished()
            yield from batch.rest()

    def _ready(self, call: ToolCall) -> _Ready | Result:
        found = self._tools.get(call.name)
        if found is None:
            names = ", ".join([*self._tools, *self._others]) or "none"
            return Result(f"There is no tool {short(call.name)}. The tools are: {names}.", failed=True)
        try:
            return _Ready(found, fit(call.arguments, found.parameters))
        except ArgumentError as error:
            return Result(
                characters(f"{found.name} was not run: {error}. {usage(found.name, found.parameters)}"), failed=True
            )


def _run(one: _Ready | Result, cancel: threading.Event) -> Result:
    """One call in order with the others."""
    if isinstance(one, Result):
        return one
    if one.tool.is_async:
        with _Batch({0: one}, cancel) as batch:
            return next(batch.rest())[1]
    if cancel.is_set():
        return CANCELLED
    try:
        return _result(one.tool.name, one.start(cancel))
    except Exception as error:
        return _failure(one.tool.name, error)


class _Batch:
    """Async calls that run together, in an event loop on a thread of their own. Leaving it stops what still runs."""

    def __init__(self, calls: dict[int, _Ready], cancel: threading.Event) -> None:
        self._cancel, self._left = cancel, threading.Event()
        self._waiting = set(calls)
        self._results: queue.SimpleQueue[tuple[int, Result | BaseException]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if calls:
            context = contextvars.copy_context()
            # daemon: a tool that blocks its loop must not keep the program from ending
            self._thread = threading.Thread(target=context.run, args=(self._serve, calls), daemon=True)
            self._thread.start()

    def __enter__(self) -> _Batch:
        return self

    def __exit__(self, *args: object) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(GRACE)

    def finished(self) -> Iterator[tuple[int, Result]]:
        """What has finished by now."""
        while not self._results.empty():
            yield from self._take(0)

    def rest(self) -> Iterator[tuple[int, Result]]:
        """The others, as they finish; soon after a cancel all of them."""
        end = math.inf
        while self._waiting:
            yield from self._take(POLL)
            if self._cancel.is_set():
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() >= end:
                self._thread = None  # left behind
                yield from ((index, CANCELLED) for index in sorted(self._waiting))
                return

    def _take(self, seconds: float) -> Iterator[tuple[int, Result]]:
        try:
            index, outcome = self._results.get(timeout=seconds)
        except queue.Empty:
            return
        if index in self._waiting:
            self._waiting.remove(index)
            if isinstance(outcome, BaseException):
                raise outcome
            yield index, outcome

    def _serve(self, calls: dict[int, _Ready]) -> None:
        try:
            asyncio.run(self._gather(calls))
        except Exception as error:  # no loop could be made
            for index, one in calls.items():
                self._results.put((index, _failure(one.tool.name, error)))

    async def _gather(self, calls: dict[int, _Ready]) -> None:
        index_of = {asyncio.create_task(self._one(one)): index for index, one in calls.items()}
        running, stopped = set(index_of), False
        while running:
            if not stopped and (self._cancel.is_set() or self._left.is_set()):
                stopped = True  # once: a second cancel would cut a tool's clean-up
                for task in running:
                    task.cancel()
            done, running = await asyncio.wait(running, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # one that is cancelled before its first step has no result
                self._results.put((index_of[task], CANCELLED if task.cancelled() else task.result()))

    async def _one(self, one: _Ready) -> Result | BaseException:
        name = one.tool.name
        try:
            return _result(name, await one.start(self._cancel))
        except asyncio.CancelledError:
            return CANCELLED if self._cancel.is_set() else Result(f"{name} failed: it cancelled itself", failed=True)
        except Exception as error:
            return _failure(name, error)
        except BaseException as error:  # KeyboardInterrupt: for the thread that reads, not for this one
            return error


def _result(name: str, value: Any) -> Result:
    """What a tool returned, as text."""
    if isinstance(value, Result):
        return Result(characters(value.text), value.failed)
    if value is None:
        return Result("done")
    if isinstance(value, str):
        return Result(characters(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Result(
            f"{name} failed: it returned {len(value)} bytes; a tool returns text or JSON values.", failed=True
        )
    try:
        return Result(characters(json.dumps(value, ensure_ascii=False, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        return Result(f"{name} failed: what it returned is neither text nor JSON ({error}).", failed=True)


def _failure(name: str, error: Exception) -> Result:
    """An exception as text: those of ds4 are sentences, of others the class says half."""
    if isinstance(error, Cancelled):
        return CANCELLED
    try:
        message = str(error) if isinstance(error, Ds4Error) else f"{type(error).__name__}: {error}"
    except Exception:  # a __str__ that raises
        message = type(error).__name__
    return Result(characters(f"{name} failed: {message}"), failed=True)


def visible(text: str) -> str:
    """On one line, and nothing hidden: text that turns the reading direction could show another command than runs."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
