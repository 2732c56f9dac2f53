"""Gemma 3 270M against transformers' own reading of the GGUF file, at length."""
from __future__ import annotations

from typing import Any

import gemma_oracle as oracle_of
import pytest
import torch

from ridgeline import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]      # two minutes on two free cores, far more on busy ones

TOKENS = 40
WINDOW = 512

PROMPTS = {
    "English": [
        "The history of the steam engine begins with",
        "My grandmother kept a small blue tin on the kitchen shelf, and in it",
        "Ladies and gentlemen, thank you for coming tonight. I would like to",
        "In physics, the second law of thermodynamics states that",
        "Recipe: Lentil soup\n\nIngredients:\n-",
        "Q: Why is the sky blue?\nA:",
        "\"I don't believe you,\" said Anna, and",
        "1. Wash your hands.\n2. Dry them.\n3.",
    ],
    "code and markup": [
        "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
        "#include <stdio.h>\n\nint main(void) {\n",
        "SELECT name, COUNT(*) FROM orders WHERE",
        "<!DOCTYPE html>\n<html>\n<head>\n",
        "{\"name\": \"ridgeline\", \"version\": \"0.1.0\", \"dependencies\": {",
    ],
    "Chinese": [
        "今天天气很好,我们一起去",
        "中国的首都是北京,它",
        "人工智能是计算机科学的一个分支,",
    ],
    "other scripts": [
        "Быстрая коричневая лиса",
        "東京は日本の首都であり、",
    ],
    "emoji": [
        "🎉🎂 Happy birthday! 🎈",
        "I love 🍕 and 🍔 but",
        "👩‍🚀🚀🌕",
    ],
}


@pytest.fixture(scope="module")
def oracle(gemma: LLM) -> Any:
    return oracle_of.from_gguf(gemma.loaded.path)


def test_both_readers_give_the_same_config_and_the_same_bits(gemma: LLM, oracle: Any) -> None:
    found = oracle.config.to_dict()
    for name, value in oracle_of.CONFIG.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    checkpoint = gemma.loaded.checkpoint
    theirs = dict(oracle.named_parameters())
    assert sorted(checkpoint.names()) == sorted(theirs)
    for name, values in theirs.items():
        assert torch.equal(checkpoint.read(name, torch.float32), values), name


def test_distributions_over_768_tokens(gemma: LLM, oracle: Any) -> None:
    """Longer than a chunk of the prefill and than the sliding window."""
    ids = gemma.tokenizer.encode(oracle_of.PROSE.read_text())[:768]
    kl = oracle_of.divergences(gemma, oracle, ids)
    assert kl.shape == (768,)
    assert kl.mean() <= 1e-6, kl.mean()
    assert kl[WINDOW:].mean() <= 1e-6, kl[WINDOW:].mean()


def test_greedy_tokens_of_a_continuous_batch(gemma: LLM, oracle: Any) -> None:
    """All prompts in one engine at once, each by itself in transformers.

    One pass of transformers over prompt and answer tells whether each token of the answer is the most likely one after
    those before it: then, by induction, the answer is transformers' own greedy one. For one prompt of each kind
    transformers also generates it, one token at a time over its cache.
    """
    texts = [text for kind in PROMPTS.values() for text in kind]
    prompts = [gemma.tokenizer.encode(text) for text in texts]
    long = gemma.tokenizer.encode(oracle_of.PROSE.read_text())[:600]
    assert len(prompts) >= 20 and len(long) > WINDOW
    answers = [output.outputs[0].token_ids for output in gemma.generate(
        [long, *prompts], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))]
    for prompt, answer in zip([long, *prompts], answers):
        assert len(answer) == TOKENS
        assert answer == oracle_of.favourites(oracle, prompt, answer), gemma.tokenizer.decode(prompt)
    first_of_kind = [0] + [1 + texts.index(kind[0]) for kind in PROMPTS.values()]
    for i in first_of_kind:
        prompt = [long, *prompts][i]
        assert answers[i] == oracle_of.greedy(oracle, prompt, TOKENS), gemma.tokenizer.decode(prompt)
