"""`ridgeline explain`: one object that says where the time goes, how far that is from the limit, and what would help."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ridgeline.analysis import sweeps, waterfall
from ridgeline.analysis.advise import Advice, Question, advise, other_hardware, pruned_head, speculation
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.measure import Measured, measure
from ridgeline.analysis.sample import Sample, acceptance, run_sample
from ridgeline.analysis.stages import stage
from ridgeline.analysis.stamps import Span
from ridgeline.analysis.subject import HIGH, LOW, MOST_PRUNED, Subject, chunks
from ridgeline.analysis.work import Step, decode
from ridgeline.llm import LLM

KIND, VERSION = "ridgeline explain", 1
REPEATS = 9                    # of a decoding step
PREFILL_S = 4.0                # of measuring the prefill, unless one takes longer
MEASURED_BATCHES = (1, 8, 32)  # of the sweep, beside the asked one
MEASURED_CONTEXTS = (128, 2048)
SAMPLE_S = 15.0                # of prefill in the sample run
DRAFTS = 4
ABOVE = 1.05                   # of the roof: more means that the roof was measured too low
SLOWED = 0.8                   # of the speed at calibration: below it, that is said
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
    found = _measure(llm, subject, q, steps, decoding, progress) if llm is not None else Measurements()
    subject = subject.other(head_share=found.head_share)
    stages = [stage("prefill", subject, steps, batch=1, context=q.context, **_stage(found.prefill)),
              stage("decode", subject, [decoding], batch=q.batch, context=q.context,
                    **_stage([found.decode] if found.decode else [], found.head_s if q.batch <= MOST_PRUNED else None))]
    longest = None if llm is None else llm.engine.max_model_len
    curves = sweeps.sweep(subject, batch=q.batch, context=q.context, output=q.output, longest=longest)
    more: list[Advice] = []
    if llm is not None:
        progress("sweeps")
        _measure_sweeps(curves, llm, q, stages, found.head_saved_s)
        progress("levers")
        more = _own_levers(llm, subject, q, found)
    advice = advise(subject, q, [*more, *other_hardware(subject, q, [m for m in machines if m.name != subject.hardware.name])])
    result = {
        "kind": KIND, "version": VERSION, "model": model, "hardware": subject.hardware.as_json(),
        "settings": {"batch": q.batch, "context": q.context, "output": q.output, "chunk": subject.chunk,
                     "now": None if subject.now is None else asdict(subject.now), "head_share": subject.head_share,
                     "measured": llm is not None},
        "stages": stages,
        "waterfall": found.sample.request.as_json() if found.sample else None,
        "step_waterfalls": {name: fall.as_json() for name, fall in found.sample.steps.items()} if found.sample else {},
        "sweeps": curves,
        "limits": sweeps.limits(subject, batch=q.batch, context=q.context, output=q.output),
        "memory": _memory(subject, q), "advice": [a.as_json() for a in advice]}
    result["badges"] = badges(result)
    result["verdict"] = verdict(result)
    return Findings(result, subject, q, advice, found.sample.spans if found.sample else [])


@dataclass
class Measurements:
    """prefill: of each pass; head_share: of the head's bytes that a step of a row or two reads; head_s: seconds of the head in
    the sample's steps, None where it is read whole; head_saved_s: by how much that is less than with random rows."""

    prefill: list[Measured] = field(default_factory=list)
    decode: Measured | None = None
    sample: Sample | None = None
    head_share: float = 1.0
    head_s: float | None = None
    head_saved_s: float = 0.0


def _measure(llm: LLM, subject: Subject, q: Question, steps: Sequence[Step], decoding: Step,
             progress: Callable[[str], None]) -> Measurements:
    """Passes with random tokens behind a cache that was filled and not computed; and requests with a text.

    The text tells how much of its head a model prunes: with random rows it can leave out nothing.
    """
    progress("prefill")
    repeats = max(1, min(5, int(PREFILL_S / max(1e-6, subject.prefill_s(q.context))) - 1))
    found = Measurements([measure(llm, step, repeats=repeats) for step in steps])
    progress("decode")
    found.decode = measure(llm, decoding, repeats=REPEATS)
    progress("a request")
    most = max(1, int(SAMPLE_S / max(1e-6, subject.prefill_s(q.context))))
    found.sample = run_sample(llm, q, min(q.batch, most, llm.config.max_num_seqs))
    head = found.sample.steps.get("decode")
    if found.sample.head_scored < 0.99 and found.sample.batch <= MOST_PRUNED and head is not None and "head" in head.parts:
        found.head_share, found.head_s = HIGH + LOW * found.sample.head_scored, head.parts["head"]
        found.head_saved_s = max(0.0, found.decode.seconds[None, "head"] - found.head_s) if q.batch <= MOST_PRUNED else 0.0
    return found


def _stage(found: Sequence[Measured], head_s: float | None = None) -> dict[str, Any]:
    """Seconds by component over all passes, and of the engine's whole steps. head_s: instead of the measured head's."""
    if not found:
        return {}
    seconds: dict[str, float] = {}
    for one in found:
        for (_, component), value in one.seconds.items():
            seconds[component] = seconds.get(component, 0.0) + value
        seconds["dispatch"] += max(0.0, one.step_s - one.pass_s)           # what the engine adds around the pass
    wall = sum(one.step_s for one in found)
    if head_s is not None:
        wall, seconds["head"] = wall - seconds["head"] + head_s, head_s
    return {"measured": seconds, "wall_s": wall}


def _measure_sweeps(curves: dict[str, list[dict[str, Any]]], llm: LLM, q: Question, stages: Sequence[dict[str, Any]],
                    head_saved_s: float) -> None:
    """Some of the sweeps' rows on the machine, where the engine has room for them."""
    room = llm.engine.store.num_pages * llm.config.block_size
    for key, wanted in (("batch", MEASURED_BATCHES), ("context", MEASURED_CONTEXTS)):
        for row in curves[key]:
            batch, context = row["batch"], row["context"] + q.output // 2
            asked = row[key] in (*wanted, q.batch if key == "batch" else q.context)
            if asked and batch <= llm.config.max_num_seqs and batch * (context + 32) <= room and (
                    context + 16 <= llm.engine.max_model_len):
                itl = measure(llm, decode(context, batch=batch), repeats=5, events=False).step_s
                itl -= head_saved_s if batch <= MOST_PRUNED else 0.0
                row.update(measured_itl_s=itl, measured_tokens_per_s=batch / itl)
                if row["context"] == q.context:
                    row["measured_ttft_s"] = stages[0]["measured_s"]


def _own_levers(llm: LLM, subject: Subject, q: Question, found: Measurements) -> list[Advice]:
    """Levers that only a loaded model can tell of: speculation, from the measured time of passes with drafts and what look-up
    would have found in the sample's answer; the pruned head."""
    assert found.sample is not None
    tokens_per_pass, drafted = acceptance(found.sample.prompt, found.sample.answer, DRAFTS)
    seconds = {}
    for rows in (1, 1 + DRAFTS):
        if q.batch * rows <= llm.config.max_num_batched_tokens:
            step = measure(llm, decode(q.context, batch=q.batch, drafts=rows - 1), repeats=REPEATS, events=False).step_s
            seconds[rows] = step - (found.head_saved_s if q.batch * rows <= MOST_PRUNED else 0.0)
    return [speculation(subject, q, tokens_per_pass, drafted, DRAFTS, seconds),
            *pruned_head(subject, q, found.sample.head_scored)]


def _memory(subject: Subject, q: Question) -> dict[str, Any]:
    weights, cache = subject.spec.weight_bytes, subject.cache_bytes(q.batch, q.context + q.output)
    have = subject.hardware.memory_bytes
    return {"weights": weights, "cache": cache, "total": weights + cache, "available": have, "fits": weights + cache <= have,
            "missing": max(0, weights + cache - have), "kv_bytes_per_token": subject.spec.kv_bytes_per_token()}


def badges(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(grade, sentence): what speaks for and against these figures."""
    found: list[tuple[str, str]] = []
    now = result["settings"]["now"]
    hardware, falls = result["hardware"], {"request": result["waterfall"], **result["step_waterfalls"]}
    if not result["memory"]["fits"]:
        found.append(("invalid", f"it does not fit: {result['memory']['missing'] / 1e9:.1f} GB of memory are missing"))
    if not result["settings"]["measured"]:
        found.append(("caution", "nothing was measured: predicted from peaks and bandwidths of data sheets, at the roof"))
        return found
    if hardware["load"] > BUSY:
        found.append(("caution", f"the machine was busy when it was calibrated (load average {hardware['load']:.1f})"))
    if now is not None and min(now.values()) < SLOWED:
        found.append(("caution", f"the machine is slower than when it was calibrated: {now['memory']:.0%} of its reading, "
                                 f"{now['compute']:.0%} of its computing; predictions follow"))
    for name, fall in falls.items():
        if fall is not None:
            share = abs(fall["residual_share"])
            found.append(("valid" if share <= waterfall.MOST_RESIDUAL else "invalid",
                          f"waterfall of {_a(name)}: {fall['residual_share']:+.1%} of {_ms(fall['wall_s'])} have no name"))
    for one in result["stages"]:
        if one["measured_s"]:
            error = one["predicted_s"] / one["measured_s"] - 1
            if one["share_of_roof"] > ABOVE:
                found.append(("caution", f"{one['stage']} is faster than its roof: something slowed the machine while it was "
                                         "calibrated (--recalibrate on an idle one)"))
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
        parts.append(f"{what} is bound by {BOUNDS[one['bound']]}: {_ms(seconds)} {how}, {roof:.0%} of the roof's speed")
    best = next((a for a in result["advice"] if a["pays"] and a["kind"] == "setting"), None)
    text = "; ".join(parts)
    text = text[0].upper() + text[1:]
    memory = result["memory"]
    if not memory["fits"]:
        return (f"It does not fit: weights and cache need {memory['total'] / 1e9:.1f} GB, {result['hardware']['name']} has "
                f"{memory['available'] / 1e9:.1f} GB, {memory['missing'] / 1e9:.1f} GB are missing. If it did: {text}.")
    if best is None:
        return f"{text}. No setting of the engine would help."
    gain, how = (best["predicted_gain"], "predicted") if best["verified_gain"] is None else (best["verified_gain"], "realised")
    return f"{text}. The most there is to gain by a setting: {best['lever']}, {best['metric']} x{gain:.2f} {how}."


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms"
