"""LLM: many prompts, bad ones among good ones, scoring, chat, samples, seeds, metrics."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError, EngineError, InvalidParams, InvalidPrompt, RidgelineError
from ridgeline.types import RequestOutput
from tiny_checkpoint import Script, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert all(o.error is None and o.finished for o in outputs)
    return [s.text for o in outputs for s in o.outputs]


def test_many_prompts_equal_each_alone_and_keep_their_order(llm: LLM) -> None:
    prompts = [f"{word} sea {i}" for i in range(6) for word in ("calm", "海", "🙂")]
    seen: list[tuple[int, int]] = []
    together = llm.generate(prompts, GREEDY, on_progress=lambda done, total, stats: seen.append((done, total)))
    assert [o.prompt for o in together] == prompts
    assert texts(together) == [texts(llm.generate(p, GREEDY))[0] for p in prompts]
    assert seen == sorted(seen) and seen[-1] == (18, 18)
    assert llm.generate([]) == []


def test_every_form_of_a_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("The sea")
    forms: list[Any] = [{"prompt": "The sea"}, {"prompt_token_ids": ids}, ids, tuple(ids), [np.int64(i) for i in ids]]
    expected = texts(llm.generate("The sea", GREEDY))
    for form in forms:
        assert texts(llm.generate(form, GREEDY)) == expected
    assert texts(llm.generate(forms, GREEDY)) == expected * len(forms)


@pytest.mark.parametrize(("prompt", "error", "words"), [
    ("", InvalidPrompt, "empty"), ([], InvalidPrompt, "empty"), ({"prompt": ""}, InvalidPrompt, "empty"),
    ("\udcff", InvalidPrompt, "surrogate"), ([5, 320], InvalidPrompt, "320 in the prompt is out of range; valid: 0 to 319"),
    ([5, -1], InvalidPrompt, "-1"), ([5, "6"], InvalidPrompt, "'6'"), ([5, True], InvalidPrompt, "True"),
    ([7] * 300, InvalidPrompt, "300 tokens; at most 255"), (b"bytes", InvalidPrompt, "bytes"), (4.5, InvalidPrompt, "float"),
    ({"text": "x"}, InvalidPrompt, "prompt_token_ids"), ({"prompt": "x", "image": 1}, InvalidPrompt, "image"),
    ({"prompt": 5}, InvalidPrompt, "int")], ids=lambda value: str(value)[:20])
def test_a_bad_prompt_fails_alone(llm: LLM, prompt: Any, error: type[RidgelineError], words: str) -> None:
    good, bad, other = llm.generate(["The sea", prompt, "海"], GREEDY)
    assert texts([good, other]) == texts(llm.generate(["The sea", "海"], GREEDY))
    assert isinstance(bad.error, error) and words in str(bad.error)
    assert bad.finished and bad.outputs[0].finish_reason == "error" and bad.outputs[0].text == ""
    assert bad.metrics.ttft_s is None
    with pytest.raises(error):
        list(llm.stream(prompt, GREEDY))


def test_bad_parameters_of_one_prompt_fail_alone(llm: LLM) -> None:
    wrong = [SamplingParams(logprobs=21), SamplingParams(logit_bias={320: 1.0}), SamplingParams(stop_token_ids=[9999]),
             SamplingParams(bad_words=["a"], allowed_token_ids=llm.tokenizer.encode("a", add_special_tokens=False))  # type: ignore[union-attr]
             ]
    outputs = llm.generate(["The sea"] * 5, [GREEDY, *wrong])
    assert texts(outputs[:1]) and all(isinstance(o.error, InvalidParams) for o in outputs[1:])
    assert "max_logprobs" in str(outputs[1].error)
    assert isinstance(llm.generate("x", strategy="medusa")[0].error, InvalidParams)


@pytest.mark.parametrize(("params", "words"), [([GREEDY], "2 prompts but 1"), ({"temperature": 0}, "SamplingParams"),
                                               ([GREEDY, None], "SamplingParams")])
def test_parameters_that_belong_to_no_prompt(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llm.generate(["a", "b"], params)


def test_a_fault_in_the_model_reaches_the_caller_and_leaves_the_engine_clean(
        llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        def fail(*_: object) -> None:
            raise FloatingPointError("no such luck")

        broken.setattr(llm.engine.runners["target"], "execute", fail)
        outputs = llm.generate(["a", "b"], GREEDY)
    assert all(isinstance(o.error, EngineError) and "no such luck" in str(o.error) for o in outputs)
    with monkeypatch.context() as broken:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        broken.setattr(llm.engine.runners["target"], "execute", stop)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert not llm.engine.scheduler.running
    assert texts(llm.generate("a", GREEDY))


def test_scoring_a_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, echo=True, prompt_logprobs=2)
    output = llm.generate("The 🙂 sea", params)[0]
    assert output.outputs[0].text == "The 🙂 sea" and output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    found = output.prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(output.prompt_token_ids)
    told = [p for p in found if p is not None]
    assert [p.token_id for p in told] == output.prompt_token_ids[1:]
    assert b"".join(p.bytes for p in told) == "The 🙂 sea".encode()
    assert all(p.logprob < 0 and p.rank >= 1 and len(p.top) == 2 and p.top[0].logprob >= p.top[1].logprob for p in told)
    assert output.metrics.completion_tokens == 0 and output.metrics.ttft_s is None and output.metrics.e2e_s is not None
    # The same numbers as one token at a time: scored by generating behind each beginning of the prompt.
    for i in range(1, len(output.prompt_token_ids)):
        token = output.prompt_token_ids[i]
        step = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[token])
        one = llm.generate(output.prompt_token_ids[:i], step)[0].outputs[0]
        assert one.logprobs is not None and abs(one.logprobs[0].logprob - told[i - 1].logprob) < 1e-4


def test_echo_and_prompt_logprobs_beside_generation(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, echo=True, prompt_logprobs=0, logprobs=1, ignore_eos=True, n=2)
    output = llm.generate("The sea", params)[0]
    for sample in output.outputs:
        assert sample.text.startswith("The sea") and sample.logprobs is not None and len(sample.logprobs) == 4
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_samples_and_seeds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=7, ignore_eos=True)
    first = texts(llm.generate("The sea", params))
    assert len(set(first)) == 3
    mixed = llm.generate(["海", "The sea", "🙂"], [GREEDY, params, SamplingParams(max_tokens=12, n=2)])
    assert texts([mixed[1]]) == first
    one = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    assert texts(llm.generate("The sea", one)) == first[:1]


def test_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    prompts = ["The sea", "海", "🙂"]
    expected = texts(llm.generate(prompts, GREEDY))
    streams = [llm.stream(p, GREEDY) for p in prompts]
    found = ["", "", ""]
    first = next(streams[2])                              # one stream is ahead, and a batch comes in between
    found[2] += first.outputs[0].delta
    assert texts(llm.generate(prompts, GREEDY)) == expected
    for i in (0, 1, 2, 1, 0) * 10:
        for output in itertools.islice(streams[i], 1):
            found[i] += output.outputs[0].delta
    assert found == expected


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream("The sea", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.running
    stream.close()
    assert not llm.engine.scheduler.running


def test_an_id_may_be_used_again_at_once(llm: LLM) -> None:
    """The engine's last word about an ended request must not end the next one of that name."""
    frontend = llm.frontend
    llm.engine.strategies["script"] = Script(llm.tokenizer.encode("a sea", add_special_tokens=False), [1])  # type: ignore[union-attr]
    frontend.add("x", SamplingParams(stop="s"), request_id="mine", strategy="script")
    with pytest.raises(InvalidParams, match="in use"):
        frontend.add("x", GREEDY, request_id="mine")
    while not any(o.finished for o in frontend.step()):
        pass
    frontend.add("The sea", GREEDY, request_id="mine")
    frontend.abort("mine")
    frontend.add("The sea", GREEDY, request_id="mine")
    outputs = []
    while frontend.has_work:
        outputs += frontend.step()
    assert outputs[-1].finished and outputs[-1].outputs[0].text == texts(llm.generate("The sea", GREEDY))[0]


def test_metrics_fit_together(llm: LLM) -> None:
    for output in llm.generate(["The sea", "海は"], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)):
        m = output.metrics
        assert m.prompt_tokens == len(output.prompt_token_ids)
        assert m.completion_tokens == len(output.outputs[0].token_ids) == len(m.token_times) == 9
        assert m.queue_s is not None and m.ttft_s is not None and m.e2e_s is not None and m.tpot_s is not None
        assert 0 <= m.queue_s <= m.ttft_s <= m.e2e_s
        assert len(m.itl_s) == 8 and min(m.itl_s) > 0
        assert abs(sum(m.itl_s) - m.tpot_s * 8) < 1e-9 and abs(m.ttft_s + sum(m.itl_s) - m.e2e_s) < 1e-3
    assert (llm.stats.running, llm.stats.waiting, llm.stats.kv_usage) == (0, 0, 0.0)


def test_bad_words_never_come(llm: LLM) -> None:
    assert llm.tokenizer is not None
    for word in ("=", " the"):
        ids = llm.tokenizer.encode(word, add_special_tokens=False)
        assert len(ids) == 1
        wanted = {ids[0]: 50.0}                            # certain to come, were it not a bad word
        plain, banned = (llm.generate("The sea", SamplingParams(max_tokens=4, logit_bias=wanted, bad_words=words))[0].outputs[0]
                         for words in ((), word))
        assert plain.text == word * 4 and word not in banned.text and ids[0] not in banned.token_ids


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "海"}, {"role": "assistant", "content": "🙂"}, {"role": "user", "content": "sea"}]
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("<user>海<assistant>🙂<user>sea<assistant>")
    assert ids[0] == 0
    single = llm.chat(talk, GREEDY)
    assert single[0].prompt_token_ids == ids and texts(single) == texts(llm.generate([ids], GREEDY))
    several = llm.chat([talk, [{"role": "system", "content": "x"}], [{"role": "user", "content": "hi"}]], GREEDY)
    assert texts(several[:1]) == texts(single) and isinstance(several[1].error, InvalidPrompt)
    assert "no system messages here" in str(several[1].error) and texts(several[2:])
    assert isinstance(llm.chat([], GREEDY)[0].error, InvalidPrompt)
    other = llm.chat(talk, GREEDY, chat_template="{{ messages[0].content }}")
    assert other[0].prompt_token_ids == llm.tokenizer.encode("海", add_special_tokens=False)


def test_a_model_without_a_tokenizer_takes_and_gives_ids(tmp_path: Path, llm: LLM) -> None:
    write_model(tmp_path)
    bare = LLM(tmp_path, threads=1)
    assert bare.tokenizer is None
    ids = [5, 9, 12]
    output = bare.generate([ids], SamplingParams(max_tokens=5, temperature=0.0, logprobs=1, echo=True))[0]
    expected = llm.generate([ids], SamplingParams(max_tokens=5, temperature=0.0))[0].outputs[0]
    assert output.error is None and output.outputs[0].token_ids == expected.token_ids and output.outputs[0].text == ""
    for prompt, params, words in (("text", GREEDY, "token ids"), (ids, SamplingParams(stop="x"), "tokenizer"),
                                  (ids, SamplingParams(bad_words=["x"]), "tokenizer")):
        assert words in str(bare.generate([prompt], params)[0].error)
    assert "tokenizer" in str(bare.chat([{"role": "user", "content": "x"}])[0].error)
