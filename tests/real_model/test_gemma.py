"""Gemma 3 270M from its GGUF file, end to end: equal to transformers in fp32, and sensible."""
from __future__ import annotations

from typing import Any

import gemma_oracle as oracle_of
import pytest

from ridgeline import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def oracle(gemma: LLM) -> Any:
    return oracle_of.from_checkpoint(gemma.loaded.checkpoint)


def test_distributions_equal_those_of_transformers(gemma: LLM, oracle: Any) -> None:
    ids = gemma.tokenizer.encode(oracle_of.PROSE.read_text())[:128]
    kl = oracle_of.divergences(gemma, oracle, ids)
    assert kl.shape == (128,)
    assert kl.mean() <= 1e-6


def test_greedy_tokens_equal_those_of_transformers(gemma: LLM, oracle: Any) -> None:
    prompts = ["The ferry left the island a little after", "def fibonacci(n):\n", "今天天气很好,"]
    for prompt, output in zip(prompts, gemma.generate(prompts, GREEDY)):
        found = output.outputs[0].token_ids
        assert len(found) == 10
        assert found == oracle_of.favourites(oracle, output.prompt_token_ids, found), prompt


def test_it_continues_what_every_text_continues(gemma: LLM) -> None:
    known = {
        "Monday, Tuesday, Wednesday, Thursday,": " Friday, Saturday, Sunday",
        "One, two, three, four, five, six,": " seven, eight, nine, ten",
        "A, B, C, D, E, F,": " G, H, I, J, K,",
        "To be, or not to be, that is the": " question.",
        "The opposite of hot is": " cold.",
        "def add(a, b):\n    return": " a + b\n",
    }
    for (prompt, continuation), output in zip(known.items(), gemma.generate(list(known), GREEDY)):
        assert output.error is None
        assert output.outputs[0].text.startswith(continuation), (prompt, output.outputs[0].text)


def test_seeded_sampling_repeats_and_differs_by_seed(gemma: LLM) -> None:
    prompt = "The old clock in the tower"
    # With a nucleus: among 262,144 tokens of some 1e-7 each, rounding that depends on the batch's shape picks another.
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=8) for seed in (1, 2, 1)]
    first, other, again = (o.outputs[0].token_ids for o in gemma.generate([prompt] * 3, params))
    alone = gemma.generate(prompt, params[0])[0].outputs[0].token_ids
    assert first == again == alone != other


def test_tokens_of_real_text_decode_to_it(gemma: LLM) -> None:
    texts = [oracle_of.PROSE.read_text(), "  indented\n\n\ttabs  and  runs", "春眠不觉晓,处处闻啼鸟。", "naïve café — Łódź",
             "🧭👩‍🚀🏳️‍🌈", "for i in range(10):\n    print(f\"{i:>3}\")\n"]
    for text in texts:
        ids = gemma.tokenizer.encode(text)
        assert ids[0] == 2                                      # Gemma wants <bos> in front
        assert gemma.tokenizer.decode(ids) == text


def test_streamed_text_is_the_text_and_latencies_are_told(gemma: LLM) -> None:
    prompt, whole = "Once upon a time", ""
    for output in gemma.stream(prompt, GREEDY):
        whole += output.outputs[0].delta
    assert output.finished and whole == output.outputs[0].text == gemma.generate(prompt, GREEDY)[0].outputs[0].text
    metrics = output.metrics
    assert metrics.prompt_tokens == len(gemma.tokenizer.encode(prompt)) and metrics.completion_tokens == 10
    assert metrics.ttft_s is not None and metrics.e2e_s is not None and metrics.tpot_s is not None
    assert 0 < metrics.ttft_s < metrics.e2e_s
    assert len(metrics.itl_s) == 9 and all(gap > 0 for gap in metrics.itl_s)
    assert metrics.ttft_s + sum(metrics.itl_s) == pytest.approx(metrics.e2e_s, abs=1e-3)
    assert metrics.tpot_s == pytest.approx(sum(metrics.itl_s) / 9)
