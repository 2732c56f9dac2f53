"""Whether a cell's numbers mean what they say: badges, each with a grade and a sentence."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.bench.serve.arrivals import CLOSED
from ridgeline.bench.serve.record import Record
from ridgeline.bench.serve.run import Cell
from ridgeline.bench.serve.workloads import DATASETS, Spec

VALID, CAUTION, INVALID = "valid", "caution", "invalid"
LAG_BOUND_S = 0.01
HIT_BOUND = 0.05          # of the tokens of prompts that nobody sent before
LENGTH_BOUND = 0.1
FAILED_BOUND = 0.05


def badges(cell: Cell, summary: dict[str, Any], spec: Spec, *, lag_bound_s: float = LAG_BOUND_S,
           ignore_eos: bool = False) -> list[dict[str, str]]:
    """[{"grade": caution or invalid, "text"}]; one of grade valid if there is nothing to say against the cell."""
    found = [*_errors(summary), *_client(summary, lag_bound_s), *_prefix(summary, spec), *_counts(cell, summary, ignore_eos),
             *_load(cell, summary)]
    return [{"grade": grade, "text": text} for grade, text in found] or [{"grade": VALID, "text": "nothing speaks against it"}]


def grade(found: Sequence[dict[str, str]]) -> str:
    """The worst of several."""
    return max((badge["grade"] for badge in found), key=(VALID, CAUTION, INVALID).index)


Found = list[tuple[str, str]]


def _errors(summary: dict[str, Any]) -> Found:
    failed, whole = summary["failed"], summary["failed"] + summary["completed"]
    found = []
    if not summary["completed"]:
        found.append((INVALID, "no request was answered"))
    if failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["errors"].items())
        found.append((INVALID if failed > FAILED_BOUND * whole else CAUTION,
                      f"{failed} of {whole} requests failed ({kinds}); latencies are those of the others"))
    if summary["interrupted"] or summary["not_sent"] > 0:
        left = summary["interrupted"] + max(0, summary["not_sent"])
        found.append((CAUTION, f"ended early: {left} requests were not finished and are not counted"))
    return found


def _client(summary: dict[str, Any], bound_s: float) -> Found:
    sends, wakeups = summary["client"]["send_lateness_p99_s"], summary["client"]["wakeup_lateness_p99_s"]
    late = max(sends or 0.0, wakeups or 0.0)
    if late <= bound_s:
        return []
    return [(INVALID, f"the client itself was late: sends {_ms(sends)}, wake-ups {_ms(wakeups)} (p99; bound {_ms(bound_s)}); "
                      "it had too little of a processor")]


def _prefix(summary: dict[str, Any], spec: Spec) -> Found:
    rate = summary["prefix_hit_rate"]
    if rate is not None and rate > HIT_BOUND and not DATASETS[spec.dataset].shares:
        return [(INVALID, f"{rate:.0%} of the prompt tokens came from the prefix cache, though every prompt is new: TTFT is "
                          "too low")]
    return []


def _counts(cell: Cell, summary: dict[str, Any], ignore_eos: bool) -> Found:
    good = [r for r in cell.records if r.ok]
    found: Found = []
    if not good:
        return found
    if summary["tokens_counted"] != "usage":
        found.append((CAUTION, "the server reports no usage: tokens are counted as chunks"))
    elif spread := sum(r.spread for r in good):
        found.append((CAUTION, f"in {spread} answers chunks held several tokens; they are spread by the length of the text"))
    asked, came = sum(r.output_len for r in good), sum(r.completion_tokens for r in good)
    if came < (1 - LENGTH_BOUND) * asked:
        why = "the server does not heed ignore_eos" if ignore_eos else "answers ended by themselves; --ignore-eos prevents it"
        found.append((CAUTION, f"{came / asked:.0%} of the asked output tokens came: {why}"))
    found += _prompt_lengths(good)
    return found


def _prompt_lengths(good: Sequence[Record]) -> Found:
    known = [r for r in good if r.prompt_tokens is not None and not r.turn]
    asked, came = sum(r.input_len for r in known), sum(r.prompt_tokens or 0 for r in known)
    # A template or a begin token adds a few, to each prompt alike.
    if known and abs(came - asked) > LENGTH_BOUND * asked + 16 * len(known):
        return [(CAUTION, f"prompts had {came / len(known):.0f} tokens by the server's count; {asked / len(known):.0f} were "
                          "asked for")]
    return []


def _load(cell: Cell, summary: dict[str, Any]) -> Found:
    found: Found = []
    if cell.arrivals.kind == CLOSED and summary["completed"] and summary["steady_window_s"] is None:
        found.append((CAUTION, "all clients were busy for too short a part of the run to tell a steady throughput: "
                               "raise --num-prompts"))
    if 0 < summary["completed"] < 100:
        found.append((CAUTION, f"{summary['completed']} answers: too few for p99 of a request's latency"))
    return found


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"
