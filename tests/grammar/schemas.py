"""JSON schemas whose strings and arrays are bounded, so that even a random model comes to an end."""
from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 6}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                   "tags": {"type": "array", "items": {"enum": ["a", "b", "\u6d77"]}, "maxItems": 3}},
    "required": ["name", "age", "tags"], "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"const": {"x": [1, "\u00e9\"\\"]}}]},
    {"type": "object", "properties": {"at": {"$ref": "#/$defs/point"}, "kind": {"type": ["string", "null"], "maxLength": 2}},
     "required": ["at", "kind"], "additionalProperties": False,
     "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9},
                                                          "y": {"type": "integer", "multipleOf": 5, "minimum": 0,
                                                           "maximum": 50}},
                         "required": ["x", "y"], "additionalProperties": False}}},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"},
                                      "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}},
     "required": ["day", "code"], "additionalProperties": False, "description": "a date and a code"},
    {"type": "array", "prefixItems": [WORD, {"type": "integer", "exclusiveMinimum": 2, "maximum": 4}], "items": False,
     "minItems": 2},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
               {"properties": {"a": {"maximum": 5}}}], "maxProperties": 1},
]
