"""Compiled grammars: what they allow, what is refused, the cache."""
from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from schemas import PERSON

from ridgeline import LLM
from ridgeline.errors import InvalidParams
from ridgeline.grammar import Matcher
from ridgeline.grammar.compiler import GrammarCompiler
from ridgeline.structured_outputs import StructuredOutputsParams


def compiled(llm: LLM, **form: Any) -> Matcher:
    return llm.frontend.compiler.compile(StructuredOutputsParams(**form)).matcher()


def ids(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text, add_special_tokens=False)


def allowed(matcher: Matcher, output: Sequence[int], vocab: int) -> set[int] | None:
    mask = matcher.mask(output)
    return None if mask is None else set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab,
     bitorder="little")).tolist())


def accepts(llm: LLM, matcher: Matcher, text: str) -> bool:
    """Whether the grammar may end behind the text."""
    mask = allowed(matcher, ids(llm, text), llm.engine.vocab_size)
    return mask is not None and llm.engine.eos_token_ids[0] in mask


@pytest.mark.parametrize(("form", "good", "bad"), [
    ({"regex": "[ab]{2,3}|\u6d77"}, ["ab", "aab", "\u6d77"], ["a", "abab", "c", ""]),
    ({"choice": ["yes", "no way", 'quo"te\\\n', "\U0001f642", "yes sir"]},
     ["yes", "no way", 'quo"te\\\n', "\U0001f642", "yes sir"], ["y", "no", "yess", ""]),
    ({"grammar": 'start: "x" y\ny: "1" | "(" y ")"'}, ["x1", "x((1))"], ["x", "x(1", "x1)"]),
    ({"grammar": 'root ::= "x" item+\nitem ::= [0-9] ","'}, ["x1,", "x1,2,"], ["x", "x1"]),
    ({"json_object": True}, ["{}", '{"a": [1, "\\n"]}', '{ "a" : { } }'], ["[]", "{", "1", '{"a": }']),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 12}}, ["3", "12"], ["2", "13", "1.5", "-3"]),
    ({"json": True}, ["[1, null]", '"x"'], ["x", "["]),
    ({"regex": "a+", "after": "</think>"}, ["hm</think>\n\na", "</think>aaa", "a < b </think>a"], ["aaa", "hm</think>b",
     "</think>"]),
    ({"json_object": True, "after": "<assistant>"}, ["hm<assistant>{}"], ["{}", "<user>{}", "hm<assistant>x"]),
])
def test_a_form_allows_its_texts_and_no_others(llm: LLM, form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    matcher = compiled(llm, **form)
    for text in [*good, *bad, *good]:                     # in one matcher, which goes back and forth
        assert accepts(llm, matcher, text) == (text in good), text


def test_white_space_is_bounded(llm: LLM) -> None:
    matcher = compiled(llm, json={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
     "additionalProperties": False})
    assert accepts(llm, matcher, '{' + "\n" + 16 * " " + '"a" : 1 }')
    for space in ("\n" + 17 * " ", 5 * " ", "\n\n"):
        assert not accepts(llm, matcher, "{" + space + '"a":1}')
    compact = compiled(llm, json_object=True, disable_any_whitespace=True)
    assert accepts(llm, compact, '{"a":1}') and not accepts(llm, compact, '{"a": 1}')
    own = compiled(llm, json_object=True, whitespace_pattern="[ ]{1,2}")
    assert accepts(llm, own, '{"a":  1}') and not accepts(llm, own, '{"a":\n1}')


def test_the_end_is_allowed_only_where_the_grammar_may_end(llm: LLM) -> None:
    matcher, vocab, eos = compiled(llm, regex="ab?"), llm.engine.vocab_size, llm.engine.eos_token_ids[0]
    a, b = ids(llm, "a"), ids(llm, "b")
    assert allowed(matcher, [], vocab) == set(a)
    assert allowed(matcher, a, vocab) == {*b, eos}
    assert allowed(matcher, [*a, *b], vocab) == {eos}
    assert allowed(matcher, [*a, eos], vocab) == {eos}
    assert allowed(matcher, b, vocab) is None
    assert allowed(matcher, a, vocab) == {*b, eos}
    for output in ([], a, [*a, *b]):
        mask = allowed(matcher, output, vocab)
        assert mask == {token for token in range(vocab) if matcher.allows(output, token)}
    assert matcher.allows(b, a[0])                            # the grammar does not lead there


def test_asking_for_one_token_agrees_with_the_mask(llm: LLM) -> None:
    vocab = llm.engine.vocab_size
    for form, text in (({"json": PERSON}, '{"name": "海", "age": 12, "tags": ["a"]}'), ({"json_object": True},
     '{"a": {"b": [1e5]}}'),
                       ({"regex": "a+", "after": "</think>"}, "hm</think>\n\naa")):
        matcher, tokens = compiled(llm, **form), ids(llm, text)
        for end in range(len(tokens) + 1):
            mask = allowed(matcher, tokens[:end], vocab)
            assert mask == {token for token in range(vocab) if matcher.allows(tokens[:end], token)}


def test_what_the_library_refuses_is_told(llm: LLM) -> None:
    for form, words in (({"regex": "a{2"}, "structured_outputs.regex: .*unclosed counted repetition"),
                        ({"grammar": "start: x"}, 'structured_outputs.grammar: .*unknown name: "x"'),
                        ({"grammar": "item ::= [0-9]"}, "not valid GBNF: .*root"),
                        ({"json": {"type": "string", "format": "nope"}}, "structured_outputs.json: Unknown format: nope"),
                        ({"json": {"type": "strin"}}, "Invalid type: strin"),
                        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
                        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
                        ({"json": {"$ref": "http://x/y"}}, "http://x/y"),
                        ({"json": False}, "Unsatisfiable"),
                        ({"json": {"minItems": 2, "maxItems": 1, "type": "array"}}, "minItems")):
        for _ in range(2):                                # the second time from the cache
            with pytest.raises(InvalidParams, match=words):
                compiled(llm, **form)


def test_a_grammar_is_compiled_once_whoever_asks(llm: LLM) -> None:
    assert llm.tokenizer is not None
    compiler = GrammarCompiler(llm.tokenizer, llm.engine.vocab_size, llm.engine.eos_token_ids)
    form = StructuredOutputsParams(regex="once")
    assert not compiler.cached(form)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(form))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(grammar is found[0] for grammar in found)
    assert compiler.cached(form)


def test_a_model_without_an_end_token_has_no_grammars(llm: LLM) -> None:
    assert llm.tokenizer is not None
    compiler = GrammarCompiler(llm.tokenizer, llm.engine.vocab_size, ())
    with pytest.raises(InvalidParams, match="no end-of-sequence token"):
        compiler.compile(StructuredOutputsParams(regex="a"))
