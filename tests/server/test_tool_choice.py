"""The request's side of tools: what goes to the template, and the schema that forced calls must have."""
from __future__ import annotations

import jsonschema
import pytest
from recorded_outputs import TOOLS

from ridgeline.errors import InvalidParams
from ridgeline.server.parsers import tool_choice


def test_kinds() -> None:
    assert tool_choice(None).kind == "none"
    assert tool_choice([]).kind == "none"
    assert tool_choice([], "auto").kind == "none"
    auto = tool_choice(TOOLS)
    assert (auto.kind, auto.template_tools, auto.schema) == ("auto", TOOLS, None)
    none = tool_choice(TOOLS, "none")
    assert (none.kind, none.template_tools, none.schema) == ("none", None, None)
    named = tool_choice(TOOLS, {"type": "function", "function": {"name": "write_file"}})
    assert (named.kind, named.name, named.template_tools) == ("named", "write_file", TOOLS)
    assert named.schema == TOOLS[1]["function"]["parameters"]
    assert tool_choice(TOOLS, {"type": "function", "function": {"name": "now"}}).schema == {"type": "object"}


def test_the_schema_of_required_calls() -> None:
    schema = tool_choice(TOOLS, "required").schema
    assert schema is not None
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    weather = {"name": "get_weather", "parameters": {"city": "Paris", "options": {"unit": "C"}}}
    assert check.is_valid([weather])
    assert check.is_valid([weather, {"name": "now", "parameters": {}}])
    assert not check.is_valid([])
    assert not check.is_valid([{"name": "other", "parameters": {}}])
    assert not check.is_valid([{"name": "get_weather", "parameters": {"city": 3}}])
    assert not check.is_valid([{"name": "get_weather", "parameters": {"city": "x", "options": {"unit": "K"}}}])


@pytest.mark.parametrize(("tools", "choice", "message"), [
    (TOOLS, "always", "tool_choice: got 'always'; allowed: none, auto, required"),
    (None, "required", "without tools"),
    (TOOLS, {"type": "function", "function": {"name": "f"}}, "got the function 'f'; allowed: the tools, get_weather,"
     " write_file"),
    (TOOLS, {"type": "function"}, "tool_choice: got"),
    ("tools", None, "tools: got str"),
    ([{"type": "browser"}], None, r"tools\[0\]: got 'browser'"),
    ([{"type": "function", "function": {"name": "a b"}}], None, r"tools\[0\].function.name: got 'a b'"),
    ([TOOLS[0], TOOLS[0]], None, "twice"),
    ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "parameters: got list"),
])
def test_wrong_requests_are_refused(tools, choice, message) -> None:
    with pytest.raises(InvalidParams, match=message):
        tool_choice(tools, choice)
