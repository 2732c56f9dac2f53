"""Events of native calls: every part of every layer once a pass, in order, within the pass's time; none when off."""
from __future__ import annotations

import time
from pathlib import Path

import torch
from native_kit import Paged, on_native, tokens

from ridgeline.native.layers import NativeNorm
from tiny_checkpoint import write_model

torch.set_num_threads(1)

ATTENTION = ["attention.norm", "attention.qkv", "attention.heads", "attention.core", "attention.out", "attention.residual"]
FEED = ["mlp.norm", "mlp.up", "mlp.down", "mlp.residual"]


def test_events_are_complete_and_in_order(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=3)
    model, _ = on_native(tmp_path)
    norm = model.model.norm
    assert isinstance(norm, NativeNorm)
    engine, paged = norm.engine, Paged(model)
    paged.logits([tokens(9)])
    assert engine.take_trace() == []
    engine.trace(True)
    start = time.monotonic_ns()
    paged.logits([tokens(9, 1), tokens(5, 2)])
    end = time.monotonic_ns()
    engine.trace(False)
    paged.logits([tokens(9)])
    events = engine.take_trace()
    layers = [(i, part) for i in range(3) for part in ATTENTION + FEED]
    assert [(layer, part) for layer, part, *_ in events] == [(None, "embed"), *layers, (None, "final_norm"), (None, "head")]
    assert {rows for _, _, rows, _, _ in events} == {14}
    stamps = [stamp for *_, a, b in events for stamp in (a, b)]
    assert stamps == sorted(stamps) and start <= stamps[0] and stamps[-1] <= end
    assert engine.take_trace() == []
