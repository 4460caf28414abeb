"""JSON schemas of tools: made from a callable's signature, and what a model's arguments have to fit."""

from __future__ import annotations

import functools
import inspect
import json
import math
import threading
import types
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ds4.errors import ArgumentError

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_VALUES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


# -- from a callable


def from_signature(
    function: Callable[..., Any], name: str, lines: dict[str, str], given: dict[str, Any] | None
) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """(what to run, the schema of its parameters, the name of the parameter that gets the cancel event or "").

    `lines`: descriptions of parameters; `given`: a schema that is used instead of one from the signature. Raises
    ArgumentError as `tool` says.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # an annotation may be any expression
        if given is not None:
            return function, given, ""
        raise ArgumentError(f"the signature of the tool {name} cannot be read ({error}); give parameters=.") from None
    cancel = next((p.name for p in signature.parameters.values() if p.annotation is threading.Event), "")
    if given is not None:
        check(given, name)
        try:
            signature.bind(**dict.fromkeys([*given["properties"], *[cancel] * bool(cancel)]))
        except TypeError as error:
            raise ArgumentError(f"the callable of the tool {name} does not fit its parameters: {error}.") from None
        return function, given, cancel
    properties: dict[str, Any] = {}
    required: list[str] = []
    members: dict[str, Callable[[Any], Any]] = {}
    for parameter in signature.parameters.values():
        where = f"parameter {parameter.name!r} of the tool {name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ArgumentError(f"{where} cannot be given by name; name each parameter, or give parameters=.")
        if parameter.name == cancel:
            continue
        if parameter.annotation is parameter.empty:
            raise ArgumentError(f"{where} has no type; write `{parameter.name}: str` or such, or give parameters=.")
        schema, member = _schema(parameter.annotation, where, optional=parameter.default is None)
        if parameter.name in lines:
            schema.setdefault("description", lines[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
            if isinstance(default, (str, int, float, bool)):
                schema["default"] = default
        properties[parameter.name] = schema
        if member is not _same:
            members[parameter.name] = member
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    return (_with_members(function, members) if members else function), found, cancel


def _with_members(function: Callable[..., Any], members: dict[str, Callable[[Any], Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        return function(**{name: members.get(name, _same)(value) for name, value in arguments.items()})

    return run


def _same(value: Any) -> Any:
    return value


def _schema(kind: Any, where: str, optional: bool = False) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The schema of a type, and what turns a JSON value of it into Enum members: `_same` where it has none.

    `optional`: null need not be said, for leaving the parameter out is the same.
    """
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and kind in _TYPES:
        return {"type": _TYPES[kind]}, _same
    if origin is Annotated:
        if len(args) != 2 or not isinstance(args[1], str):
            raise ArgumentError(
                f'{where} has an Annotated that is not `Annotated[T, "description"]`; change it, or give parameters=.'
            )
        schema, member = _schema(args[0], where, optional)
        return schema | {"description": args[1]}, member
    if origin is Literal:
        return _enum(list(args), where), _same
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum([one.value for one in kind], where), kind
    if origin in (Union, types.UnionType) and len(args) == 2 and type(None) in args:
        schema, member = _schema(args[0] if args[1] is type(None) else args[1], where)
        schema = schema if optional else {"anyOf": [schema, {"type": "null"}]}
        return schema, member if member is _same else lambda value: None if value is None else member(value)
    if kind is list or origin is list:
        schema, member = _schema(args[0], where) if args else ({}, _same)
        found = {"type": "array"} | ({"items": schema} if schema else {})
        return found, member if member is _same else lambda values: [member(value) for value in values]
    if kind is dict or (origin is dict and args[0] is str):
        schema, member = _schema(args[1], where) if args and args[1] is not Any else ({}, _same)
        found = {"type": "object"} | ({"additionalProperties": schema} if schema else {})
        return found, member if member is _same else lambda values: {key: member(v) for key, v in values.items()}
    raise ArgumentError(
        f"{where} has the type {kind}; tools take str, int, float, bool, list[...], dict[str, ...], Literal, Enum and "
        "`| None` of these. Change it, or give parameters=."
    )


def _enum(values: list[Any], where: str) -> dict[str, Any]:
    kinds = {_TYPES.get(type(value)) for value in values}
    if None in kinds:
        raise ArgumentError(f"{where} has choices that are no text, number or bool; change them, or give parameters=.")
    return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": values}


# -- a schema that was given


def check(parameters: Any, name: str) -> None:
    """Raises ArgumentError unless `parameters` is a schema of an object with properties that `fit` can read."""
    if not isinstance(parameters, dict) or parameters.get("type") != "object" or "properties" not in parameters:
        raise ArgumentError(
            f'the parameters of the tool {name} are a JSON schema {{"type": "object", "properties": {{...}}}}.'
        )
    _check(parameters, f"the schema of the tool {name}")


def _check(schema: Any, where: str) -> None:
    if not isinstance(schema, dict):
        raise ArgumentError(f"{where} is no object.")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    kinds, choices = _kinds(schema), schema.get("anyOf", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _VALUES for kind in kinds):
        raise ArgumentError(f"{where} has the type {schema['type']!r}; types are {', '.join(_VALUES)}.")
    if not isinstance(properties, dict) or not isinstance(choices, list) or ("anyOf" in schema and not choices):
        raise ArgumentError(f'in {where} "properties" is an object and "anyOf" a list of schemas.')
    if not isinstance(required, list) or not all(isinstance(one, str) and one in properties for one in required):
        raise ArgumentError(f'in {where} "required" is a list of names that stand in "properties".')
    if not isinstance(schema.get("enum", []), list):
        raise ArgumentError(f'in {where} "enum" is a list of values.')
    others = schema.get("additionalProperties", True)
    for part, inner in (
        *((f"property {key!r}", value) for key, value in properties.items()),
        *(("anyOf", choice) for choice in choices),
        *([("items", schema["items"])] if "items" in schema else []),
        *([("additionalProperties", others)] if not isinstance(others, bool) else []),
    ):
        _check(inner, f"{part} of {where}")


def _kinds(schema: dict[str, Any]) -> Any:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


# -- arguments


def fit(value: dict[str, Any], schema: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The arguments as the schema wants them, with the conversions that models need: numbers and bools in quotes, 5.0
    for an integer, a number for a text, a list or object as JSON text, null for what is left out.

    Keywords other than type, enum, anyOf, properties, required, additionalProperties and items are hints for the
    model. Raises ArgumentError with all that is wrong.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others = schema.get("additionalProperties", "properties" not in schema)
    found: dict[str, Any] = {}
    faults = [f"{where}{name} is missing" for name in required if name not in value]
    for name, item in value.items():
        if name not in properties and others is False:
            faults.append(f"there is no parameter {where}{name}")
            continue
        inner = properties.get(name, others if isinstance(others, dict) else {})
        try:
            found[name] = _fit(item, inner, f"{where}{name}")
        except ArgumentError as error:
            if item is not None or name in required:
                faults.append(str(error))
    if faults:
        raise ArgumentError("; ".join(faults))
    return found


def _fit(value: Any, schema: dict[str, Any], where: str) -> Any:
    if "anyOf" in schema:
        for choice in schema["anyOf"]:
            try:
                return _fit(value, choice, where)
            except ArgumentError as error:
                wrong = error
        raise wrong
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        value_as = [one for one in (_convert(value, kind) for kind in kinds) if one is not None]
        if not value_as:
            article = "an" if kinds[0][0] in "aio" else "a"
            raise ArgumentError(f"{where} must be {article} {' or '.join(kinds)}, not {short(value)}")
        value = value_as[0]
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        raise ArgumentError(f"{where} must be one of {', '.join(map(short, schema['enum']))}, not {short(value)}")
    if isinstance(value, list) and "items" in schema:
        return [_fit(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    return fit(value, schema, f"{where}.") if isinstance(value, dict) else value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):  # 1e999 is legal in JSON
        return False
    return isinstance(value, _VALUES[kind])


def _convert(value: Any, kind: str) -> Any:
    """The value as one of this kind, None when that would change what it says."""
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and _is(value, "number"):
        return json.dumps(value)
    if not isinstance(value, str) or kind not in ("integer", "number", "boolean", "array", "object"):
        return None
    try:
        read = json.loads(value.strip().lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return None
    if _is(read, kind):
        return read
    return _convert(read, kind) if isinstance(read, float) else None


def short(value: Any) -> str:
    """A value in an error."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def usage(name: str, parameters: dict[str, Any]) -> str:
    """How a tool is called, in one sentence."""
    required = parameters.get("required", [])
    words = [
        f"{key} ({'/'.join(_kinds(schema)) or 'value'}{'' if key in required else ', optional'})"
        for key, schema in parameters["properties"].items()
    ]
    return f"{name} takes {', '.join(words) or 'no parameters'}."
