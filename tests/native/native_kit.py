"""Models loaded on the native and on the torch backend, run over a paged cache. Shared by tests/native."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from ridgeline.cache import CacheStore, RoleLayout
from ridgeline.config import EngineConfig
from ridgeline.decoding.base import Run
from ridgeline.loading import build, load, open_model
from ridgeline.models.base import CausalLM
from ridgeline.native.lower import Report, lower
from ridgeline.runner import Slice, build_batch
from ridgeline.weights.load import load_weights

PAGE = 16


def on_torch(path: Path, **options: Any) -> CausalLM:
    return _load(path, backend="torch", **options)[0]


def on_native(path: Path, **options: Any) -> tuple[CausalLM, Report]:
    model, report = _load(path, **{"backend": "native", "activation_dtype": "float32", **options})
    assert report is not None
    return model, report


def _load(path: Path, **options: Any) -> tuple[CausalLM, Report | None]:
    config = EngineConfig(**{"dtype": "float32", "threads": 1, **options})
    found = build(open_model(str(path), config), config, config.max_model_len)
    return found.model, load(found, config)


def lowered(path: Path, **options: Any) -> CausalLM:
    """With what has no flag of its own: isa."""
    config = EngineConfig(dtype="float32", backend="native")
    found = build(open_model(str(path), config), config)
    report = lower(found.model, found.checkpoint, **{"threads": 1, **options})
    load_weights(found.model, found.checkpoint, dtype=torch.float32, taken=report.tensors)
    return found.model


def tokens(count: int, seed: int = 0, vocab: int = 64) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def nmse(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean() / expected.square().mean())


class Paged:
    """A model over a cache store: runs slices of sequences and returns their logits."""

    def __init__(self, model: CausalLM, kv: torch.dtype = torch.float32, *, pages: int = 96, prefix_caching: bool = False):
        layout = RoleLayout(model.state_spec(), kv, "tiny")
        self.model = model
        self.store = CacheStore({"target": layout}, page_size=PAGE, num_pages=pages, prefix_caching=prefix_caching,
                                num_states=64 if layout.recurrent else 0)
        self.view = self.store.views["target"]

    @torch.inference_mode()
    def run(self, runs: Mapping[str, Run]) -> dict[str, torch.Tensor]:
        """One forward over the whole of each run; name -> (tokens of the run, vocabulary)."""
        slices = []
        for name, run in runs.items():
            placement = self.store.reserve(name, "target", run.tokens, write=run.written())
            slices.append(Slice(None, run, 0, len(run.tokens), placement))          # type: ignore[arg-type]
        out = self.model(build_batch(slices, self.view.page_size), self.view)
        return dict(zip(runs, self.model.logits(out.hidden).split([s.count for s in slices])))

    def prefill(self, prompts: Mapping[str, Sequence[int]], chunk: int, **options: Any) -> dict[str, torch.Tensor]:
        """Each prompt in chunks of at most this many tokens, side by side -> name -> (prompt, vocabulary)."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            self.store.add(name, list(prompt))
            hit = self.store.match_prefix(name)
            found[name].append(torch.empty(hit, 0))
        at = {name: len(parts[0]) for name, parts in found.items()}
        while open_ := [name for name, prompt in prompts.items() if at[name] < len(prompt)]:
            runs = {n: Run("target", list(prompts[n][at[n]:at[n] + chunk]), **options) for n in open_}
            for name, logits in self.run(runs).items():
                found[name].append(logits)
                at[name] += len(logits)
                self.store.commit(name)
        return {name: torch.cat(parts[1:]) for name, parts in found.items()}

    def logits(self, prompts: Sequence[Sequence[int]], chunk: int = 1000) -> torch.Tensor:
        """Of all tokens of fresh sequences, which are freed again: (tokens, vocabulary)."""
        names = {str(i): prompt for i, prompt in enumerate(prompts)}
        out = torch.cat(list(self.prefill(names, chunk).values()))
        for name in names:
            self.store.free(name)
        return out


def quantised(kind: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """Normal weights in the bytes of a type: (rows, bytes of a row). Of Q4_K random blocks, which gguf cannot quantise."""
    random = np.random.default_rng(seed)
    if kind == "Q4_K":
        raw = random.integers(0, 256, (rows, cols // 256, 144), dtype=np.uint8)
        for at in (0, 2):
            raw[:, :, at:at + 2] = random.uniform(0.001, 0.02, (rows, cols // 256, 1)).astype(np.float16).view(np.uint8)
        return raw.reshape(rows, -1)
    found: np.ndarray = gguf.quants.quantize(random.standard_normal((rows, cols), dtype=np.float32), GGMLQuantizationType[kind])
    return found
