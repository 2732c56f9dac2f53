"""A fully native softmax model gives the same bits however its work is cut: threads, batches, chunks, prefix hits."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import PAGE, Paged, lowered, nmse, on_native, on_torch, tokens

from ridgeline import LLM, SamplingParams
from ridgeline.decoding.base import Run
from ridgeline.native import _native
from tiny_checkpoint import write_checkpoint, write_model

torch.set_num_threads(1)

VOCAB = 320
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "sliding": {"model_type": "mistral", "sliding_window": 40, "num_attention_heads": 3, "head_dim": 20},
    "soft-caps": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                  "query_pre_attn_scalar": 20, "sliding_window": 24},
    "biases, odd sizes": {"model_type": "qwen2", "intermediate_size": 72, "hidden_size": 40},
    "norms over all heads": {"model_type": "olmo2"},
    "heads of 64": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},      # int8 keys by integers
    "sinks": {"model_type": "with_sinks", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "sinks, sliding, soft-cap": {"model_type": "with_sinks", "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 20,
                                 "sliding_window": 24, "attn_logit_softcapping": 2.0},
}
# How weights and activations meet in the products: each has kernels of its own.
PRODUCTS: dict[str, dict[str, Any]] = {
    "int8": {"activation_dtype": "int8", "quantization": "int8"},
    "float32": {"activation_dtype": "float32"},
    "int8 weights, float32": {"activation_dtype": "float32", "quantization": "int8"},
}
CASES = pytest.mark.parametrize(("model", "products"), [
    (m, p) for m in MODELS for p in PRODUCTS if m == "grouped" or p == "int8"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            write_model(made[name], sharpness=1.0, max_position_embeddings=1024, **MODELS[name])
        return made[name]

    return make


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())


LONG = tokens(5 * PAGE * 8 + 3, 1, VOCAB)           # more than two chunks of keys


@CASES
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_chunks_batches_and_threads_give_the_same_bits(model: str, products: str, kv: torch.dtype, folder: Any) -> None:
    net, report = on_native(folder(model), strict_native=True, **PRODUCTS[products])
    assert report.complete
    prompt = tokens(83, 2, VOCAB)
    expected = Paged(net, kv).logits([prompt])
    assert expected.isfinite().all() and expected.std() > 0.1
    for chunk in (1, 2, 3, 15, 16, 17, 64):
        assert same_bits(Paged(net, kv).logits([prompt], chunk), expected), f"chunks of {chunk}"
    others = [tokens(n, n, VOCAB) for n in (1, 90, 5, 31, 64, 17, 2)]
    for chunk in (1, 13, 1000):
        together = Paged(net, kv, pages=160).logits([*others[:3], prompt, *others[3:]], chunk)
        assert same_bits(together[96:96 + len(prompt)], expected), f"in a batch, chunks of {chunk}"
    for threads in (2, 3):
        team, report = on_native(folder(model), threads=threads, **PRODUCTS[products])
        assert report.threads == threads
        for chunk in (1, 17, 1000):
            assert same_bits(Paged(team, kv).logits([prompt], chunk), expected), f"{threads} threads, chunks of {chunk}"


@pytest.mark.parametrize(("model", "kv"), [("grouped", torch.bfloat16), ("sliding", torch.bfloat16),
                                           ("heads of 64", torch.int8), ("sinks", torch.bfloat16),
                                           ("sinks", torch.int8)], ids=str)
def test_long_contexts_split_between_threads_give_the_same_bits(model: str, kv: torch.dtype, folder: Any) -> None:
    """A decoding row's keys are shared out in chunks when there are fewer heads than threads to feed."""
    found = []
    for threads in (1, 2, 3, 5):
        paged = Paged(on_native(folder(model), threads=threads, **PRODUCTS["int8"])[0], kv)
        paged.prefill({"a": LONG}, 512)
        steps = [paged.run({"a": Run("target", [token])})["a"] for token in tokens(4, 5, VOCAB)]
        found.append(torch.cat(steps))
    assert all(same_bits(f, found[0]) for f in found[1:])
    whole = Paged(on_native(folder(model), **PRODUCTS["int8"])[0], kv).logits([LONG + tokens(4, 5, VOCAB)])
    assert same_bits(whole[-4:], found[0])


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_prefix_hit_gives_the_bits_of_a_miss(model: str, kv: torch.dtype, folder: Any) -> None:
    net, _ = on_native(folder(model), **PRODUCTS["int8"])
    paged = Paged(net, kv, prefix_caching=True)
    prompt = tokens(5 * PAGE + 3, 3, VOCAB)
    miss = paged.prefill({"a": prompt}, 64)["a"]
    hit = paged.prefill({"b": [*prompt[:3 * PAGE + 2], *tokens(20, 4, VOCAB)]}, 7)["b"]
    assert len(hit) == 2 + 20                             # three pages came from the cache
    again = paged.prefill({"c": prompt}, 1000)["c"]
    assert len(again) < len(prompt) and same_bits(again, miss[-len(again):])
    fresh = Paged(net, kv).logits([[*prompt[:3 * PAGE + 2], *tokens(20, 4, VOCAB)]])
    assert same_bits(hit, fresh[-22:])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("threads", [1, 3])
def test_trees_blocks_and_bidirectional_rows_equal_torch(model: str, threads: int, folder: Any) -> None:
    nets = on_native(folder(model), threads=threads)[0], on_torch(folder(model))
    prompt, nodes = tokens(2 * PAGE - 3, 6, VOCAB), tokens(90, 7, VOCAB)
    wide = [-1, *((i - 1) // 2 for i in range(1, 90))]    # 90 nodes: masks of more than one word
    deep = [-1, 0, 0, 1, 1, 2, -1, 3, 7, *range(8, 20)]
    found = []
    for net in nets:
        paged, parts = Paged(net), []
        paged.prefill({"tree": prompt, "deep": prompt[:5], "block": prompt, "all": prompt[:9], "plain": prompt}, 9)
        runs = {"tree": Run("target", nodes, parents=wide), "deep": Run("target", nodes[:21], parents=deep),
                "block": Run("target", nodes[:24], see="block", align=8, write=False),
                "all": Run("target", nodes[:33], see="all"), "plain": Run("target", nodes[:5])}
        parts.append(torch.cat(list(paged.run(runs).values())))
        found.append(torch.cat(parts))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["int8", "float32", "bfloat16"])
def test_instruction_sets_agree(model: str, precision: str, folder: Any) -> None:
    """Sums in another order: a few units in the last place of fp32, far below what eight bits lose."""
    prompt = [tokens(70, 8, VOCAB)]
    quantization = "int8" if precision == "int8" else None
    found = {isa: Paged(lowered(folder(model), isa=isa, precision=precision, quantization=quantization)).logits(prompt)
             for isa in _native.available()}
    assert "scalar" in found
    for logits in found.values():
        assert nmse(logits, found["scalar"]) < (1e-9 if precision == "float32" else 1e-4)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("text"), num_attention_heads=6, num_key_value_heads=2)


def generate(path: Path, prompts: list[list[int]], params: SamplingParams, **options: Any) -> list[list[int]]:
    llm = LLM(path, **{"backend": "native", "quantization": "int8", "strict_native": True, "threads": 1, "num_pages": 64,
                       "dtype": "bfloat16", **options})
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    assert all(o.error is None for o in outputs)
    return [o.outputs[0].token_ids for o in outputs]


PROMPTS = [tokens(n, n, VOCAB) for n in (40, 3, 17, 64, 9)]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
                                    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
                                    SamplingParams(top_k=20, top_p=0.95, seed=5, repetition_penalty=1.2, min_tokens=30,
                                                   max_tokens=40),
                                    SamplingParams(temperature=0, presence_penalty=0.7, max_tokens=24, ignore_eos=True)],
                         ids=["greedy", "seeded", "top-k", "penalised"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_tokens_are_the_same_alone_in_batches_and_under_speculation(text_model: Path, params: SamplingParams, kv: str) -> None:
    """int8: pages that are copied and rows that are moved take their scales along."""
    together = generate(text_model, PROMPTS, params, kv_cache_dtype=kv)
    assert len({tuple(t) for t in together}) == len(together)
    assert [generate(text_model, [p], params, kv_cache_dtype=kv)[0] for p in PROMPTS] == together
    for options in ({"threads": 2}, {"threads": 3, "max_num_batched_tokens": 16}, {"max_num_batched_tokens": 7},
                    {"enable_prefix_caching": False}, {"num_pages": 12, "max_num_seqs": 3}, {"block_size": 8},
                    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
                    {"speculative_config": {"method": "lookup_tree", "num_speculative_tokens": 4}}):
        assert generate(text_model, PROMPTS, params, kv_cache_dtype=kv, **options) == together, options


@pytest.mark.parametrize("fields", [{"top_k": 20, "seed": 5}, {"top_k": 30, "top_p": 0.9, "logit_bias": {7: 3.0}, "seed": 1},
                                    {"temperature": 0.0, "repetition_penalty": 1.4},
                                    {"temperature": 0.0, "allowed_token_ids": list(range(3, 40, 2))}])
def test_asking_for_log_probabilities_changes_no_token(text_model: Path, fields: dict[str, Any]) -> None:
    """With them all logits are computed, without them the few that matter."""
    plain, told = (SamplingParams(max_tokens=16, ignore_eos=True, logprobs=n, **fields) for n in (None, 2))
    assert generate(text_model, PROMPTS, plain) == generate(text_model, PROMPTS, told)


def test_rows_of_the_head_are_counted(text_model: Path) -> None:
    llm = LLM(text_model, backend="native", quantization="int8", threads=1, num_pages=64)
    vocab = llm.engine.vocab_size

    def counted(**fields: Any) -> tuple[int, int]:
        before = llm.stats.head_rows, llm.stats.head_rows_scored
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=5, ignore_eos=True, **fields))
        return llm.stats.head_rows - before[0], llm.stats.head_rows_scored - before[1]

    assert counted() == (5 * vocab, 5 * vocab)
    rows, scored = counted(temperature=0, allowed_token_ids=[3])
    assert rows == 5 * vocab and scored <= 5 * 16
    rows, scored = counted(temperature=0)
    assert rows == 5 * vocab and 0 < scored <= rows


def test_a_native_draft_model_changes_no_greedy_token(text_model: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    draft = write_checkpoint(tmp_path, num_hidden_layers=1)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    assert generate(text_model, PROMPTS, params, speculative_config=config) == generate(text_model, PROMPTS, params)
