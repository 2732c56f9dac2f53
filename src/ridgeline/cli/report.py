"""What a finished request looks like to a person and to a program."""
from __future__ import annotations

import shutil
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.types import CompletionOutput, Logprob, RequestOutput

NO_BREAK = "\N{NO-BREAK SPACE}"


def fields(rows: Sequence[tuple[str, str]]) -> str:
    """Labels on the left, texts on the right, wrapped to the terminal (80 columns where there is none).

    A no-break space (U+00A0) in a text keeps a number and its unit on one line.
    """
    left = max(len(label) for label, _ in rows) + 2
    width = max(40, shutil.get_terminal_size().columns)
    lines = []
    for label, text in rows:
        wrapped = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
        lines += [f"{label:{left}}{wrapped[0]}", *(" " * left + line for line in wrapped[1:])]
    return "\n".join(lines).replace(NO_BREAK, " ")


def summary(outputs: list[RequestOutput]) -> str:
    """One line: medians over requests; throughput over the span from the first arrival to the last token."""
    samples = [s.metrics for o in outputs for s in o.outputs if s.metrics is not None]
    prompt, tokens = sum(len(o.prompt_token_ids) for o in outputs), sum(m.completion_tokens for m in samples)
    parts = [f"{prompt} prompt tokens, {tokens} generated"]
    ttft = [m.ttft_s for m in samples if m.ttft_s is not None]
    itl = [gap for m in samples for gap in m.itl_s]
    median = "median " if len(samples) > 1 else ""
    if ttft:
        parts.append(f"{median}TTFT {statistics.median(ttft) * 1e3:.0f} ms")
    if itl:
        parts.append(f"median ITL {statistics.median(itl) * 1e3:.1f} ms")
    ends = [m.finished for m in samples if m.finished is not None]
    span = max(ends) - min(m.arrival for m in samples) if ends else 0.0
    if span > 0 and tokens:
        parts.append(f"{tokens / span:.1f} tokens/s")
    if drafted := sum(m.draft_tokens for m in samples):
        parts.append(f"{sum(m.accepted_tokens for m in samples)} of {drafted} drafts accepted")
    return f"[{'; '.join(parts)}]"


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One prompt: the first sample at the top level, all of them under `samples` where there are several."""
    samples = [_sample(s, len(output.prompt_token_ids)) for s in output.outputs]
    result: dict[str, Any] = {"prompt": output.prompt, **samples[0]}
    if len(samples) > 1:
        result["samples"] = samples
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if p is None else _logprob(p) for p in output.prompt_logprobs]
    if output.error is not None:
        result["error"] = {"type": type(output.error).__name__, "message": str(output.error)}
    return result


def _sample(sample: CompletionOutput, prompt_tokens: int) -> dict[str, Any]:
    m = sample.metrics
    assert m is not None
    result: dict[str, Any] = {
        "text": sample.text, "token_ids": sample.token_ids, "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "metrics": {"queue_s": m.queue_s, "ttft_s": m.ttft_s, "tpot_s": m.tpot_s, "e2e_s": m.e2e_s, "itl_s": m.itl_s,
                    "prompt_tokens": prompt_tokens, "completion_tokens": m.completion_tokens,
                    "cached_tokens": m.cached_tokens, "preemptions": m.preemptions, "draft_tokens": m.draft_tokens,
                    "accepted_tokens": m.accepted_tokens, "target_steps": m.target_steps}}
    if sample.logprobs is not None:
        result["logprobs"] = [_logprob(p) for p in sample.logprobs]
    return result


def _logprob(entry: Logprob) -> dict[str, Any]:
    result: dict[str, Any] = {"token": entry.token, "token_id": entry.token_id, "bytes": list(entry.bytes),
                              "logprob": entry.logprob, "rank": entry.rank}
    if entry.top:
        result["top_logprobs"] = [_logprob(t) for t in entry.top]
    return result
