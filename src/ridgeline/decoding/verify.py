"""Verification of draft tokens: pure mathematics on distributions, no models, no caches.

Three cases, one entry for a batch of them (`verify_batch`):

* Drafts without a sampled q (n-gram, suffix, greedy), chain or tree: the target's token is sampled at every row as in
  plain decoding, and the path of drafts equal to it is kept (`verify_tree_exact`). No acceptance coin; the output *is*
  the plain seeded output.
* A chain sampled from q: accept while u < p(x) / q(x), then replace the first rejected token by a draw from
  norm(max(0, p - q)) (`verify_sampled_chain`; Leviathan et al., arXiv 2211.17192).
* A tree sampled from q: at each node the children are tried in turn; after a rejection p becomes norm(max(0, p - q))
  (`verify_sampled_tree`; SpecInfer, arXiv 2305.09781).

Each is lossless: tokens come out distributed as p. A rule other than "lossless" puts a pi made of p and q in p's place.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.sampling import inverse_cdf

Rule = Callable[[Tensor, Tensor], Tensor]  # p (k, V), q (k, V) -> pi (k, V)
RowRef = tuple[Tensor, int]  # row i of a tensor (R, V) that is not copied

RULES: Mapping[str, str] = {"lossless": "ridgeline.decoding.verify:lossless"}  # name -> module:function

_NO_MASS = 1e-9  # a residual below this is float32 rounding: p and q are the same distribution


def lossless(p: Tensor, q: Tensor) -> Tensor:
    """pi = p: the output follows the target."""
    return p


def resolve_rule(name: str) -> Rule:
    """The verification rule of that name; `ConfigError` lists the valid names."""
    if name not in RULES:
        raise ConfigError(f"verification rule: got {name!r}; allowed: {', '.join(sorted(RULES))}")
    module, function = RULES[name].split(":")
    rule: Rule = getattr(import_module(module), function)
    return rule


# Drafts without q ------------------------------------------------------------------------------------------------


def verify_tree_exact(
    sampled: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """The path of drafts that agree with the tokens that the target sampled.

    `sampled` (n + 1): the target's token after the last kept token, then after each draft token. `tokens` (n): the
    drafts. `parents` (n): index of each draft's parent among the drafts, -1 for the last kept token; [-1, 0, 1, ...] is
    a chain. Returns the indexes of the accepted drafts, in order, and the token that follows them.
    """
    assert len(sampled) == len(tokens) + 1 and len(parents) == len(tokens), "one sampled token a row"
    child = {(parent, token): i for i, (parent, token) in reversed(list(enumerate(zip(parents, tokens))))}
    path: list[int] = []
    node = -1
    while (following := child.get((node, sampled[node + 1]))) is not None:
        assert following > node, "a parent comes before its children"
        path.append(following)
        node = following
    return path, sampled[node + 1]


# Drafts sampled from q -------------------------------------------------------------------------------------------


def verify_sampled_chain(
    p: Tensor, q: Tensor, draft: Sequence[int], accept_u: Sequence[float], residual_u: float, bonus_u: float
) -> tuple[int, int]:
    """Verifies a chain of k tokens: returns how many are accepted, and the token that follows them.

    p (k + 1, V): the target's distributions, after processors and truncation. q (k, V): exactly the distributions that
    `draft` (k) was sampled from. `accept_u` (k), `residual_u` and `bonus_u` are independent uniform numbers in [0, 1),
    independent of those that sampled the draft.
    """
    request = VerifyRequest(
        tokens=draft,
        p=(p, 0),
        q=[(q, i) for i in range(len(draft))],
        accept_u=accept_u,
        final_u=[*[residual_u] * len(draft), bonus_u],
    )
    (verdict,) = verify_batch([request])
    return len(verdict.path), verdict.token


def verify_sampled_tree(
    p: Tensor,
    q: Tensor,
    tokens: Sequence[int],
    parents: Sequence[int],
    accept_u: Sequence[float],
    final_u: Sequence[float],
) -> tuple[list[int], int]:
    """Verifies a tree of n sampled tokens: returns the accepted path, as indexes of drafts, and the following token.

    p (n + 1, V): the target's distribution after the last kept token, then after each draft. q (n, V), row i:
    exactly the distribution that draft i was sampled from. Siblings are tried in the order of their indexes. Drawn
    independently (with replacement) they share q, and repeated tokens must stay in the tree; drawn without
    replacement, each has the q with the earlier ones removed. `accept_u` (n): one coin a draft. `final_u`: the
    number for the following token, by the number of accepted drafts before it.

    Lossless by induction over siblings from the last: whatever the children before it were, child j is a draw from
    its q_j, so that accepting it with min(1, p_j / q_j) and otherwise going on with p_{j+1} = norm(max(0, p_j - q_j)),
    which the later children or the final draw follow exactly, gives p_j.
    """
    path: list[int] = []
    node = -1
    while True:
        weights = p[node + 1].double()  # (V,), the part of p not yet given to a child
        accepted = None
        for i in (i for i, parent in enumerate(parents) if parent == node):
            weights = weights / weights.sum()
            coin = accept_u[i] * float(q[i, tokens[i]])
            if coin < float(weights[tokens[i]]):
                accepted = i
                break
            residual = (weights - q[i].double()).clamp(min=0)
            # No residual: p and q are the same up to rounding, and the rejection was rounding as well.
            weights = residual if float(residual.sum()) > _NO_MASS else weights
        if accepted is None:
            return path, int(inverse_cdf(weights.unsqueeze(0), [final_u[len(path)]]))
        path.append(accepted)
        node = accepted


# A batch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """The drafts of one sequence and what is needed to judge them.

    Without a sampled q give `sampled` (n + 1), for a tree with `parents`. With it give p (rows first..first+n of a
    tensor), q (one row a draft), `accept_u` (n) and `final_u` (n + 1): the number for the following token, by the
    number of accepted drafts before it (the residual's for 0..n-1, the bonus token's for n).
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None  # None: a chain
    sampled: Sequence[int] | None = None
    p: RowRef | None = None
    q: Sequence[RowRef] | None = None
    accept_u: Sequence[float] = ()
    final_u: Sequence[float] = ()
    rule: str | Rule = "lossless"


@dataclass(frozen=True, slots=True)
class Verdict:
    path: list[int]  # indexes of the accepted drafts, in order; for a chain 0..accepted-1
    token: int  # the token that follows them; it has no KV yet. -1: nothing to choose from


def verify_batch(requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """Verifies the drafts of many sequences together; verdict i is the one that request i gets alone.

    For all chains with q: p and q at the draft tokens are gathered in one go (one gather for each tensor that holds
    rows), come to the host in one transfer, and one residual draw ends all of them.
    """
    verdicts: dict[int, Verdict] = {}
    chains: dict[int, tuple[VerifyRequest, RowRef]] = {}
    for i, request in enumerate(requests):
        chain = list(range(-1, len(request.tokens) - 1))
        parents = chain if request.parents is None else list(request.parents)
        if request.q is None:
            assert request.sampled is not None, "a request without q needs the target's sampled tokens"
            verdicts[i] = Verdict(*verify_tree_exact(request.sampled, request.tokens, parents))
            continue
        target = _target(request, parents)
        if parents == chain:
            chains[i] = (request, target)
        else:
            n, (tensor, first) = len(request.tokens), target
            q = torch.stack([rows[row] for rows, row in request.q])  # (n, V)
            verdicts[i] = Verdict(
                *verify_sampled_tree(
                    tensor[first : first + n + 1], q, request.tokens, parents, request.accept_u, request.final_u
                )
            )
    verdicts.update(zip(chains, _verify_chains(list(chains.values()))))
    return [verdicts[i] for i in range(len(requests))]


def _target(request: VerifyRequest, parents: Sequence[int]) -> RowRef:
    """Where the rows to verify against are: p's own, or pi's for a rule other than "lossless"."""
    assert request.p is not None and request.q is not None, "verification against q needs p"
    n = len(request.tokens)
    assert len(request.q) == n == len(request.accept_u) and len(request.final_u) == n + 1
    if request.rule == "lossless" or not n:
        return request.p
    rule = resolve_rule(request.rule) if isinstance(request.rule, str) else request.rule
    tensor, first = request.p
    p = tensor[first : first + n + 1]  # (n + 1, V)
    q = torch.stack([rows[row] for rows, row in request.q])  # (n, V)
    judged = [parent + 1 for parent in parents]  # the row of p that judges each draft
    pi = p.clone()  # rows after which nothing was drafted have no q: pi = p there
    pi[judged] = rule(p[judged], q)
    return pi, 0


def _verify_chains(chains: Sequence[tuple[VerifyRequest, RowRef]]) -> list[Verdict]:
    if not chains:
        return []
    # p at each draft token of each request, in order, then q at each
    refs: list[RowRef] = [(p, first + j) for request, (p, first) in chains for j in range(len(request.tokens))]
    refs += [ref for request, _ in chains for ref in request.q or ()]
    tokens = [token for request, _ in chains for token in request.tokens]
    values = _gather(refs, [*tokens, *tokens])
    coins = [u for request, _ in chains for u in request.accept_u]
    # u < p / q, strict: with <= a token of probability 0 would pass at u = 0
    passed = [u * q < p for u, p, q in zip(coins, values, values[len(tokens) :], strict=False)]
    accepted: list[int] = []
    start = 0
    for request, _ in chains:
        end = start + len(request.tokens)
        accepted.append([*passed[start:end], False].index(False))
        start = end

    final_p = _rows([(p, first + n) for n, (_, (p, first)) in zip(accepted, chains)])  # (R, V)
    weights = final_p.double()
    rejected = [i for i, (request, _) in enumerate(chains) if accepted[i] < len(request.tokens)]
    if rejected:
        q = _rows([(chains[i][0].q or ())[accepted[i]] for i in rejected])  # (r, V)
        index = torch.tensor(rejected, device=weights.device)
        residual = (weights[index] - q.double()).clamp(min=0)  # (r, V)
        mass = residual.cumsum(-1)[:, -1:]  # (r, 1)
        weights[index] = torch.where(mass > _NO_MASS, residual, weights[index])
    following = inverse_cdf(weights, [request.final_u[n] for n, (request, _) in zip(accepted, chains)]).tolist()
    return [Verdict(list(range(n)), token) for n, token in zip(accepted, following)]


def _gather(refs: Sequence[RowRef], tokens: Sequence[int]) -> list[float]:
    """The value of each row at its token, on the host, by one gather for each tensor and one transfer."""
    parts, order = [], []
    for tensor, members in _by_tensor(refs):
        index = torch.tensor([[refs[i][1], tokens[i]] for i in members], device=tensor.device)  # (m, 2)
        parts.append(tensor[index[:, 0], index[:, 1]])  # (m,)
        order += members
    values = [0.0] * len(refs)
    for i, value in zip(order, torch.cat(parts).tolist() if parts else ()):
        values[i] = value
    return values


def _rows(refs: Sequence[RowRef]) -> Tensor:
    """The rows, copied into one tensor (R, V)."""
    groups = _by_tensor(refs)
    if len(groups) == 1:
        tensor = groups[0][0]
        return tensor[torch.tensor([row for _, row in refs], device=tensor.device)]
    return torch.stack([tensor[row] for tensor, row in refs])


def _by_tensor(refs: Sequence[RowRef]) -> list[tuple[Tensor, list[int]]]:
    """The tensors that the rows lie in, each with the indexes of its refs."""
    groups: dict[int, tuple[Tensor, list[int]]] = {}
    for i, (tensor, _) in enumerate(refs):
        groups.setdefault(id(tensor), (tensor, []))[1].append(i)
    return list(groups.values())
