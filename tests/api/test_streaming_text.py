"""Deltas, final text, ids and log-probabilities tell the same, however the tokens come: alone or several in one step."""
from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.types import CompletionOutput
from tiny_checkpoint import Script

SIZES = ([1], [2], [3], [5], [1, 4, 2, 1], [100])
TEXTS = ("🙂🚀 to the 👩‍🚀 moon", "海は静かで、光は低い。大海", "plain words only", "é🙂 at the end 🚀")


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text, add_special_tokens=False)


def play(llm: LLM, ids: Sequence[int], sizes: Sequence[int], prompt: str | list[int] = "The sea", **options: object,
         ) -> tuple[CompletionOutput, list[str]]:
    """Let the engine commit `ids`; returns the streamed output and its deltas, after a look at the offline one."""
    llm.engine.strategies["script"] = Script(ids, sizes)
    params = SamplingParams(**{"max_tokens": len(ids), **options})     # type: ignore[arg-type]
    deltas = []
    for output in llm.stream(prompt, params, strategy="script"):
        deltas.append(output.outputs[0].delta)
        streamed = output.outputs[0]
    offline = llm.generate(prompt, params, strategy="script")[0].outputs[0]
    assert "".join(deltas) == streamed.text == offline.text
    assert (streamed.token_ids, streamed.finish_reason, streamed.stop_reason) == (
        offline.token_ids, offline.finish_reason, offline.stop_reason)
    metrics = streamed.metrics
    assert metrics is not None and metrics.completion_tokens == len(streamed.token_ids) == len(metrics.token_times)
    return streamed, deltas


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whole_characters_come_out_of_pieces(llm: LLM, text: str, sizes: list[int]) -> None:
    ids = ids_of(llm, text)
    assert len(ids) > 4
    output, deltas = play(llm, ids, sizes)
    assert output.text == text and output.token_ids == ids and output.finish_reason == "length"
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bytes_that_never_become_a_character_are_shown_at_the_end(llm: LLM, sizes: list[int]) -> None:
    ids = ids_of(llm, "ok 🙂")[:-1]
    output, deltas = play(llm, ids, sizes)
    assert output.text == "ok \ufffd" and deltas[-1].endswith("\ufffd")


def test_a_character_that_begins_in_the_prompt_ends_in_the_text(llm: LLM) -> None:
    ids = ids_of(llm, "so 🚀 it is")
    for cut in range(1, len(ids)):
        plain, _ = play(llm, ids[cut:], [1], prompt=ids[:cut], echo=True)
        assert plain.text == "so 🚀 it is"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["光は", "🚀", "sea is", "。大"])
def test_stop_strings_across_tokens_and_commits(llm: LLM, stop: str, include: bool, sizes: list[int]) -> None:
    text = "the sea is 🙂🚀海は静かで、光は低い。大海"
    ids = ids_of(llm, text)
    output, _ = play(llm, ids, sizes, stop=["never", stop], include_stop_str_in_output=include, logprobs=1)
    end = text.index(stop)
    assert output.text == text[:end + len(stop) * include]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    # Ids and log-probabilities end with the token that completed the stop string, however many came with it.
    assert llm.tokenizer is not None
    kept = llm.tokenizer.decode(output.token_ids)
    assert stop in kept and stop not in llm.tokenizer.decode(output.token_ids[:-1])
    assert output.logprobs is not None and [p.token_id for p in output.logprobs] == output.token_ids
    assert b"".join(p.bytes for p in output.logprobs).decode("utf-8", "replace") == kept


def test_random_stops_and_commits_against_a_plain_search(llm: LLM) -> None:
    """The first end of any stop string counts; of several that end there, the longest."""
    draw = random.Random(0)
    for _ in range(60):
        text = "".join(draw.choices("ab 海🙂é", k=draw.randint(1, 24)))
        stops = ["".join(draw.choices("ab 海🙂é", k=draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
        sizes, include = [draw.randint(1, 6) for _ in range(4)], draw.random() < 0.5
        output, _ = play(llm, ids_of(llm, text), sizes, stop=stops, include_stop_str_in_output=include)
        expected, found = text, None
        for end in range(1, len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                found = max(complete, key=len)
                expected = text[:end if include else end - len(found)]
                break
        assert (output.text, output.stop_reason) == (expected, found), (text, stops, sizes)


def test_the_beginning_of_a_stop_string_that_does_not_come_is_shown(llm: LLM) -> None:
    output, deltas = play(llm, ids_of(llm, "the sea and the se"), [1], stop="sea is")
    assert output.text == "the sea and the se" and output.finish_reason == "length"
    assert deltas[-1] == "se" or deltas[-1].endswith("se")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_stop_string_counts_only_behind_min_tokens(llm: LLM, sizes: list[int]) -> None:
    ids = ids_of(llm, "a sea, a sea, a sea")
    second = len(ids_of(llm, "a sea, a"))
    output, _ = play(llm, ids, sizes, stop="sea", min_tokens=second)
    assert output.text == "a sea, a "


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_tokens_that_end_the_text(llm: LLM, sizes: list[int], include: bool) -> None:
    """A stop token and the end of the text belong to the ids; like a stop string they are shown on request only."""
    ids, more = ids_of(llm, "calm sea"), ids_of(llm, " and more")
    word = ids_of(llm, "!")
    options = {"include_stop_str_in_output": include}
    stopped, _ = play(llm, [*ids, *word, *more], sizes, stop_token_ids=word, **options)
    assert (stopped.text, stopped.token_ids) == ("calm sea" + "!" * include, [*ids, *word])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word[0])
    ended, _ = play(llm, [*ids, 1, *more], sizes, **options)
    assert (ended.text, ended.token_ids, ended.finish_reason, ended.stop_reason) == ("calm sea", [*ids, 1], "stop", None)
    shown, _ = play(llm, [*ids, 1, *more], sizes, skip_special_tokens=False, **options)
    assert shown.text == "calm sea" + "<eos>" * include
    past, _ = play(llm, [*ids, 1, *more], sizes, ignore_eos=True)
    assert past.text == "calm sea and more" and past.finish_reason == "length"


def test_a_stop_string_wins_over_the_end_that_came_in_the_same_step(llm: LLM) -> None:
    ids = [*ids_of(llm, "calm sea here"), 1]
    output, _ = play(llm, ids, [100], stop="sea")
    assert (output.text, output.stop_reason) == ("calm ", "sea")
    assert output.metrics is not None and output.metrics.e2e_s is not None


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logprob_bytes_add_up_to_the_text(llm: LLM, sizes: list[int]) -> None:
    text = "🙂海は café"
    output, _ = play(llm, ids_of(llm, text), sizes, logprobs=1)
    assert output.logprobs is not None and b"".join(p.bytes for p in output.logprobs) == text.encode()
    assert any(p.token == "\ufffd" for p in output.logprobs)            # the pieces of an emoji
    assert all(p.rank == 1 and p.top[0].token_id == p.token_id for p in output.logprobs)


def test_echo_comes_once_in_a_stream_of_several_samples(llm: LLM) -> None:
    ids = ids_of(llm, "🙂 is it")
    llm.engine.strategies["script"] = Script(ids, [2])
    params = SamplingParams(max_tokens=len(ids), echo=True, n=3)
    texts = ["", "", ""]
    for output in llm.stream("The 海", params, strategy="script"):
        for sample in output.outputs:
            texts[sample.index] += sample.delta
    assert texts == ["The 海🙂 is it"] * 3


def test_each_sample_has_its_own_end(llm: LLM) -> None:
    def alone(seed: int, **options: object) -> list[object]:
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True, **options)     # type: ignore[arg-type]
        sample = llm.generate("The sea", params)[0].outputs[0]
        return [sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason]

    first = str(alone(5)[0])
    stop = first[8:10]
    output = llm.generate("The sea", SamplingParams(max_tokens=30, seed=5, ignore_eos=True, n=3, stop=stop))[0]
    assert [[s.text, s.token_ids, s.finish_reason, s.stop_reason] for s in output.outputs] == [
        alone(5 + i, stop=stop) for i in range(3)]
    assert output.outputs[0].stop_reason == stop and output.finished


def test_without_detokenization_there_are_ids_only(llm: LLM) -> None:
    output, deltas = play(llm, ids_of(llm, "calm"), [2], detokenize=False, echo=True)
    assert output.text == "" and not any(deltas) and output.token_ids == ids_of(llm, "calm")


@pytest.mark.parametrize("config", [
    {"method": "ngram", "num_speculative_tokens": 3}, {"method": "lookup_tree", "num_speculative_tokens": 2, "branches": 2}])
def test_speculation_changes_neither_text_nor_deltas(llm: LLM, folder: object, config: dict[str, object]) -> None:
    speculative = LLM(str(folder), threads=1, speculative_config=config)
    prompts = ["The sea is calm. The sea is", "海は静かで、海は", "🙂🚀🙂🚀"]
    for prompt, options in itertools.product(prompts, ({"temperature": 0.0}, {"seed": 3, "temperature": 1.2})):
        params = SamplingParams(max_tokens=24, logprobs=1, ignore_eos=True, **options)
        plain = llm.generate(prompt, params)[0].outputs[0]
        drafted = speculative.generate(prompt, params)[0].outputs[0]
        assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
        assert drafted.logprobs is not None and len(drafted.logprobs) == 24
        deltas = [o.outputs[0].delta for o in speculative.stream(prompt, params)]
        assert "".join(deltas) == plain.text
        cut = plain.text[len(plain.text) // 2:][:2]
        stopping = SamplingParams(max_tokens=24, ignore_eos=True, stop=cut, **options)
        a, b = (m.generate(prompt, stopping)[0].outputs[0] for m in (llm, speculative))
        assert (a.text, a.token_ids, a.stop_reason) == (b.text, b.token_ids, b.stop_reason) and a.stop_reason == cut
    assert speculative.stats.accepted_tokens > 0
