"""How TTFT, ITL, throughput and memory move with batch and context, and where the one or the other stops helping."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.analysis.cost import count
from ridgeline.analysis.subject import Subject, bound_of
from ridgeline.analysis.work import decode, totals

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
LARGEST_BATCH, LARGEST_CONTEXT = 1 << 10, 1 << 24      # beyond which nothing is looked for
STOPS = 0.05                   # batching stops helping where doubling it gives less than a twentieth more tokens a second


def sweep(subject: Subject, *, batch: int, context: int, output: int,
          longest: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Rows over batch at this context and over context at this batch, predicted. longest: positions of the model."""
    batches = sorted({*BATCHES, batch})
    most = longest or subject.spec.max_context or max(CONTEXTS) + output
    contexts = sorted({*(c for c in CONTEXTS if c + output <= most), context})
    return {"batch": [point(subject, b, context, output) for b in batches],
            "context": [point(subject, batch, c, output) for c in contexts]}


def point(subject: Subject, batch: int, context: int, output: int) -> dict[str, Any]:
    """ttft_s: of one prompt of `context` tokens that comes alone; itl_s: at the middle of the answer; tokens_per_s: of all."""
    step = decode(context + output // 2, batch=batch)
    found = subject.predict(step)
    itl = sum(p.seconds for p in found)
    return {"batch": batch, "context": context, "ttft_s": subject.prefill_s(context), "itl_s": itl,
            "tokens_per_s": batch / itl if itl else None, "memory_bytes": subject.memory_bytes(batch, context + output),
            "fits": subject.memory_bytes(batch, context + output) <= subject.hardware.memory_bytes, "bound": bound_of(found),
            "measured_ttft_s": None, "measured_itl_s": None, "measured_tokens_per_s": None}


def limits(subject: Subject, *, batch: int, context: int, output: int) -> dict[str, Any]:
    """Where things turn, None for where they do not.

    batch_compute: from which batch on a decoding step computes its linear layers for longer than it reads their weights;
    batch_kv: from which on it reads more keys and values than weights; batch_memory: sequences that fit the memory;
    batch_stops: from which on doubling gives less than a twentieth more tokens a second; kv_overtakes_context: from which
    context on, at this batch, keys and values outweigh the weights that a step reads.
    """
    cache = subject.cache_bytes(1, context + output)
    room = subject.hardware.memory_bytes - subject.spec.weight_bytes
    alone = count(subject.spec, decode(context))         # a step of B sequences is B times as much, weights apart
    sums, linear = totals(alone), [w for w in alone if w.kind == "linear"]
    computing = sum(w.flops / subject.hardware.peak(w.compute) for w in linear)
    reading = sum(w.weight_bytes for w in linear) / subject.hardware.bandwidth
    moved = sums.kv_bytes + sums.state_bytes
    return {
        "batch_compute": math.ceil(reading / computing) if computing else None,
        "batch_kv": math.ceil(sums.weight_bytes / moved) if moved else None,
        "batch_memory": max(0, room // cache) if cache else None,
        "batch_stops": first(lambda b: 2 * subject.decode_s(b, context) <= (1 + STOPS) * subject.decode_s(2 * b, context),
                             LARGEST_BATCH),
        "kv_overtakes_context": first(lambda c: _kv_outweighs(subject, batch, c), LARGEST_CONTEXT)}


def _kv_outweighs(subject: Subject, batch: int, context: int) -> bool:
    sums = totals(count(subject.spec, decode(context)))
    return batch * (sums.kv_bytes + sums.state_bytes) >= sums.weight_bytes


def first(holds: Callable[[int], bool], largest: int) -> int | None:
    """The least number from 1 on for which `holds`, which stays true once it is; None: none up to `largest`."""
    high = 1
    while not holds(high):
        if high >= largest:
            return None
        high *= 2
    low = high // 2                                # holds(low) is false, or low is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def turning(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[float, str]]:
    """(value of `key`, bound) where the bound changes along a sweep."""
    found: list[tuple[float, str]] = []
    for row in rows:
        if not found or found[-1][1] != row["bound"]:
            found.append((row[key], row["bound"]))
    return found
