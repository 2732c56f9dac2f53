"""Qwen3.5 (dense text) against transformers, and against itself however the work is cut up."""
from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.batch import Batch, whole
from ridgeline.cache import CacheStore, CacheView, RoleLayout
from ridgeline.errors import UnsupportedModel
from ridgeline.models import build_model
from ridgeline.types import PagedKV, Recurrent
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.load import load_weights

PAGE = 16
WIDTH = 4                                # of the convolution
LENGTH = 150                             # more than two chunks of the delta rule
CONFIG = dict(
    model_type="qwen3_5_text", vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-6,
    linear_conv_kernel_dim=WIDTH, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                     "mrope_section": [1, 1, 0], "mrope_interleaved": True})


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def oracle(**changes):
    """A tiny transformers model with no tensor left at zero or one."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    raw = {**CONFIG, **{k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}}
    config = Qwen3_5TextConfig(**{k: v for k, v in raw.items() if k != "model_type"}, attn_implementation="eager")
    model = Qwen3_5ForCausalLM(config).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if name.endswith("A_log"):
                parameter.copy_(noise)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(noise * 0.5)
            elif parameter.dim() == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def build(raw, weights, dtype=torch.float64):
    model = build_model(raw).to_empty(device="cpu").to(dtype)
    model.load_state_dict(weights, strict=True)
    return model


@functools.cache
def model64():
    return build(CONFIG, oracle().state_dict())


@functools.cache
def expected(n: int, seed: int = 0) -> torch.Tensor:
    """(n, vocabulary): logits of the whole sequence in one pass without a cache."""
    return run(model64(), whole([n], torch.tensor(tokens(n, seed))), None)


@torch.no_grad()
def run(model, batch: Batch, view: CacheView | None) -> torch.Tensor:
    return model.logits(model(batch, view).hidden)


def store_for(model, *, states: int = 64) -> CacheStore:
    layout = RoleLayout(model.state_spec(), model.lm_head.weight.dtype, "tiny")
    return CacheStore({"target": layout}, page_size=PAGE, num_pages=128, num_states=states)


def batch_of(rows: list[tuple[list[int], object, tuple[int, ...] | None]]) -> Batch:
    """rows: (tokens, placement, parents) each."""
    ids, positions, hi, slots, offsets, write = [], [], [], [], [0], []
    for row, place, parents in rows:
        depth = []
        for i in range(len(row)):
            parent = i - 1 if parents is None else parents[i]
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            at = place.start + i
            slots.append(place.pages[at // PAGE] * PAGE + at % PAGE)
        ids += row
        positions += [place.start + d for d in depth]
        hi += [place.start + i + 1 for i in range(len(row))]
        offsets.append(len(ids))
        write += place.state_write
    places = [place for _, place, _ in rows]
    widest = max(len(p.pages) for p in places)
    return Batch(
        positions=torch.tensor(positions), offsets=tuple(offsets), starts=tuple(p.start for p in places),
        lo=torch.zeros(len(ids), dtype=torch.int64), hi=torch.tensor(hi), tokens=torch.tensor(ids),
        parents=tuple(parents for _, _, parents in rows), page_size=PAGE,
        page_table=torch.tensor([p.pages + [0] * (widest - len(p.pages)) for p in places]),
        slots=torch.tensor(slots), state_read=tuple(p.state_read for p in places), state_write=tuple(write))


def feed(model, store: CacheStore, rows: dict[str, list[int]], *, parents=None, rollback: int = 0) -> torch.Tensor:
    """Run the next tokens of several sequences in one batch; logits of all tokens."""
    placed = [(row, store.reserve(seq, "target", row, rollback=rollback, parents=parents), parents)
              for seq, row in rows.items()]
    return run(model, batch_of(placed), store.views["target"])


def in_chunks(model, ids: list[int], size: int) -> torch.Tensor:
    store, out = store_for(model), []
    committed: list[int] = []
    store.add("a", committed)
    for i in range(0, len(ids), size):
        out.append(feed(model, store, {"a": ids[i:i + size]}))
        committed += ids[i:i + size]
        store.commit("a")
        store.check_integrity()
    return torch.cat(out)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"linear_num_value_heads": 2, "linear_value_head_dim": 8},
    {"layer_types": ("full_attention", "linear_attention", "full_attention", "linear_attention")},
    {"linear_conv_kernel_dim": 2}, {"attention_bias": True},
], ids=lambda c: next(iter(c), "plain"))
def test_logits_equal_transformers(changes, tmp_path):
    reference = oracle(**changes)
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    if raw.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = build(raw, weights, torch.float32)
    ids = tokens(LENGTH)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    actual = run(model, whole([LENGTH], torch.tensor(ids)), None)
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(in_chunks(model, ids, 37), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, WIDTH - 1, WIDTH, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65])
def test_chunks_of_any_size_equal_the_whole(size):
    close(in_chunks(model64(), tokens(LENGTH), size), expected(LENGTH))


def test_rows_of_a_batch_at_different_stages_equal_each_alone():
    """A decode step, a long prefill, a short chunk and a first token, four times over, in one batch each time."""
    model = model64()
    schedule = {"decode": (1, 1, 1, 1), "prefill": (70, 1, 5, 60), "short": (3, 17, 2, 1), "late": (0, 1, 20, 40)}
    ids = {seq: tokens(sum(plan), seed) for seed, (seq, plan) in enumerate(schedule.items())}
    store = store_for(model)
    committed: dict[str, list[int]] = {seq: [] for seq in schedule}
    for seq in schedule:
        store.add(seq, committed[seq], publish=False)
    for step in range(4):
        rows = {seq: ids[seq][len(committed[seq]):][:plan[step]] for seq, plan in schedule.items() if plan[step]}
        out = feed(model, store, rows)
        at = 0
        for seq, row in rows.items():
            done = len(committed[seq])
            wanted = expected(len(ids[seq]), list(schedule).index(seq))
            close(out[at:at + len(row)], wanted[done:done + len(row)])
            at += len(row)
            committed[seq] += row
            store.commit(seq)
        store.check_integrity()


@pytest.mark.parametrize("kept", range(6))
def test_a_rejected_run_resumes_from_the_state_of_the_last_kept_token(kept):
    model, ids = model64(), tokens(LENGTH)
    store = store_for(model)
    committed: list[int] = []
    store.add("a", committed)
    feed(model, store, {"a": ids[:62]})
    committed += ids[:62]
    store.commit("a")
    drafts = [*ids[62:62 + kept], *[3] * (6 - kept)]       # the run crosses a chunk and a page
    assert drafts[kept] != ids[62 + kept]
    close(feed(model, store, {"a": drafts}, rollback=6)[:kept], expected(LENGTH)[62:62 + kept])
    committed += ids[62:62 + kept]
    store.commit("a", keep=range(kept))
    store.check_integrity()
    assert store.held("a") == 62 + kept
    close(feed(model, store, {"a": ids[62 + kept:]}), expected(LENGTH)[62 + kept:])


TREE = (-1, 0, 0, 1, 2, -1, 4)           # paths 0-1-3, 0-2-4-6 and 5


def path(token: int) -> list[int]:
    return [*(path(TREE[token]) if TREE[token] >= 0 else []), token]


@pytest.mark.parametrize("leaf", [0, 3, 5, 6])
def test_a_tree_run_equals_its_paths_and_the_kept_path_goes_on(leaf):
    model, ids = model64(), tokens(80)
    nodes = tokens(len(TREE), seed=9)
    store = store_for(model)
    committed: list[int] = []
    store.add("a", committed)
    feed(model, store, {"a": ids[:61]})
    committed += ids[:61]
    store.commit("a")
    out = feed(model, store, {"a": nodes}, parents=TREE, rollback=len(TREE))
    for token in range(len(TREE)):
        alone = ids[:61] + [nodes[i] for i in path(token)]
        close(out[token], run(model, whole([len(alone)], torch.tensor(alone)), None)[-1])
    committed += [nodes[i] for i in path(leaf)]
    store.commit("a", keep=path(leaf))
    store.check_integrity()
    assert store.held("a") == len(committed)
    alone = committed + ids[61:]
    close(feed(model, store, {"a": ids[61:]}), run(model, whole([len(alone)], torch.tensor(alone)), None)[-19:])


def test_a_prefix_hit_resumes_from_the_saved_state():
    model, ids = model64(), tokens(LENGTH)
    store = store_for(model)
    first: list[int] = []
    store.add("a", first)
    feed(model, store, {"a": ids})
    first += ids
    store.commit("a")
    store.free("a")
    second = list(ids)
    store.add("b", second)
    hit = store.match_prefix("b", "target")
    assert hit == LENGTH // PAGE * PAGE
    close(feed(model, store, {"b": ids[hit:]}), expected(LENGTH)[hit:])


def test_training_forward_over_several_sequences_has_gradients_everywhere():
    model = build(CONFIG, oracle().state_dict())
    ids = torch.tensor(tokens(70) + tokens(9, seed=1))
    logits = model.logits(model(whole([70, 9], ids)).hidden)
    close(logits[:70].detach(), in_chunks(model64(), tokens(70), 1))
    close(logits[70:].detach(), in_chunks(model64(), tokens(9, seed=1), 1))
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_gradient_equals_that_of_transformers():
    reference, ids = oracle(), torch.tensor(tokens(70))
    model = build(CONFIG, reference.state_dict(), torch.float32)
    reference.zero_grad()
    torch.nn.functional.cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:]).backward()
    torch.nn.functional.cross_entropy(model.logits(model(whole([70], ids)).hidden)[:-1], ids[1:]).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_bfloat16_loses_no_more_than_transformers_does():
    narrow, model = copy.deepcopy(oracle()).bfloat16(), build(CONFIG, oracle().state_dict(), torch.bfloat16)
    theirs, ours = 0.0, 0.0
    for seed in range(4):                                  # one sequence alone says little: rounding is a lottery
        ids = tokens(LENGTH, seed)
        with torch.no_grad():
            exact = oracle()(torch.tensor([ids])).logits[0]
            theirs += (narrow(torch.tensor([ids])).logits[0] - exact).square().mean().item()
        ours += (in_chunks(model, ids, 7) - exact).square().mean().item()
    assert 0 < ours < 1.2 * theirs


def test_gguf_and_safetensors_give_the_same_model():
    folder = Path(__file__).parents[1] / "data" / "gguf" / "qwen3_5_text"
    logits = []
    for file in (folder, folder / "model-f32.gguf"):
        checkpoint = open_checkpoint(file)
        model = build_model(checkpoint.config)
        load_weights(model, checkpoint, dtype=torch.float32)
        ids = torch.tensor(tokens(90)) % checkpoint.config["vocab_size"]
        logits.append(run(model, whole([90], ids), None))
    assert logits[0].abs().max() > 0.5
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_decays_keep_their_precision_in_a_narrow_model():
    checkpoint = open_checkpoint(Path(__file__).parents[1] / "data" / "gguf" / "qwen3_5_text" / "model-f32.gguf")
    model = build_model(checkpoint.config)
    load_weights(model, checkpoint, dtype=torch.bfloat16)
    wide = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
    assert run(model, whole([5], torch.arange(3, 8)), None).dtype == torch.bfloat16


def test_state_spec_names_what_each_layer_keeps():
    channels = 2 * 2 * 8 + 4 * 12
    for dtype, name in ((torch.float64, "float64"), (torch.bfloat16, "float32")):
        spec = build(CONFIG, oracle().state_dict(), dtype).state_spec()
        linear = Recurrent((("conv", (channels, WIDTH - 1), name), ("state", (4, 8, 12), name)))
        assert spec == (linear, linear, linear, PagedKV(2, 16, 16))


@pytest.mark.parametrize("field, value, said", [
    ("layer_types", ["sliding_attention"] * 4, "sliding_attention"),
    ("linear_num_value_heads", 3, "linear_num_value_heads 3"),
    ("hidden_act", "swoosh", "swoosh"),
])
def test_configs_without_an_implementation_are_refused_by_name(field, value, said):
    with pytest.raises(UnsupportedModel, match=said):
        build_model({**CONFIG, field: value})
