"""`ridgeline explain`: one object that says where the time goes, how far that is from the limit, and what would help."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.analysis import sweeps, waterfall
from ridgeline.analysis.advise import Advice, Question, advise, speculation
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.measure import Measured, measure
from ridgeline.analysis.sample import Sample, acceptance, run_sample
from ridgeline.analysis.stages import stage
from ridgeline.analysis.stamps import Span
from ridgeline.analysis.subject import Subject, chunks
from ridgeline.analysis.work import Step, decode
from ridgeline.llm import LLM

KIND, VERSION = "ridgeline explain", 1
REPEATS = 9                    # of a decoding step
PREFILL_S = 4.0                # of measuring the prefill, unless one takes longer
MEASURED_BATCHES = (1, 8, 32)  # of the sweep, beside the asked one
MEASURED_CONTEXTS = (128, 2048)
DRAFTS = 4
BUSY = 0.5                     # load average above which something else is measured as well
Progress = Callable[[str], None]


@dataclass
class Findings:
    """The object that is printed, and what the trace file and the A/B runs need beside it."""

    result: dict[str, Any]
    subject: Subject
    question: Question
    advice: list[Advice]
    spans: list[Span] = field(default_factory=list)


def explain(subject: Subject, question: Question, *, llm: LLM | None = None, machines: Sequence[Hardware] = (),
            model: dict[str, Any], progress: Progress = lambda text: None) -> Findings:
    """llm: loaded for this machine, so that it can be measured, with room for question.batch sequences; None: planning only.
    machines: others to look at; model: facts about the model that the report repeats."""
    q = question
    steps: list[Step] = list(chunks(q.context, subject.chunk))
    decoding = decode(q.context, batch=q.batch)
    prefilled: list[Measured] = []
    decoded: Measured | None = None
    sample: Sample | None = None
    falls: dict[str, waterfall.Waterfall] = {}
    if llm is not None:
        progress("prefill")
        repeats = max(1, min(5, int(PREFILL_S / max(1e-6, subject.prefill_s(q.context))) - 1))
        prefilled = [measure(llm, step, repeats=repeats) for step in steps]
        progress("decode")
        decoded = measure(llm, decoding, repeats=REPEATS)
        subject = subject.other(overhead_s=max(0.0, decoded.step_s - decoded.pass_s) + _dispatch(decoded))
        progress("a request")
        sample = run_sample(llm, q)
        falls = {"request": sample.request, **sample.steps}
    stages = [stage("prefill", subject, steps, batch=1, context=q.context, **_measured(prefilled)),
              stage("decode", subject, [decoding], batch=q.batch, context=q.context, **_measured([decoded] if decoded else []))]
    longest = None if llm is None else llm.engine.max_model_len
    found = sweeps.sweep(subject, batch=q.batch, context=q.context, output=q.output, longest=longest)
    if llm is not None:
        progress("sweeps")
        _measure_sweeps(found, llm, q, stages)
    progress("levers")
    more = [] if llm is None or sample is None else _speculation(llm, subject, q, sample)
    advice = advise(subject, q, [*more, *_hardware(subject, q, machines)])
    result = {
        "kind": KIND, "version": VERSION, "model": model, "hardware": subject.hardware.as_json(),
        "settings": {"batch": q.batch, "context": q.context, "output": q.output, "chunk": subject.chunk,
                     "overhead_s": subject.overhead_s, "measured": llm is not None},
        "stages": stages,
        "waterfall": falls["request"].as_json() if falls else None,
        "step_waterfalls": {name: fall.as_json() for name, fall in falls.items() if name != "request"},
        "sweeps": found,
        "limits": sweeps.limits(subject, batch=q.batch, context=q.context, output=q.output),
        "memory": _memory(subject, q), "advice": [a.as_json() for a in advice]}
    result["badges"] = badges(result)
    result["verdict"] = verdict(result)
    return Findings(result, subject, q, advice, [] if sample is None else sample.spans)


def _dispatch(measured: Measured) -> float:
    return sum(s for (_, component), s in measured.seconds.items() if component == "dispatch")


def _measured(found: Sequence[Measured]) -> dict[str, Any]:
    """Seconds by component over all passes, and of the passes."""
    if not found:
        return {}
    seconds: dict[str, float] = {}
    for one in found:
        for (_, component), value in one.seconds.items():
            if component != "dispatch":
                seconds[component] = seconds.get(component, 0.0) + value
    return {"measured": seconds, "wall_s": sum(one.pass_s for one in found)}


def _measure_sweeps(found: dict[str, list[dict[str, Any]]], llm: LLM, q: Question, stages: Sequence[dict[str, Any]]) -> None:
    """Some of the sweeps' rows on the machine, where the engine has room for them."""
    room = llm.engine.store.num_pages * llm.config.block_size
    for key, wanted in (("batch", MEASURED_BATCHES), ("context", MEASURED_CONTEXTS)):
        for row in found[key]:
            batch, context = row["batch"], row["context"] + q.output // 2
            asked = row[key] in (*wanted, q.batch if key == "batch" else q.context)
            if asked and batch <= llm.config.max_num_seqs and batch * (context + 32) <= room and (
                    context + 16 <= llm.engine.max_model_len):
                itl = measure(llm, decode(context, batch=batch), repeats=5, events=False).step_s
                row.update(measured_itl_s=itl, measured_tokens_per_s=batch / itl)
                if row["context"] == q.context:
                    row["measured_ttft_s"] = stages[0]["measured_s"]


def _speculation(llm: LLM, subject: Subject, q: Question, sample: Sample) -> list[Advice]:
    """From the time of passes with drafts, measured, and what look-up would have found in the sample's answer."""
    tokens_per_pass, drafted = acceptance(sample.prompt, sample.answer, DRAFTS)
    seconds = {rows: measure(llm, decode(q.context, batch=q.batch, drafts=rows - 1), repeats=5, events=False).step_s
               for rows in (1, 1 + DRAFTS)} if q.batch * (1 + DRAFTS) <= llm.config.max_num_batched_tokens else None
    return [speculation(subject, q, tokens_per_pass, drafted, DRAFTS, seconds)]


def _hardware(subject: Subject, q: Question, machines: Sequence[Hardware]) -> list[Advice]:
    from ridgeline.analysis.advise import other_hardware

    return list(other_hardware(subject, q, [m for m in machines if m.name != subject.hardware.name]))


def _memory(subject: Subject, q: Question) -> dict[str, Any]:
    weights, cache = subject.spec.weight_bytes, subject.cache_bytes(q.batch, q.context + q.output)
    have = subject.hardware.memory_bytes
    return {"weights": weights, "cache": cache, "total": weights + cache, "available": have, "fits": weights + cache <= have,
            "missing": max(0, weights + cache - have), "kv_bytes_per_token": subject.spec.kv_bytes_per_token()}


def badges(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(grade, sentence): what speaks for and against these figures."""
    found: list[tuple[str, str]] = []
    hardware, falls = result["hardware"], {"request": result["waterfall"], **result["step_waterfalls"]}
    if not result["memory"]["fits"]:
        found.append(("invalid", f"it does not fit: {result['memory']['missing'] / 1e9:.1f} GB of memory are missing"))
    if not result["settings"]["measured"]:
        found.append(("caution", "nothing was measured: predicted from " + ("the calibration of this machine" if hardware["curves"]
                                 else "peaks and bandwidth of data sheets, at the roof")))
        return found
    if hardware["load"] > BUSY:
        found.append(("caution", f"the machine was busy when it was calibrated (load average {hardware['load']:.1f})"))
    for name, fall in falls.items():
        if fall is not None:
            share = abs(fall["residual_share"])
            found.append(("valid" if share <= waterfall.MOST_RESIDUAL else "invalid",
                          f"waterfall of {_a(name)}: {fall['residual_share']:+.1%} of {fall['wall_s'] * 1e3:.1f} ms have no name"))
    for one in result["stages"]:
        if one["measured_s"]:
            error = one["predicted_s"] / one["measured_s"] - 1
            found.append(("valid" if abs(error) <= 0.15 else "caution", f"{one['stage']}: predicted {error:+.0%} off measured"))
    return found


def _a(name: str) -> str:
    return f"a {name}" + (" step" if name in ("prefill", "decode") else "")


BOUNDS = {"memory": "reading weights", "kv": "reading keys and values", "compute": "computing", "overhead": "overhead"}


def verdict(result: dict[str, Any]) -> str:
    """One sentence: the bottleneck of each stage, how far from the roof, and the lever that helps most."""
    parts = []
    for one in result["stages"]:
        seconds = one["measured_s"] or one["predicted_s"]
        roof = one["roof_s"] / seconds if seconds else 0.0
        how = "measured" if one["measured_s"] else "predicted"
        at = f"batch {one['batch']}, context {one['context']:,}"
        what = f"{one['stage']} ({at})" if one["stage"] == "decode" else f"{one['stage']} of {one['tokens']:,} tokens"
        parts.append(f"{what} is bound by {BOUNDS.get(one['bound'], one['bound'])}: {_ms(seconds)} {how}, {roof:.0%} of the roof's speed")
    best = next((a for a in result["advice"] if a["pays"] and a["kind"] == "setting"), None)
    text = "; ".join(parts)
    text = text[0].upper() + text[1:]
    if not result["memory"]["fits"]:
        return (f"It does not fit: weights and cache need {result['memory']['total'] / 1e9:.1f} GB, {result['hardware']['name']} has "
                f"{result['memory']['available'] / 1e9:.1f} GB, {result['memory']['missing'] / 1e9:.1f} GB are missing. If it did: {text}.")
    return text + (f". The most there is to gain by a setting: {best['lever']}, {best['metric']} x{best['predicted_gain']:.2f}."
                   if best else ". No setting of the engine would help.")


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
