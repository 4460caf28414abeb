"""Tools from plain callables: their schemas, what arguments they take, and how the calls of a message run."""

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from ds4.agent import tools
from ds4.agent.tools import CANCELLED, Result, Tool, Toolbox, tool
from ds4.chat_formats.base import ToolCall
from ds4.errors import ArgumentError, Cancelled


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


def call(function: Callable[..., Any] | Tool, **arguments: Any) -> Result:
    box = Toolbox([function])
    return box.call(ToolCall(box.schemas[0]["name"], arguments))


# -- schemas


def test_a_schema_follows_from_the_signature() -> None:
    @tool
    def weather(
        city: str,
        days: Annotated[int, "1 to 10"] = 3,
        unit: Unit = Unit.CELSIUS,
        detail: Literal["low", "high"] = "low",
        scale: float = 1.0,
        exact: bool = False,
        tags: list[str] | None = None,
        extra: dict[str, int] | None = None,
        anything: dict = {},  # noqa: B006
        *,
        note: str | None,
    ) -> str:
        """The weather of a city,
        for some days.

        More on it that the model need not read.

        Args:
            city (str): its English name
            days: not this, for Annotated says it
        """
        return ""

    assert weather.schema == {
        "name": "weather",
        "description": "The weather of a city, for some days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its English name"},
                "days": {"type": "integer", "description": "1 to 10", "default": 3},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "detail": {"type": "string", "enum": ["low", "high"], "default": "low"},
                "scale": {"type": "number", "default": 1.0},
                "exact": {"type": "boolean", "default": False},
                "tags": {"type": "array", "items": {"type": "string"}},
                "extra": {"type": "object", "additionalProperties": {"type": "integer"}},
                "anything": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["city", "note"],
        },
    }
    assert not weather.is_async and not weather.needs_permission


def test_options_win_over_what_the_callable_says() -> None:
    @tool(name="other", description="It does.", needs_permission=True)
    async def f(x: int) -> None:
        """Not this."""

    assert (f.name, f.description, f.needs_permission, f.is_async) == ("other", "It does.", True, True)


def test_methods_partials_and_callable_objects_are_tools() -> None:
    class Counter:
        """Counts."""

        def add(self, n: int) -> int:
            return n + 1

        async def __call__(self, n: int) -> int:
            return n + 2

    assert call(Counter().add, n=1) == Result("2")
    assert tool(Counter()).name == "Counter" and tool(Counter()).is_async
    assert call(Counter(), n=1) == Result("3")
    assert call(tool(functools.partial(Counter().add), name="p"), n=4) == Result("5")


def bad_star(*args: int) -> None: ...
def bad_keywords(**options: int) -> None: ...
def bad_positional(x: int, /) -> None: ...
def bad_bare(x) -> None: ...  # type: ignore[no-untyped-def]
def bad_type(x: complex) -> None: ...
def bad_union(x: int | str) -> None: ...
def bad_inner(x: list[bytes]) -> None: ...
def bad_keys(x: dict[int, str]) -> None: ...
def bad_annotated(x: Annotated[int, 5]) -> None: ...
def bad_choices(x: Literal[b"a"]) -> None: ...
def bad_name_of_type(x: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    "function", [value for name, value in list(globals().items()) if name.startswith("bad_")], ids=lambda f: f.__name__
)
def test_other_signatures_are_refused_unless_a_schema_is_given(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{function.__name__}.*give parameters="):
        tool(function)
    if function not in (bad_star, bad_positional):
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        assert tool(function, parameters=schema).parameters is schema


@pytest.mark.parametrize(
    "parameters",
    [
        [],
        {},
        {"type": "object"},
        {"type": "array", "properties": {}},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"x": 5}},
        {"type": "object", "properties": {"x": {"type": "int"}}},
        {"type": "object", "properties": {"x": {"type": [["string"]]}}},
        {"type": "object", "properties": {"x": {"enum": 5}}},
        {"type": "object", "properties": {"x": {"anyOf": []}}},
        {"type": "object", "properties": {"x": {"items": 5}}},
        {"type": "object", "properties": {"x": {}}, "required": ["y"]},
        {"type": "object", "properties": {"x": {}}, "required": "x"},
        {"type": "object", "properties": {"x": {"default": object()}}},
        {"type": "object", "properties": {"y": {}}},  # f has no y
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(parameters: Any) -> None:
    def f(x: int) -> None: ...

    with pytest.raises(ArgumentError):
        tool(f, parameters=parameters)


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 65, "a.b", "a\n"])
def test_names_are_what_models_and_formats_take(name: str) -> None:
    with pytest.raises(ArgumentError, match="give name="):
        tool(lambda: None, name=name)


def test_a_toolbox_keeps_order_and_refuses_duplicates() -> None:
    def b() -> None: ...
    def a() -> None: ...

    box = Toolbox([b, a])
    assert [schema["name"] for schema in box.schemas] == ["b", "a"] and len(box) == 2 and "a" in box
    assert not Toolbox() and Toolbox().schemas == ()
    with pytest.raises(ArgumentError, match="two tools have the name a"):
        Toolbox([a, tool(b, name="a")])


# -- arguments


@pytest.mark.parametrize(
    ("kind", "given", "got"),
    [
        (int, "5", 5),
        (int, " -5 ", -5),
        (int, 5.0, 5),
        (int, "5.0", 5),
        (float, "2.5", 2.5),
        (float, 3, 3),
        (bool, "true", True),
        (bool, "False", False),
        (str, 5, "5"),
        (str, "null", "null"),
        (list[int], ["1", 2.0], [1, 2]),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (Unit, "F", Unit.FAHRENHEIT),
        (list[Unit], ["C"], [Unit.CELSIUS]),
        (dict[str, Unit], {"a": "C"}, {"a": Unit.CELSIUS}),
        (Unit | None, None, None),
        (Unit | None, "C", Unit.CELSIUS),
        (int | None, "7", 7),
        (Literal[1, 2], "2", 2),
        (Literal["a", 1], 1, 1),
    ],
)
def test_harmless_conversions(kind: Any, given: Any, got: Any) -> None:
    seen: list[Any] = []

    def f(x) -> None:  # type: ignore[no-untyped-def]
        seen.append(x)

    f.__annotations__["x"] = kind
    assert call(f, x=given) == Result("done")
    assert seen == [got] and type(seen[0]) is type(got)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (int, "five", 'x must be an integer, not "five"'),
        (int, 5.5, "x must be an integer, not 5.5"),
        (int, True, "x must be an integer, not true"),
        (int, "9" * 5000, "x must be an integer"),
        (int, None, "x must be an integer, not null"),
        (float, float("inf"), "x must be a number"),
        (float, "NaN", "x must be a number"),
        (bool, 1, "x must be a boolean, not 1"),
        (bool, "yes", "x must be a boolean"),
        (str, ["a"], "x must be a string"),
        (str, False, "x must be a string, not false"),
        (list[int], [1, "b"], 'x[1] must be an integer, not "b"'),
        (list[int], 5, "x must be an array"),
        (dict[str, int], {"a": []}, "x.a must be an integer"),
        (Unit, "K", 'x must be one of "C", "F", not "K"'),
        (Literal[1, 2], True, "x must be an integer"),
        (int | None, "b", "x must be"),
        (str, {"long": "y" * 1000}, "..."),
    ],
)
def test_wrong_arguments_give_a_result_that_says_what_would_work(kind: Any, given: Any, says: str) -> None:
    def f(x) -> None:  # type: ignore[no-untyped-def]
        raise AssertionError("was run")

    f.__annotations__["x"] = kind
    result = call(f, x=given)
    assert result.failed and says in result.text and "f takes x (" in result.text
    assert len(result.text) < 300


def test_all_that_is_wrong_is_said_at_once() -> None:
    def f(a: int, b: str, c: int = 0) -> None: ...

    text = call(f, a="x", c={}, d=1).text
    for part in ("b is missing", "a must be", "c must be", "no parameter d", "c (integer, optional)"):
        assert part in text
    assert "There is no tool" in Toolbox([f]).call(ToolCall("g")).text
    assert "The tools are: f." in Toolbox([f]).call(ToolCall("g")).text


def test_null_leaves_an_optional_parameter_out() -> None:
    def f(a: int = 5, b: str | None = None) -> str:
        return f"{a} {b}"

    assert call(f, a=None, b=None) == Result("5 None")


def test_given_schemas_are_followed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "where": {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"]},
            "what": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
            "any": {"minimum": 5},
        },
        "additionalProperties": {"type": "boolean"},
    }

    @tool(parameters=schema)
    def f(**arguments: Any) -> dict[str, Any]:
        return arguments

    assert json.loads(call(f, where={"line": "3"}, what=["a"], any=1, other="true").text) == {
        "where": {"line": 3},
        "what": ["a"],
        "any": 1,
        "other": True,
    }
    text = call(f, where={"lin": 3}, what="x", other=5).text
    for part in ("where.line is missing", "no parameter where.lin", "what must be", "other must be a boolean"):
        assert part in text


# -- results


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as\nis ", "as\nis "),
        (None, "done"),
        (5, "5"),
        ({"a": ["é", True, None]}, '{"a": ["é", true, null]}'),
        ("lone \ud800 one", "lone \ufffd one"),
        (["\ud83d\ude00"], '["\U0001f600"]'),
        (Result("own \udfff", failed=True), "own \ufffd"),
    ],
)
def test_return_values_become_text(value: Any, text: str) -> None:
    assert call(tool(lambda: value, name="f")).text == text


@pytest.mark.parametrize("value", [b"bytes", bytearray(5), object(), float("nan"), {1: {2}}, lambda: 0])
def test_what_is_no_text_is_a_failure(value: Any) -> None:
    result = call(tool(lambda: value, name="f"))
    assert result.failed and result.text.startswith("f failed: ")


class Nasty(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such city"), "f failed: ValueError: no such city"),
        (ArgumentError("a sentence."), "f failed: a sentence."),
        (KeyError("k"), "f failed: KeyError: 'k'"),
        (Nasty(), "f failed: Nasty"),
        (MemoryError(), "f failed: MemoryError: "),
        (Cancelled("x"), CANCELLED.text),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_is_a_result(error: Exception, text: str, is_async: bool) -> None:
    def f() -> None:
        raise error

    async def g() -> None:
        await asyncio.sleep(0)
        raise error

    assert call(tool(g if is_async else f, name="f")) == Result(text, failed=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_keyboard_interrupt_passes(is_async: bool) -> None:
    def f() -> None:
        raise KeyboardInterrupt

    async def g() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(g if is_async else f)


# -- the calls of one message


def test_async_calls_run_together_and_sync_ones_in_order() -> None:
    order: list[str] = []
    met = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None
    main = threading.current_thread()

    async def a(n: int) -> int:
        assert threading.current_thread() is not main
        if met is not None:
            await met.wait()  # returns only when all three are here at once
        return n

    def s(n: int) -> int:
        assert threading.current_thread() is main
        order.append(f"s{n}")
        return n

    calls = [ToolCall(name, {"n": i}) for i, name in enumerate("asasxa")]
    results = dict(Toolbox([a, s]).call_all(calls))
    assert {i: r.text for i, r in results.items() if i != 4} == {i: str(i) for i in (0, 1, 2, 3, 5)}
    assert results[4].failed and order == ["s1", "s3"]


def test_one_after_the_other_on_request() -> None:
    running: list[int] = []

    async def a(n: int) -> None:
        running.append(n)
        await asyncio.sleep(0.01)
        assert running.pop() == n and not running

    box = Toolbox([a])
    calls = [ToolCall("a", {"n": i}) for i in range(3)]
    assert list(box.call_all(calls, concurrent=False)) == [(i, Result("done")) for i in range(3)]


def test_it_works_inside_a_running_loop_and_keeps_context_variables() -> None:
    async def a() -> str:
        return "inner"

    async def caller() -> Result:
        return call(a)

    assert asyncio.run(caller()) == Result("inner")


def test_a_finished_result_comes_before_a_cancel_ends_the_others() -> None:
    cancel = threading.Event()
    cleaned: list[str] = []

    async def quick() -> str:
        return "quick"

    async def slow() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.1)  # longer than the cancel is looked for: no second cancel cuts it
            cleaned.append("slow")

    got = []
    for index, result in Toolbox([quick, slow]).call_all([ToolCall("slow"), ToolCall("quick")], cancel):
        got.append((index, result))
        cancel.set()
    assert got == [(1, Result("quick")), (0, CANCELLED)] and cleaned == ["slow"]


def test_after_a_cancel_nothing_begins() -> None:
    cancel = threading.Event()

    def first() -> None:
        cancel.set()

    def never() -> None:
        raise AssertionError

    async def never_either() -> None:
        raise AssertionError

    box = Toolbox([first, never, never_either])
    names = ["first", "never", "never_either"]
    got = dict(box.call_all([ToolCall(name) for name in names], cancel, concurrent=False))
    assert got == {0: Result("done"), 1: CANCELLED, 2: CANCELLED}
    assert dict(box.call_all([ToolCall("never_either"), ToolCall("never")], cancel)) == {0: CANCELLED, 1: CANCELLED}


def test_a_tool_that_blocks_its_loop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "GRACE", 0.1)
    cancel, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        cancel.set()
        release.wait(60)

    try:
        assert Toolbox([blocks]).call(ToolCall("blocks"), cancel) == CANCELLED
    finally:
        release.set()


def test_closing_early_stops_async_calls() -> None:
    begun, stopped = threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()

    running = Toolbox([slow, tool(lambda: None if begun.wait(60) else None, name="f")]).call_all(
        [ToolCall("slow"), ToolCall("f")]
    )
    assert next(running) == (1, Result("done"))
    running.close()  # type: ignore[attr-defined]
    assert stopped.wait(10)


def test_a_tool_may_take_the_cancel_event() -> None:
    cancel = threading.Event()

    @tool
    def waits(n: int, stop: threading.Event) -> str:
        assert stop is cancel and list(waits.parameters["properties"]) == ["n"]
        threading.Timer(0.05, cancel.set).start()
        assert stop.wait(60)
        return "stopped"

    assert Toolbox([waits]).call(ToolCall("waits", {"n": 1}), cancel) == Result("stopped")
    assert "no parameter stop" in call(waits, n=1, stop="x").text


def test_no_thread_is_left() -> None:
    async def a() -> None: ...

    before = threading.active_count()
    for _ in range(5):
        call(a)
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


# -- what the user is shown


def test_permission_is_asked_with_a_whole_line_that_hides_nothing() -> None:
    @tool(needs_permission=True, describe=lambda a: f"rm {a['path']}")
    def remove(path: str) -> None: ...

    box = Toolbox([remove, tool(lambda: None, name="harmless")])
    line = box.permission(ToolCall("remove", {"path": "a\n\x1b[2K\u202eb" + "c" * 5000}))
    assert line == "rm a\\n\\x1b[2K\\u202eb" + "c" * 5000
    assert box.permission(ToolCall("harmless")) is None
    assert box.permission(ToolCall("remove", {"p": 1})) is None  # will not run
    assert box.permission(ToolCall("unknown")) is None
    assert box.describe(ToolCall("harmless")) == "harmless {}"
    assert box.describe(ToolCall("remove", {"p": 1})) == 'remove {"p": 1}'


def test_a_describe_that_fails_falls_back() -> None:
    bad = tool(
        lambda x: None,
        name="f",
        needs_permission=True,
        describe=lambda a: a["nothing"],
        parameters={"type": "object", "properties": {"x": {}}},
    )
    assert Toolbox([bad]).permission(ToolCall("f", {"x": 1})) == 'f {"x": 1}'
