"""Stop strings are found wherever the text is cut."""
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import InvalidParams
from ridgeline.text.stop import StopChecker
from ridgeline.text.tokenizer import Tokenizer

ALPHABET = st.text("ab\n#", max_size=30)
STOPS = st.lists(st.text("ab\n#", min_size=1, max_size=5), min_size=1, max_size=3)


def run(stop: list[str], include: bool, pieces: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    shown, found = "", None
    for piece in pieces:
        text, found = checker.push(piece)
        shown += text
    return shown + checker.flush(), found


def oracle(stop: list[str], include: bool, text: str) -> tuple[str, str | None]:
    """Read character by character; at each, ask whether the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [item for item in stop if text[:end].endswith(item)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=ALPHABET, stop=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_result_does_not_depend_on_the_cuts(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert run(stop, include, pieces) == oracle(stop, include, text)
    assert run(stop, include, list(text)) == oracle(stop, include, text)


@given(text=ALPHABET, stop=STOPS)
def test_text_is_shown_as_soon_as_it_cannot_be_a_stop_string(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    shown = ""
    for end, character in enumerate(text, 1):
        new, found = checker.push(character)
        shown += new
        if found is not None:
            return
        held = text[len(shown):end]
        assert held == "" or any(item.startswith(held) for item in stop)


def test_a_stop_string_over_several_pieces() -> None:
    checker = StopChecker(["</answer>"])
    assert checker.push("42 </an") == ("42 ", None)
    assert checker.push("swer> more") == ("", "</answer>")
    assert checker.push("still more") == ("", "</answer>")
    assert checker.flush() == ""


def test_a_false_beginning_is_released() -> None:
    checker = StopChecker(["###"])
    assert checker.push("a##") == ("a", None)
    assert checker.push("b#") == ("##b", None)
    assert checker.flush() == "#"


@pytest.mark.parametrize("include, expected", [(False, "x"), (True, "xSTOP")])
def test_include(include: bool, expected: str) -> None:
    assert StopChecker(["STOP"], include).push("xSTOPy") == (expected, "STOP")


def test_without_stop_strings_everything_passes() -> None:
    assert StopChecker([]).push("text") == ("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParams, match="at least one character"):
        StopChecker(["ok", ""])


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_stop_strings_across_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("The river 😀 bends twice.\nUser: hello", add_special_tokens=False)
    stop = "\nUser:"
    assert all(stop not in tokenizer.token_text(index) for index in ids)
    decoder, checker = tokenizer.decoder(), StopChecker([stop])
    shown = ""
    for index in ids:
        text, found = checker.push(decoder.push([index]))
        shown += text
        if found:
            break
    assert (shown, found) == ("The river 😀 bends twice.", stop)
