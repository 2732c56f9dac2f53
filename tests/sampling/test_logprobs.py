from __future__ import annotations

import math

import pytest
import torch

from ridgeline.sampling import top_logprobs


@pytest.mark.parametrize("k", [0, 1, 3, 11, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_plain_definition(k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    # Few different values: many ties, at the boundary too.
    logits = torch.randint(-4, 4, (9, 11)).to(dtype)
    logits[0] = torch.randn(11).to(dtype)
    chosen = torch.randint(0, 11, (9,))
    for got, row, token in zip(top_logprobs(logits, chosen, k), logits.float().tolist(), chosen.tolist()):
        total = math.log(sum(math.exp(v) for v in row))
        order = sorted(range(11), key=lambda i: (-row[i], i))[:k]
        assert got.token == token
        assert got.rank == 1 + sum(v > row[token] for v in row)
        assert got.logprob == pytest.approx(row[token] - total, abs=1e-5)
        assert [i for i, _ in got.top] == order
        assert [v for _, v in got.top] == pytest.approx([row[i] - total for i in order], abs=1e-5)


def test_the_greedy_token_is_the_first_of_the_top() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 4000:] = 1
    chosen = logits.argmax(-1)
    for got in top_logprobs(logits, chosen, 2):
        assert got.rank == 1 and got.top[0] == (got.token, got.logprob) and got.top[1][0] == got.token + 1


def test_a_row_is_the_same_alone() -> None:
    torch.manual_seed(3)
    logits = torch.randn(7, 3001)
    chosen = torch.randint(0, 3001, (7,))
    together = top_logprobs(logits, chosen, 5)
    alone = [top_logprobs(logits[i : i + 1], chosen[i : i + 1], 5)[0] for i in range(7)]
    assert together == alone
