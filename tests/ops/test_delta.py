"""The gated delta rule and the causal convolution against loops that restate their definitions in fp64."""
from __future__ import annotations

import math

import pytest
import torch

from ridgeline.batch import Batch, whole
from ridgeline.ops.conv import causal_conv
from ridgeline.ops.delta import CHUNK, CROSSOVER, chunk_bounds, gated_delta, l2_norm

KEY_HEADS, HEADS, DK, DV = 2, 4, 8, 6
RECURRENT, CHUNKED = 10**9, 0            # values of `crossover` that force either form
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0, strength: float = 1.0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k = l2_norm(normal(tokens, KEY_HEADS, DK)), l2_norm(normal(tokens, KEY_HEADS, DK))
    g = -strength * normal(tokens, HEADS).exp()
    values = q * DK ** -0.5, k, normal(tokens, HEADS, DV), g, normal(tokens, HEADS).sigmoid()
    return tuple(t.to(dtype) for t in values)


def oracle(q, k, v, g, beta, state, parents=None):
    """One run, one head and one token at a time -> outputs (n, H, dv) and the state after each token."""
    out, states = torch.zeros(v.shape, dtype=torch.float64), []
    for t in range(len(v)):
        parent = t - 1 if parents is None else parents[t]
        new = torch.empty(HEADS, DK, DV, dtype=torch.float64)
        for h in range(HEADS):
            key, query = k[t, h * KEY_HEADS // HEADS].double(), q[t, h * KEY_HEADS // HEADS].double()
            s = (states[parent][h] if parent >= 0 else state[h]) * math.exp(float(g[t, h]))
            s = s + torch.outer(key, float(beta[t, h]) * (v[t, h].double() - s.T @ key))
            new[h], out[t, h] = s, s.T @ query
        states.append(new)
    return out, states


def ragged(lengths, starts, read, write, parents=()):
    total = sum(lengths)
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    zeros = torch.zeros(total, dtype=torch.int64)
    return Batch(positions=zeros, offsets=tuple(offsets), starts=tuple(starts), lo=zeros, hi=zeros, parents=parents,
                 state_read=tuple(read), state_write=tuple(write))


def pool(slots: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(slots, HEADS, DK, DV, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def close(actual, expected, dtype=torch.float64):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("crossover", [RECURRENT, CHUNKED, CROSSOVER])
@pytest.mark.parametrize("start", [0, 1, 37, CHUNK - 1, CHUNK, 200])
@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 131])
def test_either_form_equals_the_loop_with_states_kept_in_the_middle(length, start, crossover, dtype):
    values = inputs(length, dtype)
    states = pool(8, dtype)
    before = states.clone()
    kept = {length // 3: 4, length // 2: 5, length - 1: 6}
    write = [kept.get(t, -1) for t in range(length)]
    read = 2 if start else -1
    first = before[2].double() if start else torch.zeros(HEADS, DK, DV, dtype=torch.float64)
    out = gated_delta(*values, ragged([length], [start], [read], write), states, crossover=crossover)
    expected, after = oracle(*values, first)
    assert out.dtype == dtype
    close(out, expected, dtype)
    for token, slot in enumerate(write):
        if slot >= 0:
            close(states[slot], after[token], dtype)
    untouched = [s for s in range(8) if s not in write]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("crossover", [RECURRENT, CHUNKED, CROSSOVER])
def test_a_mixed_batch_equals_each_row_alone(crossover):
    lengths, starts = [1, 70, 3, 1, 150, 1, 33], [5, 0, 64, 0, 63, 9, 31]
    read = [0, -1, 1, -1, 2, 3, 4]
    total = sum(lengths)
    values = inputs(total)
    write = [-1] * total
    ends = [sum(lengths[:r + 1]) - 1 for r in range(len(lengths))]
    for slot, end in enumerate(ends, start=5):
        write[end] = slot
    write[ends[4] - 20] = 12                               # a snapshot inside the longest row
    write[ends[2] - 1], write[ends[2] - 2] = 13, 14        # a verified run keeps every state
    states = pool(15)
    before = states.clone()
    batch = ragged(lengths, starts, read, write)
    out = gated_delta(*values, batch, states, crossover=crossover)
    for r, n in enumerate(lengths):
        a = ends[r] + 1 - n
        first = before[read[r]] if read[r] >= 0 else torch.zeros_like(before[0])
        expected, after = oracle(*(t[a:a + n] for t in values), first)
        close(out[a:a + n], expected)
        for i in range(n):
            if write[a + i] >= 0:
                close(states[write[a + i]], after[i])


def test_chunks_end_at_absolute_multiples_and_after_each_kept_state():
    batch = ragged([3, 170], [0, 37], [-1, 0], [-1] * 173)
    assert chunk_bounds(batch, 1, {}) == [(3, 30), (30, 94), (94, 158), (158, 173)]
    assert chunk_bounds(batch, 1, {1: 0, 50: 1, 93: 2, 172: 3}) == [(3, 30), (30, 51), (51, 94), (94, 158), (158, 173)]
    assert chunk_bounds(batch, 0, {0: 4}) == [(0, 1), (1, 3)]


def test_a_slot_may_be_read_by_one_row_and_written_by_an_earlier_one():
    values = inputs(2)
    states = pool(2)
    before = states.clone()
    out = gated_delta(*values, ragged([1, 1], [3, 3], [0, 1], [1, 0]), states)
    for r in range(2):
        expected, after = oracle(*(t[r:r + 1] for t in values), before[r])
        close(out[r:r + 1], expected)
        close(states[1 - r], after[0])


TREE = (-1, 0, 0, -1, 1, 3, 4, 2)        # two roots, siblings, children listed late


def path(parents, token):
    return [*(path(parents, parents[token]) if parents[token] >= 0 else []), token]


@pytest.mark.parametrize("start", [0, 62])
@pytest.mark.parametrize("plain", [2, 70])                 # the other row of the batch: in steps, in chunks
def test_a_tree_equals_each_of_its_paths_run_alone(plain, start):
    n = len(TREE)
    values = inputs(plain + n)
    states = pool(n + 2)
    before = states.clone()
    write = [*[-1] * plain, *range(1, n + 1)]
    batch = ragged([plain, n], [4, start], [0, n + 1 if start else -1], write, parents=(None, TREE))
    out = gated_delta(*values, batch, states)
    first = before[n + 1] if start else torch.zeros_like(before[0])
    close(out[:plain], oracle(*(t[:plain] for t in values), before[0])[0])
    for token in range(n):
        rows = [plain + i for i in path(TREE, token)]
        expected, after = oracle(*(t[rows] for t in values), first)
        close(out[plain + token], expected[-1])
        close(states[1 + token], after[-1])


@pytest.mark.parametrize("strength", [0.0, 1e-4, 30.0, 1e4])
@pytest.mark.parametrize("crossover", [RECURRENT, CHUNKED])
def test_no_decay_and_violent_decay_stay_finite_and_exact(crossover, strength):
    values = inputs(130, torch.float32, strength=strength)
    batch = whole([130])
    out = gated_delta(*values, batch, crossover=crossover)
    close(out, oracle(*values, torch.zeros(HEADS, DK, DV, dtype=torch.float64))[0], torch.float32)


def test_weak_decay_after_violent_decay_loses_no_digits():
    q, k, v, g, beta = inputs(CHUNK, torch.float32)
    g[:20], g[20:] = -5000.0, -1e-3
    out = gated_delta(q, k, v, g, beta, whole([CHUNK]), crossover=CHUNKED)
    close(out, oracle(q, k, v, g, beta, torch.zeros(HEADS, DK, DV, dtype=torch.float64))[0], torch.float32)


@pytest.mark.parametrize("crossover", [RECURRENT, CHUNKED])
def test_garbage_in_unread_slots_and_other_rows_does_not_leak(crossover):
    lengths = [3, 70]
    values = inputs(sum(lengths))
    states = pool(4)
    states[0] = float("nan")                               # slot 0 stands in for "no slot" when the rows are gathered
    out = gated_delta(*values, ragged(lengths, [0, 9], [-1, 1], [-1] * 73), states, crossover=crossover)
    assert out.isfinite().all()
    values[2][:3] = float("nan")
    out = gated_delta(*values, ragged(lengths, [0, 9], [-1, 1], [-1] * 73), states, crossover=crossover)
    assert out[3:].isfinite().all() and out[:3].isnan().all()


def test_without_state_the_gradients_of_both_forms_agree():
    grads = []
    for crossover in (RECURRENT, CHUNKED):
        values = [t.requires_grad_() for t in inputs(70)]
        weight = torch.randn(70, HEADS, DV, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        out = gated_delta(*values, whole([66, 4]), crossover=crossover)
        grads.append(torch.autograd.grad((out * weight).sum(), values))
    for a, b in zip(*grads):
        assert a.abs().max() > 0
        close(a, b)


def conv_oracle(x, weight, history):
    """x: (n, C), history: (C, K-1) -> outputs (n, C) and the last K-1 inputs after each token."""
    keep = weight.shape[1] - 1
    line = torch.cat([history.t(), x])
    out = torch.stack([(line[t:t + keep + 1].t() * weight).sum(-1) for t in range(len(x))])
    return out, [line[t + 1:t + 1 + keep].t() for t in range(len(x))]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_over_rows_shorter_and_longer_than_its_width(width):
    rng = torch.Generator().manual_seed(1)
    lengths, read = [1, 2, 3, 9, 1, 5], [-1, 0, 1, 2, 3, -1]
    total = sum(lengths)
    x = torch.randn(total, 5, generator=rng, dtype=torch.float64)
    weight = torch.randn(5, width, generator=rng, dtype=torch.float64)
    states = torch.randn(4 + total, 5, width - 1, generator=rng, dtype=torch.float64)
    before = states.clone()
    out = causal_conv(x, weight, ragged(lengths, [7] * 6, read, range(4, 4 + total)), states)
    a = 0
    for n, slot in zip(lengths, read):
        history = before[slot] if slot >= 0 else torch.zeros(5, width - 1, dtype=torch.float64)
        expected, after = conv_oracle(x[a:a + n], weight, history)
        close(out[a:a + n], expected)
        for i in range(n):
            assert torch.equal(states[4 + a + i], after[i])
        a += n


def test_convolution_over_a_tree_equals_each_path():
    rng = torch.Generator().manual_seed(2)
    n = len(TREE)
    x = torch.randn(n + 1, 5, generator=rng, dtype=torch.float64)
    weight = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    states = torch.randn(n + 2, 5, 3, generator=rng, dtype=torch.float64)
    before = states.clone()
    batch = ragged([1, n], [4, 9], [0, 1], [-1, *range(2, n + 2)], parents=(None, TREE))
    out = causal_conv(x, weight, batch, states)
    for token in range(n):
        expected, after = conv_oracle(x[[1 + i for i in path(TREE, token)]], weight, before[1])
        close(out[1 + token], expected[-1])
        assert torch.equal(states[2 + token], after[-1])


def test_bfloat16_inputs_survive_the_state_exactly():
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(6, 5, generator=rng).bfloat16()
    weight = torch.randn(5, 4, generator=rng).bfloat16()
    states = torch.zeros(2, 5, 3)
    together = causal_conv(x, weight, whole([6]))
    first = causal_conv(x[:2], weight, ragged([2], [0], [-1], [-1, 0]), states)
    second = causal_conv(x[2:], weight, ragged([4], [2], [0], [-1] * 4), states)
    assert together.dtype == torch.bfloat16
    assert torch.equal(torch.cat([first, second]), together)
