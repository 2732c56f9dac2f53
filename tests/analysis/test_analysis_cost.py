from __future__ import annotations

import dataclasses

import pytest
import torch
from traced import MODELS, Cached, MultiplyAdds, build, config, run

from ridgeline.analysis import forms
from ridgeline.analysis.cost import computed_scores, count, tally
from ridgeline.analysis.cost_recurrent import long, pieces
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.shard import sharded
from ridgeline.analysis.spec import Matrix
from ridgeline.analysis.work import COMPONENTS, KINDS, Rows, Work, decode, totals, visible_pairs
from ridgeline.batch import whole
from ridgeline.decoding.base import Run
from ridgeline.errors import ConfigError, UnsupportedModel


def plan(name: str, **options: object):
    return plan_of(config(name), name=name, **options)


def only(works: list[Work], component: str, layer: int | None = 0) -> Work:
    found = [w for w in works if w.component == component and w.layer == layer]
    assert len(found) == 1, found
    return found[0]


def flops(works: list[Work], *kinds: str) -> int:
    return sum(w.flops for w in works if w.kind in kinds)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(1,), (7,), (5, 9)])
def test_products_are_those_that_torch_computes(name, lengths):
    """Whole sequences without a cache: torch's attention computes every pair of a sequence's tokens."""
    model = build(name)
    counted = run(model, whole(lengths, torch.ones(sum(lengths), dtype=torch.int64)))
    works = count(plan(name, kernels="torch"), [Rows(0, n, n) for n in lengths])
    assert flops(works, "linear") == 2 * (counted.total() - counted.cores())
    if name != "qwen3.5":
        width = sum(4 * a.heads * a.head_dim for a in plan(name).attention_layers())
        assert 2 * counted.cores() == width * sum(n * n for n in lengths)


@pytest.mark.parametrize("name", ["llama", "llama-one-key-head", "qwen3"])
@pytest.mark.parametrize("rows", [[Rows(12, 4, 4)], [Rows(7, 1, 1)] * 3, [Rows(0, 8, 8), Rows(3, 1, 1)]])
def test_products_behind_a_cache_are_those_that_torch_computes(name, rows):
    """Contexts that fill whole pages: torch's paged attention computes all of a page."""
    cached = Cached(build(name))
    for index, row in enumerate(rows):
        cached.fill(str(index), row.start)
    _, counted = cached.step({str(index): Run("target", [1] * row.tokens) for index, row in enumerate(rows)})
    works = count(plan(name, kernels="torch"), [row._replace(wanted=row.tokens) for row in rows])
    assert flops(works, "linear", "attention") == 2 * counted.total()
    assert flops(works, "attention") == 2 * counted.cores()


@pytest.mark.parametrize("name", MODELS)
def test_every_component_comes_once(name):
    for counting in ("executed", "chapter"):
        works = count(plan(name), [Rows(5, 3, 1)], counting)
        assert len({w.key for w in works}) == len(works)
        assert {w.component for w in works} <= set(COMPONENTS) and {w.kind for w in works} <= set(KINDS)
        assert [w.layer for w in works if w.layer is not None] == sorted(w.layer for w in works if w.layer is not None)


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
@pytest.mark.parametrize("counting", ["executed", "chapter"])
def test_a_tally_is_the_sum_of_the_works(name, counting):
    spec, step = plan(name), [Rows(5, 3, 1), Rows(40, 1, 1)]
    works = count(spec, step, counting)
    assert tally(spec, step, counting) == totals(works)
    assert tally(spec, step, counting, ("linear",)) == totals(w for w in works if w.kind == "linear")
    assert tally(spec, []) == totals([])


def test_the_head_computes_wanted_rows_alone():
    spec = plan("llama")
    assert only(count(spec, [Rows(0, 9, 1)]), "head", None).flops == 2 * spec.hidden * spec.vocab
    assert not [w for w in count(spec, [Rows(0, 9, 0)]) if w.component in ("head", "final_norm", "sample")]
    assert count(spec, []) == [] and count(spec, [Rows(4, 0, 0)]) == []


def test_another_counting_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"counting is 'both'; valid: executed, chapter"):
        count(plan("llama"), [Rows(0, 1, 1)], "both")
    with pytest.raises(ConfigError, match=r"type 'q9' .* known: f32, f16"):
        Matrix.of(2, 2, "q9")


# Recurrent mixers.

def recurrent(works: list[Work]) -> int:
    return sum(w.flops for w in works if w.component == "mixer.core")


@pytest.mark.parametrize("rows", [
    [Rows(0, 1, 1)], [Rows(9, 1, 1)] * 3, [Rows(0, 4, 1)], [Rows(0, 100, 1)], [Rows(30, 50, 1)],
    [Rows(0, 80, 1), Rows(5, 1, 1)], [Rows(0, 70, 1), Rows(0, 20, 1)],
    [Rows(7, 5, 5, states=5)], [Rows(8, 4, 4, parents=(-1, 0, 0, 1))]])
def test_the_delta_rule_computes_what_torch_computes(rows):
    """Products with the state are matrix products but for the outer product that is added to it, and the triangular system."""
    cached = Cached(build("qwen3.5"))
    runs = {}
    for index, row in enumerate(rows):
        cached.fill(str(index), row.start)
        runs[str(index)] = Run("target", [1] * row.tokens, parents=row.parents or None)
    batch, counted = cached.step(runs, rollback=max(r.states for r in rows) - 1)
    kept = [row._replace(states=max(1, sum(s >= 0 for s in batch.state_write[a:b])))
            for row, a, b in zip(rows, batch.offsets, batch.offsets[1:])]
    works = count(plan("qwen3.5", kernels="torch"), kept)
    heads, dk, dv, layers = 4, 8, 4, 2
    apart = 0
    for row in kept:
        if not long(row):
            apart += 2 * dk * dv * row.tokens
    size = max((piece for row in kept if long(row) for piece in pieces(row)), default=0)
    apart += sum(len(pieces(row)) for row in kept if long(row)) * size * size * dv
    delta = 2 * sum(n for name, n in counted.found.items() if name.endswith("linear_attn"))
    assert recurrent(works) == delta + layers * heads * apart
    assert all(w.useful == 6 * heads * dk * dv * w.rows for w in works if w.component == "mixer.core")


def test_recurrent_state_is_read_once_and_written_for_each_position_that_is_kept():
    spec = plan("qwen3.5")
    cached = Cached(build("qwen3.5"))
    layout = cached.store.views["target"].layout
    assert spec.state_bytes() == layout.state_bytes()
    for drafts in (0, 4):
        works = count(spec, decode(50, batch=3, drafts=drafts))
        assert totals(works).state_bytes == 3 * (1 + 1 + drafts) * spec.state_bytes()


# Rows of other kinds.

def test_verification_of_drafts_reads_keys_once_and_computes_every_row():
    spec, B, k, L = plan("llama"), 3, 4, 20
    one, many = count(spec, decode(L, batch=B)), count(spec, decode(L, batch=B, drafts=k))
    each = 4 * 4 * 6
    assert only(many, "attention.core").flops == B * each * sum(L + 1 + i for i in range(k + 1))
    assert only(many, "attention.core").kv_bytes == B * (L + k + 1) * 48
    assert only(many, "attention.heads").kv_bytes == (k + 1) * only(one, "attention.heads").kv_bytes
    assert only(many, "head", None).flops == (k + 1) * only(one, "head", None).flops
    assert only(many, "mlp.up").weight_bytes == only(one, "mlp.up").weight_bytes


def test_a_tree_computes_the_ancestors_of_each_token_alone():
    """Two branches of two: each token sees one or two of the tree, where a chain of four sees up to four."""
    spec, each = plan("llama"), 4 * 4 * 6
    tree = only(count(spec, [Rows(10, 4, 4, parents=(-1, 0, -1, 2))]), "attention.core")
    chain = only(count(spec, [Rows(10, 4, 4)]), "attention.core")
    assert tree.flops == each * (11 + 12 + 11 + 12) and chain.flops == each * (11 + 12 + 13 + 14)
    assert tree.kv_bytes == chain.kv_bytes


def test_rows_of_a_diffusion_block_see_all_of_it():
    spec, each = plan("llama"), 4 * 4 * 6
    block = only(count(spec, [Rows(8, 4, 4, "block", 4)]), "attention.core")
    assert block.flops == each * 4 * 12 and block.kv_bytes == 12 * 48


def test_a_window_bounds_what_is_read_and_computed():
    spec, each = plan("mistral-window"), 4 * 4 * 6
    step = only(count(spec, [Rows(50, 1, 1)]), "attention.core")
    assert step.flops == each * 4 and step.kv_bytes == 4 * 48
    chunk = only(count(spec, [Rows(50, 3, 1)]), "attention.core")
    assert chunk.flops == each * 12 and chunk.kv_bytes == 6 * 48
    short = only(count(spec, [Rows(0, 3, 1)]), "attention.core")
    assert short.flops == each * 6 and short.kv_bytes == 3 * 48


def test_an_int8_cache_has_a_scale_for_each_row_of_a_head():
    wide, narrow = (only(count(plan("llama", kv_dtype=dtype), [Rows(9, 1, 1)]), "attention.core")
                    for dtype in ("float32", "int8"))
    assert wide.kv_bytes == 10 * 4 * 2 * 2 * 6 and narrow.kv_bytes == 10 * (2 * 2 * 6 + 4 * 2 * 2)


def test_scores_come_in_vectors_of_keys():
    """Our kernels compute whole vectors of 16 keys and mask them; torch everything."""
    for rows, window in ((Rows(0, 40, 1), None), (Rows(37, 1, 1), None), (Rows(90, 5, 1), 20),
                         (Rows(3, 4, 4, "block", 8), None), (Rows(30, 3, 3, parents=(-1, -1, -1)), None)):
        scores = computed_scores(rows, window)
        assert scores % 16 == 0 and visible_pairs(rows, window) <= scores < visible_pairs(rows, window) + 32 * rows.tokens
    spec = plan("llama", kernels="native")
    core = only(count(spec, [Rows(0, 40, 1)]), "attention.core")
    pairs, scores = visible_pairs(Rows(0, 40, 1)), computed_scores(Rows(0, 40, 1), None)
    assert core.flops == 2 * 4 * 6 * (pairs + scores) and core.useful == 4 * 4 * 6 * pairs
    assert only(count(spec, [Rows(31, 1, 1)]), "attention.core").flops == 4 * 4 * 6 * 32


def test_bytes_of_our_kernels_are_those_of_their_buffers():
    """d = 20, f = 36, H h = 24, K h = 12: fp32 rows, and int8 forms of 44 bytes a block of 32."""
    works = {w.component: w for w in count(plan("llama", kernels="native", stream=4, precision="int8", quantization="int8"),
                                           [Rows(7, 3, 1)]) if w.layer == 0}
    moved = {name: w.activation_bytes / 3 for name, w in works.items()}
    assert moved["attention.norm"] == moved["mlp.norm"] == 4 * 20 + 8 * 20 + 44
    assert moved["attention.qkv"] == 44 + 4 * 48
    assert moved["attention.heads"] == 8 * 36 + 4 * 12                 # one pass over queries and keys: no norm
    assert moved["attention.core"] == 4 * (24 + 24)
    assert moved["attention.out"] == 4 * 24 + 44 + 44 + 4 * 20
    assert moved["attention.residual"] == 3 * 4 * 20
    assert moved["mlp.up"] == 2 * 44 + 4 * 36 * 5 + 4 * 36 + 88
    assert moved["mlp.down"] == 88 + 4 * 20
    assert {w.compute for w in works.values() if w.kind == "linear"} == {"int8"}
    assert works["attention.core"].compute == "bfloat16"
    exact = count(plan("llama", kernels="native", stream=4, precision="float32", quantization="int8"), [Rows(7, 3, 1)])
    assert {w.compute for w in exact} == {"float32"}
    assert only(exact, "mlp.down").activation_bytes == 3 * 4 * (36 + 20)


def test_a_split_head_is_read_by_halves_for_few_rows():
    spec = dataclasses.replace(plan("llama", quantization="int8"), head_split=True)
    read = {batch: only(count(spec, decode(5, batch=batch)), "head", None).weight_bytes for batch in (1, 4, 5)}
    parameters = 59 * 20
    assert read[5] == spec.head.nbytes and read[1] == read[4] == round(spec.head.nbytes - 0.97 * parameters / 2)
    assert only(count(spec, decode(5), "chapter"), "head", None).weight_bytes == 2 * parameters


# Layers that can be planned alone, and several devices.

MIXTURE = {**config("llama"), "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 12}
DEEPSEEK = {**config("llama"), "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 12, "n_shared_experts": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_mixture_computes_the_chosen_experts_and_reads_those_that_were_touched(tokens):
    works = count(plan_of(MIXTURE), [Rows(0, tokens, 1)])
    d, f, E, k = 20, 12, 8, 2
    assert only(works, "moe.router").flops == 2 * tokens * d * E
    assert only(works, "moe.up").flops + only(works, "moe.down").flops == k * forms.glu(tokens, d, f).flops
    touched = forms.experts_touched(E, k, tokens)
    assert only(works, "moe.down").weight_bytes == round(touched * 2 * d * f)
    assert only(works, "moe.up").weight_bytes == round(touched * 4 * d * f)
    spec = plan_of(MIXTURE)
    assert spec.weight_bytes - spec.embed.nbytes - spec.head.nbytes - 2 * spec.other_parameters == 2 * 3 * (
        2 * d * 6 * (4 + 2) + E * d + E * 3 * d * f)                   # all experts lie in memory


def test_shared_experts_pass_every_token_and_first_layers_are_dense():
    works = count(plan_of(DEEPSEEK), [Rows(0, 3, 1)])
    assert only(works, "mlp.up", 0).flops == 2 * 3 * 2 * 20 * 36
    assert only(works, "moe.up", 1).flops == 2 * 3 * 2 * 20 * 12 * (2 + 1)
    assert only(works, "moe.down", 1).weight_bytes == round(forms.experts_touched(8, 2, 3) * 2 * 20 * 12) + 2 * 20 * 12


class Latent(torch.nn.Module):
    """Latent attention of one sequence, in both orders: keys and values expanded, or the latents met by absorbed heads."""

    H, rank, nope, rope, value = 4, 10, 6, 4, 5

    def forward(self, S: int, P: int, absorbed: bool) -> torch.Tensor:
        L, H = P + S, self.H
        q, latent, key = torch.ones(H, S, self.nope + self.rope), torch.ones(L, self.rank), torch.ones(L, self.rope)
        up_k, up_v = torch.ones(H, self.rank, self.nope), torch.ones(H, self.rank, self.value)
        if absorbed:
            q = torch.cat([q[..., :self.nope] @ up_k.mT, q[..., self.nope:]], -1)        # (H, S, rank + rope)
            keys = torch.cat([latent, key], -1).expand(H, L, -1)
            return (q @ keys.mT) @ latent.expand(H, L, -1) @ up_v
        k = torch.cat([latent.expand(H, L, -1) @ up_k, key.expand(H, L, -1)], -1)
        return (q @ k.mT) @ (latent.expand(H, L, -1) @ up_v)


@pytest.mark.parametrize("S, P, absorbed", [(1, 40, True), (1, 3, True), (30, 0, False)])
def test_latent_attention_takes_the_cheaper_order(S, P, absorbed):
    """Against both orders as torch computes them, scaled from all pairs to those that are visible."""
    model = Latent()
    found = {}
    for order in (True, False):
        with MultiplyAdds(model) as counted:
            model(S, P, order)
        inner = (2 * model.rank + model.rope) if order else model.nope + model.rope + model.value
        masked = model.H * inner * (S * (P + S) - forms.pairs(S, P))
        found[order] = 2 * (counted.total() - masked)
    core = only(count(plan_of(DEEPSEEK), [Rows(P, S, 1)]), "attention.core")
    assert core.flops == min(found.values()) == found[absorbed]


def test_the_latent_cache_is_the_latent_and_one_key():
    spec = plan_of(DEEPSEEK)
    assert spec.kv_bytes_per_token() == 3 * 2 * (10 + 4)               # no factor 2, no heads
    assert only(count(spec, [Rows(9, 1, 1)]), "attention.core").kv_bytes == 10 * 2 * 14
    works = count(spec, [Rows(0, 1, 1)])
    assert only(works, "attention.qkv").flops == 2 * (20 * 16 + 16 * 4 * 10 + 20 * 14)
    assert only(works, "attention.out").flops == 2 * 4 * 5 * 20


def test_a_plan_names_what_a_config_lacks():
    with pytest.raises(UnsupportedModel, match=r"'qwen3_moe' lacks 'num_experts_per_tok'"):
        plan_of({k: v for k, v in MIXTURE.items() if k != "num_experts_per_tok"})
    with pytest.raises(ConfigError, match=r"quantization is 'int3'; valid: None, int8, int4"):
        plan_of(MIXTURE, quantization="int3")


@pytest.mark.parametrize("raw", [config("llama-multi-head"), config("llama"), config("gpt2"), DEEPSEEK, config("qwen3.5")])
def test_devices_share_the_work_and_tell_each_other_the_sums(raw):
    raw = {**raw, "vocab_size": 64}
    whole_model, n = plan_of(raw), 2
    share = sharded(whole_model, n)
    step = decode(9, batch=3)
    one, all_of_it = count(share, step), count(whole_model, step)
    sums = {w.key: w for w in all_of_it}
    for w in one:
        if w.kind in ("linear", "attention", "recurrent") and w.component not in ("moe.router", "attention.qkv"):
            assert w.flops * n == sums[w.key].flops, w
    reduced = [w for w in one if w.component.endswith(".allreduce")]
    assert len(reduced) == 1 + 2 * 3 and all(w.activation_bytes == forms.all_reduce(n, 3 * 20 * 2) for w in reduced)
    gathered = only(one, "head.allgather", None)
    assert gathered.activation_bytes == 3 * 64 * 2 // 2 and not [w for w in all_of_it if w.kind == "collective"]
    assert {w.shape for w in reduced} == {(2, 2)} and gathered.shape == (2, 1)


def test_fewer_kv_heads_than_devices_are_held_by_each():
    spec = plan("llama")
    share = sharded(spec, 4)
    assert {(a.heads, a.kv_heads) for a in share.attention_layers()} == {(1, 1)}
    assert share.kv_bytes_per_token() * 2 == spec.kv_bytes_per_token() and sharded(spec, 1) is spec
    with pytest.raises(ConfigError, match="4 attention heads cannot be shared by 8 devices"):
        sharded(spec, 8)
    with pytest.raises(ConfigError, match="2 KV heads cannot be shared by 3 devices"):
        sharded(dataclasses.replace(spec), 3)
