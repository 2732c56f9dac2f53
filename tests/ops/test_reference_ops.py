"""Every op against a plain loop over tokens, heads and keys in fp64."""
from __future__ import annotations

import math

import pytest
import torch

from ridgeline.batch import Batch, ancestors, upper, whole
from ridgeline.ops import grouped, reference

HEADS, DIM, VALUE_DIM, PAGE, SCALE = 4, 6, 5, 4, 0.4
TREE = (-1, 0, 0, 2, -1, 3)
# (cache position of the first token, tokens, parents): prefill, decode rows, trees among others of their length,
# verification rows
ROWS = [(0, 9, None), (7, 1, None), (3, 1, None), (12, 1, None), (0, 1, None), (2, 6, None), (5, 6, TREE), (3, 6, TREE),
        (1, 6, None), (4, 3, None), (9, 3, None), (10, 3, None), (0, 3, None)]
IMPLEMENTATIONS = {"row by row": reference.paged_attention, "in groups": grouped.paged_attention}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_batch(rows, see="causal", block=4):
    positions, lo, hi = [], [], []
    for row, (start, count, parents) in enumerate(rows):
        at, end = torch.arange(start, start + count), start + count
        if parents is None:
            positions += at.tolist()
        else:
            positions += [start + int(seen.sum()) - 1 for seen in ancestors(parents)]
        lo += [min(row, start)] * count                       # documents that begin later than the cache does
        hi += upper(at, end, "causal" if parents else see, block).tolist()
    counts = [count for _, count, _ in rows]
    needed = [-(-(start + count) // PAGE) for start, count, _ in rows]
    numbers = iter((torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    table = torch.zeros(len(rows), max(needed), dtype=torch.int64)
    for row, pages in enumerate(needed):
        table[row, :pages] = torch.tensor([next(numbers) for _ in range(pages)])
    return Batch(positions=torch.tensor(positions), lo=torch.tensor(lo), hi=torch.tensor(hi), page_size=PAGE,
                 offsets=tuple(sum(counts[:i]) for i in range(len(rows) + 1)), starts=tuple(r[0] for r in rows),
                 parents=tuple(r[2] for r in rows), page_table=table)


def make_pages(batch, kv_heads):
    """K and V of every row's whole context, and pages that hold them; every slot nobody owns is NaN."""
    count = int(batch.page_table.max()) + 1
    k_pages = torch.full((count, kv_heads, PAGE, DIM), math.nan, dtype=torch.float64)
    v_pages = torch.full((count, kv_heads, PAGE, VALUE_DIM), math.nan, dtype=torch.float64)
    keys, values = [], []
    for row in range(batch.rows):
        k = randn(batch.context(row), kv_heads, DIM, seed=10 + row)
        v = randn(batch.context(row), kv_heads, VALUE_DIM, seed=50 + row)
        for i in range(len(k)):
            page = batch.page_table[row, i // PAGE]
            k_pages[page, :, i % PAGE], v_pages[page, :, i % PAGE] = k[i], v[i]
        keys.append(k)
        values.append(v)
    return keys, values, k_pages, v_pages


def sees(batch, row, i, j, window):
    """Whether token i of the row (index in the run) sees cache position j."""
    start, token = batch.starts[row], batch.offsets[row] + i
    if not batch.lo[token] <= j < batch.hi[token]:
        return False
    at = j if j < start else int(batch.positions[batch.offsets[row] + j - start])
    if window is not None and at <= int(batch.positions[token]) - window:
        return False
    parents = batch.parents[row] if batch.parents else None
    if parents is None or j < start:
        return True
    while i >= 0 and i != j - start:
        i = parents[i]
    return i >= 0


def slow_attention(q, keys, values, batch, window, softcap, sinks):
    out = torch.zeros(len(q), q.shape[1], values[0].shape[-1], dtype=torch.float64)
    for row in range(batch.rows):
        per_head = q.shape[1] // keys[row].shape[1]
        for i in range(batch.offsets[row + 1] - batch.offsets[row]):
            visible = [j for j in range(batch.context(row)) if sees(batch, row, i, j, window)]
            for head in range(q.shape[1]):
                k, v = keys[row][visible, head // per_head], values[row][visible, head // per_head]
                query = q[batch.offsets[row] + i, head]
                scores = [float(x) for x in (k * query).sum(-1) * SCALE]
                if softcap is not None:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                weights = [math.exp(s) for s in scores]
                total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
                for weight, value in zip(weights, v):
                    out[batch.offsets[row] + i, head] += weight / total * value
    return out


OPTIONS = pytest.mark.parametrize("kv_heads, window, softcap, sinks, see", [
    (4, None, None, False, "causal"), (2, None, None, False, "causal"), (1, None, None, True, "causal"),
    (2, 3, None, False, "causal"), (2, 5, 0.7, True, "causal"), (2, None, 0.7, False, "block"),
    (2, 6, None, False, "block"), (2, None, None, True, "all"), (1, 4, 0.7, True, "all")])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@OPTIONS
def test_paged_attention(implementation, kv_heads, window, softcap, sinks, see):
    batch = make_batch(ROWS, see)
    keys, values, k_pages, v_pages = make_pages(batch, kv_heads)
    q, sink = randn(batch.offsets[-1], HEADS, DIM), randn(HEADS, seed=9) if sinks else None
    got = IMPLEMENTATIONS[implementation](q, k_pages, v_pages, batch, scale=SCALE, window=window, softcap=softcap,
                                          sinks=sink)
    expected = slow_attention(q, keys, values, batch, window, softcap, sink)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@OPTIONS
def test_ragged_attention(kv_heads, window, softcap, sinks, see):
    batch = whole([5, 1, 9], see=see, block=4)
    q, sink = randn(15, HEADS, DIM), randn(HEADS, seed=9) if sinks else None
    k, v = randn(15, kv_heads, DIM, seed=1), randn(15, kv_heads, VALUE_DIM, seed=2)
    got = reference.ragged_attention(q, k, v, batch, scale=SCALE, window=window, softcap=softcap, sinks=sink)
    expected = slow_attention(q, k.split([5, 1, 9]), v.split([5, 1, 9]), batch, window, softcap, sink)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_attention_in_slices_of_its_queries(monkeypatch):
    batch = make_batch(ROWS)
    _, _, k_pages, v_pages = make_pages(batch, 2)
    q = randn(batch.offsets[-1], HEADS, DIM)
    at_once = grouped.paged_attention(q, k_pages, v_pages, batch, scale=SCALE)
    largest = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: largest.append(x.numel()) or softmax(x, dim))
    monkeypatch.setattr(reference, "MAX_SCORES", 2000)
    sliced = grouped.paged_attention(q, k_pages, v_pages, batch, scale=SCALE)
    assert max(largest) <= 2000
    torch.testing.assert_close(sliced, at_once, atol=1e-12, rtol=0)


def rows_of(groups):
    return [g if isinstance(g, int) else (g.first, g.last) for g in groups]


def test_rows_of_one_length_make_a_group(monkeypatch):
    batch = make_batch([*ROWS, (6, 70, None), (2, 70, None)])
    assert rows_of(grouped.plan(batch, None, 12)) == [(0, 1), (1, 5), (5, 6), 6, 7, (8, 9), (9, 13), (13, 14), (14, 15)]
    monkeypatch.setattr(grouped, "MAX_ELEMENTS", 2 * 4 * PAGE * 12)          # two rows of four pages
    assert rows_of(grouped.plan(batch, None, 12)) == [
        (0, 1), (1, 3), (3, 5), (5, 6), 6, 7, (8, 9), (9, 11), (11, 13), (13, 14), (14, 15)]


def test_a_group_ends_where_padding_would_cost_more_than_a_call():
    long, short = 400 * PAGE, 10 * PAGE
    batch = make_batch([(long - 1, 1, None)] * 3 + [(short - 1, 1, None)] * 3)
    assert rows_of(grouped.plan(batch, None, 12)) == [(0, 3), (3, 6)]
    assert rows_of(grouped.plan(batch, 8, 12)) == [(0, 6)]                    # through a window all rows are short


def test_a_window_gathers_only_its_pages():
    batch = make_batch([(99, 1, None), (50, 1, None)])
    group, = grouped.plan(batch, 8, 12)
    assert group.pages.shape == (2, 3)
    assert group.pages[0, :2].tolist() == batch.page_table[0, 23:25].tolist()
    assert group.mask.sum(-1).flatten().tolist() == [8, 8]


def test_write_kv_then_read_back_in_the_dtype_of_the_cache():
    batch = make_batch([(0, 3, None), (2, 2, None)])
    batch.slots = torch.tensor([9, 10, 11, 2, 3])
    k_pages, v_pages = (torch.zeros(3, 2, PAGE, d, dtype=torch.bfloat16) for d in (DIM, VALUE_DIM))
    k, v = randn(5, 2, DIM), randn(5, 2, VALUE_DIM, seed=1)
    reference.write_kv(k_pages, v_pages, k, v, batch)
    for token, (page, offset) in enumerate([(2, 1), (2, 2), (2, 3), (0, 2), (0, 3)]):
        assert torch.equal(k_pages[page, :, offset], k[token].bfloat16())
        assert torch.equal(v_pages[page, :, offset], v[token].bfloat16())
    assert k_pages.count_nonzero() == 5 * 2 * DIM


def test_write_kv_in_eight_bits():
    """Against plain loops: the largest magnitude becomes 127, the rest is rounded to nearest, ties to even."""
    batch = make_batch([(0, 3, None), (2, 2, None)])
    batch.slots = torch.tensor([9, 10, 11, 2, 3])
    k_pages, v_pages = (torch.zeros(3, 2, PAGE, d, dtype=torch.int8) for d in (DIM, VALUE_DIM))
    scales = torch.zeros(3, 2, PAGE), torch.zeros(3, 2, PAGE)
    k, v = randn(5, 2, DIM), randn(5, 2, VALUE_DIM, seed=1)
    k[0, 0] = torch.tensor([127.0, 0.5, 1.5, -2.5, -127.0, 3.0])
    k[1, 1] = 0
    reference.write_kv(k_pages, v_pages, k, v, batch, scales)
    assert k_pages[2, 0, 1].tolist() == [127, 0, 2, -2, -127, 3] and scales[0][2, 0, 1] == 1
    assert not k_pages[2, 1, 2].any() and scales[0][2, 1, 2] == 0
    for token, (page, offset) in enumerate([(2, 1), (2, 2), (2, 3), (0, 2), (0, 3)]):
        for head in range(2):
            for pages, scale, x in zip((k_pages, v_pages), scales, (k, v)):
                step = float(scale[page, head, offset])
                row = x[token, head].tolist()
                assert step == pytest.approx(max(abs(a) for a in row) / 127, rel=1e-6)
                for stored, a in zip(pages[page, head, offset].tolist(), row):
                    assert -127 <= stored <= 127 and abs(stored * step - a) <= step * 0.50001
    assert (scales[0] != 0).sum() == 5 * 2 - 1


@pytest.mark.parametrize("d", [1, 7, 20, 64, 96])
def test_hadamard_keeps_products_and_spreads_a_single_dimension(d):
    q, k = randn(3, 2, d), randn(3, 2, d, seed=1)
    torch.testing.assert_close((reference.hadamard(q) * reference.hadamard(k)).sum(-1), (q * k).sum(-1), atol=1e-12, rtol=0)
    one = torch.zeros(d, dtype=torch.float64)
    one[-1] = 1
    size = d & -d
    found = reference.hadamard(one)
    assert not found[:-size].any() and torch.allclose(found[-size:].abs(), torch.full((size,), size ** -0.5).double())
    assert reference.hadamard(q.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_paged_attention_over_eight_bits(implementation):
    """As over the same keys and values dequantised before; scales of slots nobody owns may be anything finite."""
    batch = make_batch(ROWS)
    count = int(batch.page_table.max()) + 1
    generator = torch.Generator().manual_seed(3)
    k8, v8 = (torch.randint(-127, 128, (count, 2, PAGE, d), generator=generator).to(torch.int8) for d in (DIM, VALUE_DIM))
    scales = (torch.rand(count, 2, PAGE, generator=generator) / 100, torch.rand(count, 2, PAGE, generator=generator) / 100)
    q = randn(batch.offsets[-1], HEADS, DIM)
    wide = [x.double() * s[..., None] for x, s in zip((k8, v8), scales)]
    expected = reference.paged_attention(q, *wide, batch, scale=SCALE)
    got = IMPLEMENTATIONS[implementation](q, k8, v8, batch, scale=SCALE, scales=scales)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance, plus_one):
    x, weight, eps = randn(7, 24).to(dtype), randn(24, seed=1).to(dtype), 0.1
    expected = torch.zeros(7, 24, dtype=torch.float64)
    for i in range(7):
        rms = math.sqrt(sum(float(value) ** 2 for value in x[i]) / 24 + eps)
        for j in range(24):
            expected[i, j] = float(x[i, j]) / rms * (float(weight[j]) + plus_one)
    got = reference.rms_norm(x, weight, eps, plus_one)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotate_half_is_a_rotation_of_pairs(rotated):
    x, half = randn(5, 2, 8), rotated // 2
    angle = randn(5, half, seed=1)
    got = reference.rotate_half(x, angle.cos(), angle.sin())
    for token in range(5):
        for head in range(2):
            for pair in range(half):
                turned = complex(x[token, head, pair], x[token, head, pair + half]) * complex(
                    math.cos(angle[token, pair]), math.sin(angle[token, pair]))
                assert abs(turned.real - float(got[token, head, pair])) < 1e-13
                assert abs(turned.imag - float(got[token, head, pair + half])) < 1e-13
    assert torch.equal(got[..., rotated:], x[..., rotated:])


def test_activations():
    def gelu(x):
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))

    def gelu_tanh(x):
        return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))

    formulas = {"silu": lambda x: x / (1 + math.exp(-x)), "swish": lambda x: x / (1 + math.exp(-x)), "gelu": gelu,
                "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "gelu_tanh": gelu_tanh,
                "relu": lambda x: max(x, 0.0)}
    assert formulas.keys() == reference.ACTIVATIONS.keys()
    for name, formula in formulas.items():
        x = randn(50)
        expected = torch.tensor([formula(float(value)) for value in x], dtype=torch.float64)
        torch.testing.assert_close(reference.ACTIVATIONS[name](x), expected, atol=1e-13, rtol=0)
