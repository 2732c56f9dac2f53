"""Engines over tiny random fp64 models, driven step by step. Shared by tests/engine and tests/strategies.

fp64, so that rounding that depends on the shape of a batch never decides between two tokens.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.batch import whole
from ridgeline.cache import CacheStore, RoleLayout
from ridgeline.decoding import build_strategy
from ridgeline.decoding.base import Strategy
from ridgeline.engine import Engine
from ridgeline.models import build_model
from ridgeline.models.base import CausalLM
from ridgeline.runner import Runner
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import EngineRequest, FinishReason, RequestMetrics, StepOutput, TokenLogprobs

torch.set_num_threads(1)

VOCAB, WINDOW, MASK = 24, 6, 23
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "softmax": {**COMMON, "model_type": "llama"},
    "sliding": {**COMMON, "model_type": "mistral", "sliding_window": WINDOW},
    "hybrid": {**COMMON, "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_key_head_dim": 8,
               "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    "blocks": {**COMMON, "model_type": "sdar"},
    "drafter": {**COMMON, "model_type": "hidden_drafter", "num_hidden_layers": 1},
}


@functools.cache
def model(kind: str, seed: int = 0, noise: float = 0.0, vocab: int = VOCAB, sharpness: float = 1.5) -> CausalLM:
    """A model with every weight random. noise: how far it is from the model without noise (for drafts)."""
    built = build_model({**CONFIGS[kind], "vocab_size": vocab}).to(torch.float64).to_empty(device="cpu")
    plus_one = kind == "hybrid"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                values = 0.2 * values + (0.0 if plus_one else 1.0)
            else:
                values = sharpness * values * parameter.shape[-1] ** -0.5
            parameter.copy_(values)
        if noise:
            generator = torch.Generator().manual_seed(seed + 1)
            for parameter in built.parameters():
                parameter.add_(noise * parameter.abs().mean()
                               * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return built.requires_grad_(False)


def prompt(length: int, seed: int = 0, vocab: int = VOCAB - 1) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits(net: CausalLM, tokens: list[int], **options: Any) -> torch.Tensor:
    """(tokens, vocabulary) of one forward pass without a cache."""
    return net.logits(net(whole([len(tokens)], torch.tensor(tokens), **options)).hidden)


@dataclass
class Answer:
    """Everything that one sample of a request gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: Exception | None = None
    metrics: RequestMetrics | None = None

    def add(self, out: StepOutput) -> None:
        assert self.finish_reason is None, f"an output after the end: {out} after {self}"
        self.tokens += out.new_tokens
        self.logprobs += out.logprobs
        if out.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log-probabilities told twice"
            self.prompt_logprobs = out.prompt_logprobs
        self.finish_reason, self.stop_token, self.error = out.finish_reason, out.stop_token, out.error
        self.metrics = out.metrics


def same(a: Answer, b: Answer, tolerance: float = 1e-5) -> bool:
    """Equal tokens and ends; log-probabilities within `tolerance`."""
    return ((a.tokens, a.finish_reason, a.stop_token) == (b.tokens, b.finish_reason, b.stop_token)
            and alike(a.logprobs, b.logprobs, tolerance)
            and alike(a.prompt_logprobs or [], b.prompt_logprobs or [], tolerance))


def alike(a: Iterable[TokenLogprobs | None], b: Iterable[TokenLogprobs | None], tolerance: float = 1e-5) -> bool:
    left, right = list(a), list(b)
    if len(left) != len(right):
        return False
    for x, y in zip(left, right):
        if x is None or y is None:
            if x is not y:
                return False
            continue
        if (x.token, x.rank) != (y.token, y.rank) or abs(x.logprob - y.logprob) > tolerance:
            return False
        if [t for t, _ in x.top] != [t for t, _ in y.top]:
            return False
        if any(abs(p - q) > tolerance for (_, p), (_, q) in zip(x.top, y.top)):
            return False
    return True


class Rig:
    """An engine and its store. Options beyond those named here go to Engine."""

    def __init__(self, models: CausalLM | Mapping[str, CausalLM], strategies: Mapping[str, Strategy] | Iterable[str] = (),
                 *, pages: int = 200, page_size: int = 8, states: int = 64, prefix_caching: bool = True,
                 max_model_len: int = 80, vocab: int = VOCAB, **options: Any):
        nets = {"target": models} if isinstance(models, CausalLM) else dict(models)
        if not isinstance(strategies, Mapping):
            strategies = {name: build_strategy(name) for name in ("autoregressive", *strategies)}
        layouts = {role: RoleLayout(net.state_spec(), torch.float64, f"{role} {id(net)}") for role, net in nets.items()}
        self.store = CacheStore(layouts, page_size=page_size, num_pages=pages, prefix_caching=prefix_caching,
                                num_states=states if any(x.recurrent for x in layouts.values()) else 0)
        self.engine = Engine({role: Runner(net, self.store.views[role]) for role, net in nets.items()}, self.store,
                             strategies, max_model_len=max_model_len, vocab_size=vocab, **options)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.steps = self.rows = 0

    def add(self, name: str, tokens: list[int], strategy: str | None = None, **params: Any) -> None:
        params.setdefault("temperature", 0.0)
        self.engine.add_request(EngineRequest(name, list(tokens), SamplingParams(**params), strategy=strategy))

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        self.store.check_integrity()
        self.steps += 1
        for out in outputs:
            self.answers.setdefault((out.request_id, out.index), Answer()).add(out)
        return outputs

    def finish(self, most_steps: int = 3000) -> dict[tuple[str, int], Answer]:
        """Step until nothing is left to do, and look for leaks."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                self.check_empty()
                return self.answers
            self.step()
        raise AssertionError(f"not finished after {most_steps} steps: {self.engine.stats}")

    def check_empty(self) -> None:
        """No live sequence, every page and state back."""
        assert not self.engine.scheduler.running and not self.engine.scheduler.waiting
        for role, stats in self.store.stats().roles.items():
            assert (stats.pages_used, stats.states_used) == (0, 0), f"{role} leaks: {stats}"
            assert self.store.free_pages(role) == self.store.num_pages
            assert self.store.free_states(role) == self.store.num_states

    def one(self, tokens: list[int], strategy: str | None = None, **params: Any) -> Answer:
        """The first sample of a request run now, alone."""
        name = f"one {self.steps}"
        self.add(name, tokens, strategy, **params)
        return self.finish()[name, 0]


def finished(answers: Mapping[Any, Answer]) -> Counter[str]:
    return Counter(str(a.finish_reason) for a in answers.values())
