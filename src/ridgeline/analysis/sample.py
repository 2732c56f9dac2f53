"""A real request with a text of its own: its waterfall, and what a look-up of its own tokens would have found."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from ridgeline.analysis import waterfall
from ridgeline.analysis.advise import Question
from ridgeline.analysis.stamps import Span, recorded
from ridgeline.bench.measure import head_rows
from ridgeline.decoding.ngram import continuations
from ridgeline.llm import LLM
from ridgeline.sampling_params import SamplingParams
from ridgeline.types import RequestOutput

MOST_OUTPUT = 64               # tokens of the answer, unless fewer are asked for
LONGEST, SHORTEST = 4, 1       # of the n-gram strategy's look-up, its defaults


@dataclass
class Sample:
    """request, steps ("prefill", "decode"): waterfalls; prompt, answer: token ids; spans: of the whole run; head_scored: share
    of the head's rows that were scored exactly, 1 where it is not pruned; batch: requests that ran."""

    request: waterfall.Waterfall
    steps: dict[str, waterfall.Waterfall]
    prompt: Sequence[int]
    answer: Sequence[int]
    spans: list[Span]
    head_scored: float
    batch: int


def run_sample(llm: LLM, q: Question, batch: int) -> Sample:
    """`batch` requests at once, greedy; the first one's waterfall. Prompts are about q.context tokens of English text."""
    params = SamplingParams(temperature=0, max_tokens=min(MOST_OUTPUT, q.output), ignore_eos=True)
    _generate(llm, prompts(llm, 1, min(q.context, 32), turn=97), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    llm.engine.store.reset_prefix_cache()
    before = head_rows(llm)
    with recorded(llm) as run:
        outputs = _generate(llm, prompts(llm, batch, q.context), params)
    scored, total = (after - was for after, was in zip(head_rows(llm), before))
    spans = run.spans()
    first = outputs[0]
    begun = max(o.metrics.first_token or 0.0 for o in outputs) * 1e9
    numbers = {s.step: s for s in spans if s.name == "step"}
    prefill = [n for n, s in numbers.items() if s.start_ns < begun]
    decoding = [n for n, s in numbers.items() if s.start_ns >= begun]
    steps = {name: waterfall.of_steps(spans, found) for name, found in (("prefill", prefill), ("decode", decoding)) if found}
    return Sample(waterfall.of_request(spans, first.metrics), steps, first.prompt_token_ids, first.outputs[0].token_ids, spans,
                  scored / total if total else 1.0, batch)


def prompts(llm: LLM, count: int, tokens: int, *, turn: int = 0) -> list[str] | list[list[int]]:
    """Texts of about so many tokens, each from another place of a sample text; ids where there is no tokenizer."""
    size = llm.engine.vocab_size
    if llm.tokenizer is None:
        return [[(7919 * (turn + i) + 31 * j * j + 17 * j) % size for j in range(tokens)] for i in range(count)]
    words = text().split(" ")
    found = []
    for i in range(count):
        start = (turn + 131 * i) % len(words)
        turned = words[start:] + words[:start]
        whole = " ".join(turned * (1 + 2 * tokens // len(words)))
        low, high = 1, len(whole)
        while low < high:                            # the longest beginning with at most `tokens` tokens
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(llm.tokenizer.encode(whole[:middle])) <= tokens else (low, middle - 1)
        found.append(whole[:low])
    return found


def text() -> str:
    return files("ridgeline.quant").joinpath("calibration.txt").read_text("utf-8")


def _generate(llm: LLM, given: Sequence[str] | Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
    ids = [llm.frontend.add(prompt, params) for prompt in given]
    outputs: dict[str, RequestOutput] = {}
    while llm.frontend.has_work:
        for output in llm.frontend.step():
            outputs[output.request_id] = output
            if output.error is not None:
                raise output.error
    return [outputs[i] for i in ids]


def acceptance(prompt: Sequence[int], answer: Sequence[int], drafts: int) -> tuple[float, float]:
    """(tokens a pass, drafts a pass) of n-gram speculation, from a greedy answer without it: both give the same tokens."""
    tokens, end = [*prompt, answer[0]], len(prompt) + len(answer)
    whole = [*prompt, *answer]
    passes = drafted = 0
    while len(tokens) < end:
        proposed = next(iter(continuations(tokens, min(drafts, end - len(tokens) - 1), LONGEST, SHORTEST, 1)), ())
        accepted = 0
        for token in proposed:
            if whole[len(tokens) + accepted] != token:
                break
            accepted += 1
        tokens = whole[:len(tokens) + accepted + 1]
        passes, drafted = passes + 1, drafted + len(proposed)
    return ((end - len(prompt) - 1) / passes, drafted / passes) if passes else (1.0, 0.0)
