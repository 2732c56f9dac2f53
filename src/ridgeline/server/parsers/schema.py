"""Values of arguments that were not written as JSON, turned into JSON by the types that a tool's schema declares."""
from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_DEPTH = 8      # of references followed


def argument_types(function: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """JSON types that a function declares for an argument; none where it declares nothing."""
    parameters = (function or {}).get("parameters")
    if not isinstance(parameters, Mapping):
        return frozenset()
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters, _DEPTH))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {str(item) for item in stated}
    found: set[str] = set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            found |= _types(member, root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found | {_NAMES[type(value)] for value in (values if isinstance(values, list) else []) if type(value) in _NAMES}


def text_to_json(text: str, types: frozenset[str]) -> str:
    """JSON of an argument written as plain text. Text that is none of the declared types stays a string."""
    if types <= {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    try:
        value = json.loads(bare)
        read = True
    except ValueError:
        read, value = literal(bare)
    kind = _NAMES.get(type(value)) if read else None
    if kind is not None and (kind in types or (kind == "integer" and "number" in types)):
        return dumps(value)
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if bare.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    return json.dumps(text, ensure_ascii=False)


def literal_to_json(source: str, types: frozenset[str]) -> str | None:
    """JSON of a Python (or JSON) literal; None for what is neither. Numbers stand for strings, and strings for numbers,
    where the schema asks for that."""
    read, value = literal(source)
    if not read:
        try:
            value = json.loads(source)
        except ValueError:
            return None
    try:
        text = dumps(value)
    except (TypeError, ValueError, RecursionError):     # a set, a complex number, an infinite one
        return None
    kind = _NAMES.get(type(value))
    if types and kind not in types:
        if types <= {"string"} and kind in ("integer", "number"):
            return json.dumps(source.strip())
        if kind == "string" and types & {"integer", "number", "boolean"}:
            return text_to_json(value, types)
    return text


def literal(source: str) -> tuple[bool, Any]:
    """(whether it is a Python literal, its value)."""
    try:
        return True, ast.literal_eval(source.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None


def dumps(value: Any) -> str:
    """JSON that keeps every character readable. raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
