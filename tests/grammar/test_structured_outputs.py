"""What a request may ask of the form of its output, checked before anything runs."""
from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from schemas import SCHEMAS

from ridgeline import SamplingParams
from ridgeline.errors import InvalidParams
from ridgeline.structured_outputs import StructuredOutputsParams, check_schema


def test_every_form() -> None:
    assert StructuredOutputsParams(json='{"type": "object"}').json == {"type": "object"}
    assert StructuredOutputsParams(json_object=True, json=None).json_object
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    params = SamplingParams(structured_outputs={"regex": "a+", "whitespace_pattern": None})
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    assert replace(params, temperature=0.0).structured_outputs == params.structured_outputs
    for schema in SCHEMAS:
        assert StructuredOutputsParams(json=json.dumps(schema)).key == StructuredOutputsParams(json=schema).key


def test_the_order_of_properties_tells_forms_apart() -> None:
    one = StructuredOutputsParams(json={"properties": {"a": True, "b": True}})
    other = StructuredOutputsParams(json={"properties": {"b": True, "a": True}})
    assert one.key != other.key


@pytest.mark.parametrize(("value", "words"), [
    ({}, "got none; allowed: exactly one of json, json_object, regex, choice, grammar"),
    ({"json_object": False}, "got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"regx": "a"}, "unknown field 'regx'; allowed: json, json_object"),
    ("a", "got 'a'; allowed: an object"),
    ({"regex": ""}, "structured_outputs.regex: got ''"),
    ({"regex": "a\ud800"}, "structured_outputs.regex: not valid Unicode: lone surrogate U+D800"),
    ({"choice": ["\udfff"]}, "structured_outputs.choice: not valid Unicode"),
    ({"json": {"const": "\ud800"}}, "structured_outputs.json: not valid Unicode"),
    ({"regex": 3}, "structured_outputs.regex: got 3"),
    ({"choice": []}, "structured_outputs.choice: got []"),
    ({"choice": "ab"}, "structured_outputs.choice: got 'ab'"),
    ({"choice": ["a", ""]}, "none empty"),
    ({"json_object": "yes"}, "structured_outputs.json_object: got 'yes'"),
    ({"json": "{"}, "structured_outputs.json: not valid JSON"),
    ({"json": [1]}, "got [1]; allowed: a schema"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "allowed: one of them"),
])
def test_wrong_forms_are_refused(value: Any, words: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(structured_outputs=value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' at the top is not supported"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "keyword 'not' at /properties/a/items is not supported"),
    ({"anyOf": [{}, {"if": {}}]}, "keyword 'if' at /anyOf/1"),
    ({"$defs": {"d": {"contains": {}}}}, "keyword 'contains' at /$defs/d"),
    ({"type": "object", "propertees": {}}, "keyword 'propertees' at the top is not supported; supported: $defs, $ref"),
    ({"x-guidance": {"lenient": True}}, "keyword 'x-guidance'"),
    ({"properties": []}, "at /properties: got []"),
    ({"anyOf": {}}, "at /anyOf: got {}"),
    ({"items": [{}]}, "at /items: got [{}]; allowed: a schema"),
    ({"exclusiveMinimum": True}, "at /exclusiveMinimum: got True"),
    ({"default": {1, 2}}, "not JSON"),
])
def test_keywords_that_are_not_enforced_are_named_with_their_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        check_schema(schema)
    assert words in str(caught.value)


def test_annotations_and_names_of_properties_are_no_keywords() -> None:
    check_schema({"title": "t", "x-order": 1, "properties": {"not": {"const": {"if": 1}},
     "uniqueItems": {"default": {"not": 1}}}})


def test_a_schema_nested_without_end() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(InvalidParams, match="nested deeper than 128"):
        check_schema(schema)
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidParams):
        check_schema(schema)
