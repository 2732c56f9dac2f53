"""Apply a lever, run it against what there was, and say what it really gained: interleaved A/B runs with an interval.

Each round runs both sides one after the other, in turn the one and the other first, so that what drifts on the machine meets
both. The gain is the median over rounds of old / new; its interval is a bootstrap over rounds.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline import quality
from ridgeline.analysis.advise import PAYS, Advice, Question, ranked
from ridgeline.analysis.explain import Findings, badges, verdict
from ridgeline.analysis.sample import prompts, text
from ridgeline.bench.serve.stats import interval
from ridgeline.bench.work import random_prompts
from ridgeline.decoding.ngram import NGram
from ridgeline.errors import ConfigError
from ridgeline.llm import LLM
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestMetrics

CLOSE = 0.25                   # realised within so much of predicted: the prediction was good
EVEN = 0.05                    # gains within so much of 1 are alike, whatever their sign
MOST_OUTPUT = 64
QUALITY_LETTERS = 1500         # of the sample text, some 350 tokens: a second or two
Side = Callable[[], float]     # seconds, the less the better


@dataclass
class Bench:
    """What the runs of one `verify` share."""

    llm: LLM
    model: str
    config: Mapping[str, Any]
    question: Question
    seed: int = 1
    texts: dict[int, list[Any]] = field(default_factory=dict)
    compared: LLM | None = None

    def fresh(self, tokens: int) -> list[int]:
        """A prompt that nothing has seen."""
        self.seed += 1
        return random_prompts(1, tokens, self.llm.engine.vocab_size, self.seed)[0]

    def other(self, **changes: Any) -> LLM:
        """The same model under another configuration, beside the first one; its answers may differ."""
        self.compared = LLM(self.model, progress=False, **{**self.config, **changes})
        return self.compared

    def decoding(self, llm: LLM, batch: int | None = None, strategy: str | None = None) -> float:
        """Seconds a token, all sequences together, from when the last of them has begun until the first one ends. The prompts
        are text, and come from the prefix cache after the first run."""
        q = self.question
        batch = q.batch if batch is None else batch
        room = llm.engine.store.num_pages * llm.config.block_size
        if batch > llm.config.max_num_seqs or batch * (q.context + q.output) > room:
            raise ConfigError(f"{batch} sequences of {q.context + q.output} positions do not fit this configuration")
        if batch not in self.texts:
            self.texts[batch] = prompts(llm, batch, q.context)
        found = self.run(llm, self.texts[batch], min(MOST_OUTPUT, q.output), strategy)
        start, end = max(m.first_token or 0.0 for m in found), min(m.last_token or 0.0 for m in found)
        tokens = sum(start < t <= end for m in found for t in m.token_times)
        return (end - start) / max(1, tokens)

    def ttft(self, prompt: Sequence[int]) -> float:
        found = self.run(self.llm, [list(prompt)], 1)[0].ttft_s
        assert found is not None
        return found

    def run(self, llm: LLM, given: Sequence[Any], output: int, strategy: str | None = None) -> list[RequestMetrics]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        outputs = llm.generate([p if isinstance(p, str) else {"prompt_token_ids": p} for p in given], params,
                                    strategy=strategy)
        for one in outputs:
            if one.error is not None:
                raise one.error
        return [o.metrics for o in outputs]


def verify(findings: Findings, llm: LLM, model: str, config: Mapping[str, Any], *, rounds: int,
           levers: Container[str] | None = None, progress: Callable[[str], None] = lambda text: None) -> None:
    """Run every lever that the engine has, and put what came out into the advice and the result. model, config: what `llm` was
    loaded with; levers: keys of SIDES that are tried, None = all."""
    bench = Bench(llm, model, config, findings.question)
    verified = []
    for advice in findings.advice:
        if advice.verify is None or (levers is not None and advice.verify not in levers):
            continue
        progress(f"verifying {advice.lever}")
        try:
            old, new = SIDES[advice.verify](bench, advice)
            gains = interleaved(old, new, rounds)
        except ConfigError as error:                       # no room for it in this configuration: said, and left alone
            verified.append({"lever": advice.lever, "skipped": str(error)})
            continue
        advice.verified_gain = statistics.median(gains)
        advice.interval = interval(gains, "median")
        if bench.compared is not None:
            advice.cost = f"{_quality(llm, bench.compared)}; {advice.cost.partition('; ')[2]}"
            bench.compared = None
        verified.append(outcome(advice, rounds))
    findings.advice = ranked(findings.advice)
    findings.result["advice"] = [a.as_json() for a in findings.advice]
    findings.result["verification"] = verified
    findings.result["badges"] = [*badges(findings.result), summary(verified)]
    findings.result["verdict"] = verdict(findings.result)


def interleaved(old: Side, new: Side, rounds: int) -> list[float]:
    """Gains (old / new) of each round; one round before them warms up both sides."""
    gains = []
    for index in range(rounds + 1):
        if index % 2:
            after, before = new(), old()
        else:
            before, after = old(), new()
        gains.append(before / after)
    return gains[1:]


def _quality(llm: LLM, other: LLM) -> str:
    """What a lever that changes answers costs, on the beginning of the sample text."""
    if llm.tokenizer is None or llm.loaded.checkpoint.format == "dummy":
        return "quality (not measured: no text to measure it on)"
    found = quality.measure(other, text()[:QUALITY_LETTERS], reference=llm, context=min(512, llm.engine.max_model_len))
    assert found.mean_kl is not None and found.reference_perplexity is not None
    return (f"quality: KL {found.mean_kl:.2g} nats a token, perplexity {found.reference_perplexity:.4g} -> "
            f"{found.perplexity:.4g} on {found.tokens} tokens of the sample text")


def outcome(advice: Advice, rounds: int) -> dict[str, Any]:
    """Whether a lever went the way that was predicted, and how far the prediction was off."""
    predicted, realised = advice.predicted_gain, advice.verified_gain
    assert realised is not None
    return {"lever": advice.lever, "metric": advice.metric, "predicted_gain": predicted, "realised_gain": realised,
            "interval": None if advice.interval is None else list(advice.interval), "rounds": rounds,
            "sign_right": same_sign(predicted, realised), "error": realised / predicted - 1,
            "close": abs(realised / predicted - 1) <= CLOSE, "pays": realised >= PAYS}


def same_sign(predicted: float, realised: float) -> bool:
    alike = abs(predicted - 1) <= EVEN and abs(realised - 1) <= EVEN
    return alike or (predicted - 1) * (realised - 1) > 0


def summary(verified: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A badge: how many levers went as predicted."""
    ran = [v for v in verified if "skipped" not in v]
    right, close = sum(v["sign_right"] for v in ran), sum(v["close"] for v in ran)
    grade = "valid" if ran and right == len(ran) and 4 * close >= 3 * len(ran) else "caution"
    return grade, (f"{len(ran)} levers tried: {right} went the way that was predicted, {close} within {CLOSE:.0%} of the "
                   "predicted gain")


def _batch(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    return lambda: bench.decoding(bench.llm), lambda: bench.decoding(bench.llm, int(advice.options["batch"]))


def _quantization(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    other = bench.other(quantization=advice.options["quantization"])
    return lambda: bench.decoding(bench.llm), lambda: bench.decoding(other)


def _kv_cache_dtype(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    other = bench.other(kv_cache_dtype="int8")
    return lambda: bench.decoding(bench.llm), lambda: bench.decoding(other)


def _ngram(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    bench.llm.engine.strategies["ngram"] = NGram(int(advice.options["drafts"]))
    return lambda: bench.decoding(bench.llm), lambda: bench.decoding(bench.llm, strategy="ngram")


def _prefix(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    context, shared = bench.question.context, int(advice.options["shared"])

    def hit() -> float:
        known = bench.fresh(shared)
        bench.run(bench.llm, [[*known, 0]], 1)
        return bench.ttft([*known, *bench.fresh(context - shared)])

    return lambda: bench.ttft(bench.fresh(context)), hit


def _chunk(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    scheduler, context = bench.llm.engine.scheduler, bench.question.context
    usual = scheduler.max_tokens

    def chunked() -> float:
        scheduler.max_tokens = int(advice.options["chunk"])
        try:
            return bench.ttft(bench.fresh(context))
        finally:
            scheduler.max_tokens = usual

    return lambda: bench.ttft(bench.fresh(context)), chunked


def _pruned_head(bench: Bench, advice: Advice) -> tuple[Side, Side]:
    """The engine prunes where it pays; the old side is the one that reads the whole head."""
    head: Any = bench.llm.loaded.model.top_head

    def whole() -> float:
        head.MOST_PRUNED = 0
        try:
            return bench.decoding(bench.llm)
        finally:
            del head.MOST_PRUNED

    return whole, lambda: bench.decoding(bench.llm)


SIDES: dict[str, Callable[[Bench, Advice], tuple[Side, Side]]] = {
    "batch": _batch, "quantization": _quantization, "kv_cache_dtype": _kv_cache_dtype, "ngram": _ngram, "prefix": _prefix,
    "chunk": _chunk, "pruned_head": _pruned_head}
