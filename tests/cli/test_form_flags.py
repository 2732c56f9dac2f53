"""Flags of `generate` and `chat` that ask for the form of the output."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 20]}},
    "required": ["name", "age"], "additionalProperties": False}
SHORT = ("--threads", 1, "--temperature", 0, "--max-tokens", 60)


@pytest.mark.parametrize("flag", ["--json-schema", "-j", "-jf", "--json-schema-file"])
@pytest.mark.parametrize("as_file", [True, False], ids=["file", "text"])
def test_a_json_schema(run: Any, folder: Path, tmp_path: Path, flag: str, as_file: bool) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    ran = run("generate", folder, "-p", "The sea", *SHORT, flag, path if as_file else f" {json.dumps(SCHEMA)}")
    assert ran.code == 0, ran.err
    jsonschema.validate(json.loads(ran.out), SCHEMA)


@pytest.mark.parametrize(("flags", "outputs"), [
    (("--regex", "ab?c{2}"), ("abcc\n", "acc\n")), (("--choice", "calm", "low: 1"), ("calm\n", "low: 1\n")),
    (("--grammar", 'start: "sea" "!"~2'), ("sea!!\n",)), (("--grammar", 'root ::= "a" "b"'), ("ab\n",)),
])
def test_the_other_forms(run: Any, folder: Path, flags: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    for more in ((), ("--stream",)):
        ran = run("generate", folder, "-p", "The sea", *SHORT, *flags, *more)
        assert ran.code == 0 and ran.out in outputs, ran.err


def test_a_grammar_file_and_chat(run: Any, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "g.lark"
    path.write_text('start: "calm" | "low"\n')
    ran = run("chat", folder, *SHORT, "--grammar-file", path, stdin=b"The sea?\n")
    assert ran.code == 0 and ran.out.strip() in ("calm", "low"), ran.err


@pytest.mark.parametrize(("flags", "words"), [
    (("--regex", "a", "--choice", "b"), "got regex and choice; allowed: exactly one of"),
    (("--json-schema", "no/such.json"), "JSON schema file 'no/such.json' cannot be read"),
    (("--json-schema", "{"), "structured_outputs.json: not valid JSON"),
    (("--json-schema", '{"not": {}}'), "keyword 'not' at the top is not supported"),
    (("--grammar", "no/such.lark"), "grammar file 'no/such.lark' cannot be read"),
    (("--grammar", "start: x"), "structured_outputs.grammar:"),
])
def test_mistakes(run: Any, folder: Path, flags: tuple[str, ...], words: str) -> None:
    ran = run("generate", folder, "-p", "The sea", *SHORT, *flags)
    assert ran.code == 2 and words in ran.err and ran.err.count("\n") == 1, ran.err
