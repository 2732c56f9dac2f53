from __future__ import annotations

import pytest
import torch
from traced import MODELS, Cached, build, config, run

from ridgeline.analysis.cost import count
from ridgeline.analysis.read import plan_of
from ridgeline.analysis.spec import Matrix
from ridgeline.analysis.work import COMPONENTS, KINDS, Rows, Work
from ridgeline.batch import whole
from ridgeline.decoding.base import Run
from ridgeline.errors import ConfigError


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
    width = sum(4 * layer.mix.inner.heads * layer.mix.inner.head_dim for layer in plan(name).layers)
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
