"""Prefill and decode, component by component: operations, bytes, what bounds them, predicted and measured time, the roof."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.analysis.cost import count
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.predict import Predicted
from ridgeline.analysis.subject import Subject, bound_of
from ridgeline.analysis.work import Step, Totals, Work, totals

SIZES = ("flops", "bytes", "weight_bytes", "activation_bytes", "kv_bytes", "state_bytes")


def stage(name: str, subject: Subject, steps: Sequence[Step], *, batch: int, context: int,
          measured: Mapping[str, float] | None = None, wall_s: float | None = None) -> dict[str, Any]:
    """One stage as an object of the report. steps: its passes; measured: seconds by component over all of them; wall_s: of the
    engine's steps around them."""
    passes = [subject.predict(step) for step in steps]
    found = [p for one in passes for p in one]
    roofs = [roof_s(p.work, subject.hardware, _resident(one)) for one in passes for p in one]
    all_works = [p.work for p in found]
    predicted = sum(p.seconds for p in found)
    components = _components(found, roofs, subject.hardware, measured, predicted if wall_s is None else wall_s)
    chapter = totals(work for step in steps for work in count(subject.spec, step, "chapter"))
    compute, ridge = _ridge(all_works, subject.hardware)
    sums = totals(all_works)
    return {"stage": name, "batch": batch, "context": context, "tokens": sum(r.tokens for step in steps for r in step),
            "passes": len(steps), **_sizes(sums), "useful_flops": sums.useful, "intensity": sums.intensity, "compute": compute,
            "ridge": ridge, "bound": bound_of(found), "roof_s": sum(roofs), "predicted_s": predicted, "measured_s": wall_s,
            "share_of_roof": sum(roofs) / wall_s if wall_s else None,
            "chapter": {"flops": chapter.flops, "bytes": chapter.bytes, "intensity": chapter.intensity},
            "components": components}


def _sizes(sums: Totals) -> dict[str, int]:
    return {size: getattr(sums, size) for size in SIZES}


def _components(found: Sequence[Predicted], roofs: Sequence[float], hardware: Hardware, measured: Mapping[str, float] | None,
                whole: float) -> list[dict[str, Any]]:
    """In the order in which they run; those of all layers together."""
    groups: dict[str, list[int]] = {}
    for index, p in enumerate(found):
        groups.setdefault(p.work.component, []).append(index)
    rows = []
    for component, indexes in groups.items():
        own = [found[i] for i in indexes]
        works = [p.work for p in own]
        sums, roof = totals(works), sum(roofs[i] for i in indexes)
        predicted = sum(p.seconds for p in own)
        seconds = None if measured is None else measured.get(component)
        compute, ridge = _ridge(works, hardware)
        rows.append({
            "component": component, "kind": works[0].kind, "layers": len({w.layer for w in works}), **_sizes(sums),
            "intensity": sums.intensity, "compute": compute, "ridge": ridge, "bound": bound_of(own), "roof_s": roof,
            "predicted_s": predicted, "measured_s": seconds, "share_of_roof": roof / seconds if seconds else None,
            "share_of_time": (predicted if seconds is None else seconds) / whole if whole else 0.0})
    return rows


def _ridge(works: Sequence[Work], hardware: Hardware) -> tuple[str, float | None]:
    """The arithmetic of most operations, and the operations a byte from which on it takes longer than reading."""
    flops: dict[str, int] = {}
    for work in works:
        flops[work.compute] = flops.get(work.compute, 0) + work.flops
    most = max(flops, key=lambda compute: flops[compute], default="")
    return (most, hardware.ridge(most)) if most and flops[most] else ("", None)


def _resident(found: Sequence[Predicted]) -> int:
    """Bytes that a pass reads and the next one reads again: what a cache would have to hold to spare them memory."""
    return sum(p.work.weight_bytes + p.work.kv_bytes + p.work.state_bytes for p in found)


def roof_s(work: Work, hardware: Hardware, resident: int) -> float:
    """The least time: computing at the peak of its arithmetic, reading each byte from where it can be at best.

    Weights, keys and states come from the smallest level that holds all of those of a pass (`resident` bytes); activations,
    written just before, from the smallest that holds them. Without measured levels all come from main memory.
    """
    computing = work.flops / hardware.peak(work.compute) if work.flops else 0.0
    stored = work.weight_bytes + work.kv_bytes + work.state_bytes
    reading = stored / bandwidth(hardware, resident) + work.activation_bytes / bandwidth(hardware, work.activation_bytes)
    return max(computing, reading)


def bandwidth(hardware: Hardware, size: int) -> float:
    """Bytes a second at which data of this size are read again and again, by all threads."""
    levels = [lv for lv in hardware.levels if lv.threads == hardware.threads and lv.capacity >= size and lv.name != "memory"]
    return max((lv.bandwidth for lv in levels), default=hardware.bandwidth)
