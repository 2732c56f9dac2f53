"""Every family against transformers, and against itself: whole, in chunks, in batches, over the cache or without."""
from __future__ import annotations

import model_families as mf
import pytest
import torch
from model_families import FAMILIES, PAGE, Cached, tokens
from transformers import AutoModelForCausalLM

from ridgeline.batch import whole
from ridgeline.decoding.base import Run

LENGTH = 3 * PAGE + 3                      # more than four windows, and no multiple of a page
EVERY = pytest.mark.parametrize("name", FAMILIES)
# One family for each kind of mask and cache is enough where the code under test is not the family's own.
KINDS = pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])


def plain(model, prompt, **options):
    """Logits of one whole sequence without a cache."""
    with torch.no_grad():
        return model.logits(model(whole([len(prompt)], torch.tensor(prompt), **options)).hidden)


@EVERY
def test_logits_equal_those_of_transformers(name, tiny):
    oracle, folder = tiny(name)
    model, prompts = mf.load(folder), [tokens(LENGTH), tokens(5, seed=1)]
    with torch.no_grad():
        expected = torch.cat([oracle(torch.tensor([p])).logits[0] for p in prompts])
        flat = torch.tensor([token for p in prompts for token in p])
        ours = model.logits(model(whole([len(p) for p in prompts], flat)).hidden)
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= 1e-4


@EVERY
def test_chunks_equal_the_whole(name, tiny):
    model = mf.load(tiny(name)[1], dtype=torch.float64)
    prompt, cached = tokens(LENGTH), Cached(model)
    expected = plain(model, prompt)
    for chunk in (1, 2, 3, PAGE - 1, PAGE, PAGE + 1, LENGTH):
        torch.testing.assert_close(cached.prefill(f"in chunks of {chunk}", prompt, chunk), expected,
                                   atol=1e-9, rtol=0)


@EVERY
def test_a_sequence_does_not_notice_its_batch(name, tiny):
    model = mf.load(tiny(name)[1], dtype=torch.float64)
    cached = Cached(model)
    prompts = {f"sequence {i}": tokens(n, seed=i) for i, n in enumerate((LENGTH, 3, 14, 9, 27, 1, 8, 17, 22))}
    chunks = dict(zip(prompts, (5, 1, 3, 9, 1, 1, 8, 2, 11)))
    for sequence, prompt in prompts.items():
        cached.add(sequence, prompt)
    got = {sequence: [] for sequence in prompts}
    at = dict.fromkeys(prompts, 0)
    while runs := {s: Run("target", p[at[s]:at[s] + chunks[s]]) for s, p in prompts.items() if at[s] < len(p)}:
        for sequence, logits in cached.run(runs).items():
            got[sequence].append(logits)
            at[sequence] += len(logits)
            cached.store.commit(sequence)
    for sequence, prompt in prompts.items():
        torch.testing.assert_close(torch.cat(got[sequence]), plain(model, prompt), atol=1e-9, rtol=0)


@EVERY
def test_every_parameter_gets_a_gradient(name, tiny):
    model = mf.load(tiny(name)[1])
    model.logits(model(whole([9, 12], torch.tensor(tokens(21)))).hidden).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@KINDS
def test_a_tree_equals_the_plain_path_to_each_node(name, tiny):
    model = mf.load(tiny(name)[1], dtype=torch.float64)
    prompt, nodes = tokens(2 * PAGE - 3), tokens(9, seed=3)
    parents = (-1, 0, 0, 1, 1, 2, -1, 3, 7)          # two roots; the longest path is longer than the window
    cached = Cached(model)
    committed = list(prompt)
    cached.prefill("tree", committed, 100)
    got = cached.run({"tree": Run("target", nodes, parents=parents)}, rollback=len(nodes))["tree"]
    for i in range(len(nodes)):
        path, node = [], i
        while node >= 0:
            path.insert(0, nodes[node])
            node = parents[node]
        torch.testing.assert_close(got[i], plain(model, prompt + path)[-1], atol=1e-9, rtol=0)
    committed += [nodes[i] for i in (0, 1, 3, 7, 8)]
    cached.store.commit("tree", keep=(0, 1, 3, 7, 8))
    committed.append(7)
    after = cached.run({"tree": Run("target", [7])})["tree"]
    torch.testing.assert_close(after[0], plain(model, committed)[-1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("count", [16, 18], ids=["whole blocks", "a block begun"])
def test_block_causal_equals_transformers_with_a_mask(count, tiny):
    block, prompt = 4, tokens(count)
    oracle, folder = tiny("sdar")
    at = torch.arange(count)
    mask = torch.where(at[None] // block <= at[:, None] // block, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt]), attention_mask=mask[None, None]).logits[0]
    model = mf.load(folder)
    assert (plain(model, prompt, see="block", block=block) - expected).abs().max() <= 1e-4
    cached = Cached(model)
    cached.add("blocks", prompt)
    chunks = [cached.run({"blocks": Run("target", prompt[a:a + 2 * block], see="block", align=block)})["blocks"]
              for a in range(0, count, 2 * block)]
    assert (torch.cat(chunks) - expected).abs().max() <= 1e-4


def test_see_all_lets_every_token_see_its_whole_run(tiny):
    model = mf.load(tiny("sdar")[1], dtype=torch.float64)
    prompt = tokens(10)
    cached = Cached(model)
    cached.add("all", prompt)
    got = cached.run({"all": Run("target", prompt, see="all")})["all"]
    torch.testing.assert_close(got, plain(model, prompt, see="all"), atol=1e-9, rtol=0)
    assert not torch.allclose(got[0], plain(model, prompt)[0])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_bf16_stays_close_to_transformers(name, tiny):
    oracle, folder = tiny(name)
    prompt = tokens(LENGTH)
    with torch.no_grad():
        exact = oracle(torch.tensor([prompt])).logits[0]
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        theirs = half(torch.tensor([prompt])).logits[0].float()
    ours = plain(mf.load(folder, dtype=torch.bfloat16), prompt).float()
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_the_embedding_scale_is_rounded_to_the_dtype(name, tiny):
    model = mf.load(tiny(name)[1], dtype=torch.bfloat16)
    ids = torch.tensor(tokens(4))
    scale = torch.tensor(48 ** 0.5, dtype=torch.bfloat16)
    assert torch.equal(model.embed(ids), model.model.embed_tokens(ids) * scale)


def test_taps_and_wanted_rows(tiny):
    oracle, folder = tiny("llama")
    model, prompt = mf.load(folder), tokens(9)
    batch = whole([9], torch.tensor(prompt))
    batch.taps, batch.wanted = (0, 2, 4), torch.tensor([1, 8])
    with torch.no_grad():
        out = model(batch)
        hidden = oracle(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert out.hidden.shape == (2, 64) and set(out.taps) == {0, 2, 4}
    torch.testing.assert_close(out.hidden, hidden[4][0, [1, 8]], atol=1e-4, rtol=0)     # the last one is normed
    for layer in (0, 2):
        torch.testing.assert_close(out.taps[layer], hidden[layer][0], atol=1e-4, rtol=0)
