"""Block diffusion in the engine against a plain loop: whole forward passes without a cache, one request at a time."""
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine_kit import MASK, VOCAB, Answer, Rig, logits, model, prompt, same
from ridgeline.decoding.autoregressive import Autoregressive
from ridgeline.decoding.block_diffusion import BlockDiffusion
from ridgeline.errors import ConfigError, InvalidParams
from ridgeline.noise import Purpose, again, uniform
from ridgeline.types import FinishReason

BLOCK = 4
PROMPTS = [prompt(n, seed=n) for n in (1, 3, 4, 6, 8, 13, 21, 32)]
LENGTHS = [9, 16, 3, 8, 1, 20, 6, 11]
REVEALS = {
    "threshold": {"reveal": "threshold", "threshold": 0.45},
    "one a pass": {"reveal": "low_confidence"},
    "three passes": {"reveal": "low_confidence", "steps": 3},
    "threshold in two passes": {"reveal": "threshold", "threshold": 0.6, "steps": 2},
}
DRAWS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "seed": 3}}
NET = model("blocks", sharpness=2.5)


def reference(tokens: list[int], count: int, *, reveal: str, threshold: float = 0.9, steps: int = BLOCK,
              temperature: float, seed: int = 0) -> tuple[list[int], int]:
    """(output, forward passes): the sequence grows by one block at a time, all of it run anew for each pass."""
    text, passes = list(tokens), 0
    while len(text) < len(tokens) + count:
        given = len(text) % BLOCK
        text += [MASK] * (BLOCK - given)
        first = len(text) - BLOCK + given
        hidden = set(range(first, len(text)))
        rounds = min(steps, len(hidden))
        for turn in range(rounds):
            share = (BLOCK - given) // rounds + (turn < (BLOCK - given) % rounds)
            rows = logits(NET, text, see="block", block=BLOCK).float()
            rows[:, MASK] = -math.inf
            passes += 1
            guesses = {}
            for i in sorted(hidden):
                p = (rows[i] / temperature if temperature else rows[i]).softmax(-1).double()
                if temperature:
                    # A vocabulary of one block of 512: the draw's second number decides.
                    target = again(uniform(seed, i, Purpose.SAMPLE, turn)) * float(p.sum())
                    token = next(t for t in range(VOCAB) if float(p[:t + 1].sum()) > target)
                else:
                    token = int(rows[i].argmax())
                guesses[i] = token, float(rows[i].softmax(-1)[token])
            ranked = sorted(guesses, key=lambda i: (-guesses[i][1], i))
            sure = sum(c > threshold for _, c in guesses.values()) if reveal == "threshold" else 0
            for i in ranked[:max(share, sure)]:
                text[i] = guesses[i][0]
                hidden.remove(i)
            if not hidden:
                break
    return text[len(tokens):len(tokens) + count], passes


def rig(options: dict[str, Any], **engine: Any) -> Rig:
    return Rig(engine.pop("models", NET), {"blocks": BlockDiffusion(MASK, BLOCK, **options), "causal": Autoregressive(),
                                           **engine.pop("more", {})}, **engine)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("reveal", REVEALS)
def test_a_batch_gives_what_the_plain_loop_gives_for_each(reveal: str, draws: str) -> None:
    r = rig(REVEALS[reveal])
    for i, tokens in enumerate(PROMPTS):
        r.add(str(i), tokens, max_tokens=LENGTHS[i], **DRAWS[draws])
    answers = r.finish()
    passes = []
    for i, tokens in enumerate(PROMPTS):
        expected, count = reference(tokens, LENGTHS[i], **REVEALS[reveal], **DRAWS[draws])
        assert answers[str(i), 0].tokens == expected
        assert answers[str(i), 0].finish_reason is FinishReason.LENGTH
        passes.append(count)
    assert r.steps == max(passes)                       # all requests share each pass
    stats, ends = r.engine.stats, [len(tokens) + length for tokens, length in zip(PROMPTS, LENGTHS)]
    assert (stats.denoising_steps, stats.diffusion_tokens) == (sum(passes), sum(LENGTHS))
    assert stats.diffusion_blocks == sum(-(-end // BLOCK) - len(tokens) // BLOCK for end, tokens in zip(ends, PROMPTS))
    alone = rig(REVEALS[reveal]).one(PROMPTS[5], max_tokens=LENGTHS[5], **DRAWS[draws])
    assert alone.tokens == answers["5", 0].tokens


def test_the_threshold_saves_passes() -> None:
    counts = {name: reference(PROMPTS[5], 20, **REVEALS[name], temperature=0.0)[1] for name in REVEALS}
    assert counts["one a pass"] == 23                   # 13 = 3 blocks + 1 token: 3 passes, then 5 blocks of 4
    assert counts["threshold"] < 23
    assert counts["three passes"] < 23


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("cut", [
    {"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 13, "max_num_seqs": 3},
    {"pages": 21, "page_size": 4, "max_num_batched_tokens": 24}, {"pages": 6, "page_size": 16, "prefix_caching": False},
], ids=["chunks of a block", "odd chunks", "preemption", "preemption without prefixes"])
def test_chunks_and_preemption_change_nothing(cut: dict[str, Any], draws: str) -> None:
    lengths = [35, 30, 25, 33, 28, 20, 26, 31]
    r = rig(REVEALS["threshold"], **cut)
    for i, tokens in enumerate(PROMPTS):
        r.add(str(i), tokens, max_tokens=lengths[i], **DRAWS[draws])
    answers = r.finish()
    assert ("pages" in cut) == (r.engine.stats.preemptions > 0)
    for i, tokens in enumerate(PROMPTS):
        assert answers[str(i), 0].tokens == reference(tokens, lengths[i], **REVEALS["threshold"], **DRAWS[draws])[0]


def test_causal_rows_share_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal and denoising rows over the same weights: one pass a step, and the outputs of each kind alone."""
    causal = rig(REVEALS["threshold"])
    for i, tokens in enumerate(PROMPTS):
        causal.add(str(i), tokens, "causal", max_tokens=12)
    expected = causal.finish()
    passes = []
    r = rig(REVEALS["threshold"])
    execute = r.engine.runners["target"].execute
    monkeypatch.setattr(r.engine.runners["target"], "execute", lambda slices: passes.append(
        {s.run.see for s in slices}) or execute(slices))
    for i, tokens in enumerate(PROMPTS):
        r.add(f"causal {i}", tokens, "causal", max_tokens=12)
        r.add(f"blocks {i}", tokens, "blocks", max_tokens=LENGTHS[i])
    answers = r.finish()
    assert len(passes) == r.steps
    assert passes.count({"causal", "block"}) >= 12
    for i, tokens in enumerate(PROMPTS):
        assert same(answers[f"causal {i}", 0], expected[str(i), 0])
        assert answers[f"blocks {i}", 0].tokens == reference(tokens, LENGTHS[i], **REVEALS["threshold"],
                                                             temperature=0.0)[0]


class Second(Autoregressive):
    roles = ("second",)


def test_beside_a_second_model() -> None:
    options = {"models": {"target": NET, "second": model("hybrid")}, "more": {"second": Second()}}
    r = rig(REVEALS["threshold"], **options, pages=30, page_size=4)
    other = Rig({"target": model("hybrid")})
    for i, tokens in enumerate(PROMPTS):
        r.add(f"blocks {i}", tokens, max_tokens=LENGTHS[i])
        r.add(f"second {i}", tokens, "second", max_tokens=15)
        other.add(str(i), tokens, max_tokens=15)
    answers, expected = r.finish(), other.finish()
    assert r.engine.stats.preemptions > 0
    for i, tokens in enumerate(PROMPTS):
        assert same(answers[f"second {i}", 0], expected[str(i), 0])
        assert answers[f"blocks {i}", 0].tokens == reference(tokens, LENGTHS[i], **REVEALS["threshold"],
                                                             temperature=0.0)[0]


def test_a_finished_block_holds_the_keys_of_its_final_tokens() -> None:
    """Once a block is done, the cache holds what one pass over the finished text writes, in every layer."""
    r = rig(REVEALS["one a pass"], page_size=8)
    r.add("a", PROMPTS[5], max_tokens=20)
    checked = 0
    while r.engine.has_work:
        r.step()
        if not r.engine.scheduler.running:
            continue
        (seq,) = r.engine.scheduler.running
        held = r.store.held(seq.id)
        assert held % BLOCK == 0
        if held <= checked or held < seq.prompt_len:
            continue
        checked = held
        fresh = Rig(NET, page_size=8, prefix_caching=False)
        fresh.engine.strategies["prefill"] = BlockDiffusion(MASK, BLOCK)
        fresh.add("b", [*seq.tokens[:held], 0], "prefill", max_tokens=4)
        fresh.step()
        for layer in range(NET.config.num_layers):
            for ours, theirs in zip(rows(r, seq.id, layer, held), rows(fresh, "b/0", layer, held)):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert checked == 32                                 # of 33 tokens: all before the last block


def rows(r: Rig, seq_id: str, layer: int, count: int) -> list[torch.Tensor]:
    """K and V of a sequence's first positions, read through its page table: (count, heads, dim) each."""
    holding = r.store._holding(seq_id, "target")
    size = r.store.page_size
    return [torch.stack([x[holding.pages[p // size], :, p % size] for p in range(count)])
            for x in r.store.views["target"].kv(layer)]


def test_an_end_token_inside_a_block_ends_the_output() -> None:
    whole = reference(PROMPTS[6], 24, **REVEALS["threshold"], temperature=0.0)[0]
    at = next(i for i in range(4, 24) if (len(PROMPTS[6]) + i) % BLOCK < 3 and whole[i] not in whole[:i])
    r = rig(REVEALS["threshold"], eos_token_ids=(whole[at],))
    answer = r.one(PROMPTS[6], max_tokens=24)
    assert (answer.tokens, answer.finish_reason) == (whole[:at + 1], FinishReason.STOP)
    answer = r.one(PROMPTS[6], max_tokens=24, ignore_eos=True)
    assert (answer.tokens, answer.finish_reason) == (whole, FinishReason.LENGTH)


def test_prefixes_are_shared_among_blocks_and_never_with_causal_requests() -> None:
    r = rig(REVEALS["threshold"])
    text = prompt(34, seed=1)
    first: Answer = r.one(text, "blocks", max_tokens=9)
    assert r.one(text, "causal", max_tokens=9).metrics.cached_tokens == 0
    again = r.one(text, "blocks", max_tokens=9)
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 32)
    assert again.tokens == first.tokens
    assert r.one(text[:18], "blocks", max_tokens=2).metrics.cached_tokens == 16
    assert r.one(text, "causal", max_tokens=9).metrics.cached_tokens == 32


def test_samples_fork_the_prompt() -> None:
    r = rig(REVEALS["threshold"])
    r.add("a", PROMPTS[6], n=3, max_tokens=10, temperature=0.9, seed=5)
    answers = r.finish()
    for index in range(3):
        assert answers["a", index].tokens == reference(PROMPTS[6], 10, **REVEALS["threshold"], temperature=0.9,
                                                       seed=5 + index)[0]
    assert len({tuple(a.tokens) for a in answers.values()}) == 3


def test_what_block_diffusion_refuses() -> None:
    r = rig(REVEALS["threshold"])
    with pytest.raises(InvalidParams, match="prompt_logprobs"):
        r.add("a", PROMPTS[0], prompt_logprobs=1)
    with pytest.raises(ConfigError, match="block_size is 6; strategy 'blocks' needs a multiple of 4"):
        rig({}, page_size=6)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 7; strategy 'blocks' needs at least 8"):
        rig({}, max_num_batched_tokens=7)
    r.check_empty()
