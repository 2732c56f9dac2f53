"""`ridgeline generate`."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_options,
    read_text,
    sampling_options,
)
from ridgeline.errors import ConfigError, InvalidPrompt

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.sampling_params import SamplingParams
    from ridgeline.types import CompletionOutput, Logprob, RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt (repeatable)")
    parser.add_argument("--prompt-file", action="append", metavar="FILE",
                        help="a file that is one prompt, or a .jsonl file with a prompt a line (repeatable)")
    parser.add_argument("--stream", action="store_true", help="print tokens as they come (one prompt)")
    parser.add_argument("--json", action="store_true", help="print a list with one object a prompt")
    add_sampling_arguments(parser, max_tokens=128)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    prompts = _prompts(options)
    if options.stream and (options.json or len(prompts) > 1 or (options.n or 1) > 1):
        raise ConfigError("--stream prints one sample of one prompt as text; leave out --json, --n and further prompts")
    from ridgeline.cli.progress import bar, load_llm
    from ridgeline.sampling_params import SamplingParams

    params = SamplingParams(**sampling_options(options))
    llm = load_llm(options.model, **engine_options(options))
    if options.stream:
        return _stream(llm, prompts[0], params)
    with bar("Generating", unit="prompts") as advance:
        outputs = llm.generate(prompts, params, on_progress=lambda done, total, stats: advance(
            done, total, f"{stats.generation_tokens} tokens, {stats.running} running, {stats.waiting} waiting"))
    if options.json:
        print(json.dumps([as_json(o) for o in outputs], indent=1, ensure_ascii=False))
    else:
        _print(outputs)
    failed = [o for o in outputs if o.error is not None]
    for output in failed:
        print(f"ridgeline: error: {output.error}", file=sys.stderr)
    return 2 if failed else 0


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = list(options.prompt or ())
    for path in options.prompt_file or ():
        text = read_text(path, "prompt")
        prompts += _lines(path, text) if Path(path).suffix == ".jsonl" else [text]
    if not prompts:
        if sys.stdin.isatty():
            raise ConfigError("no prompt; give -p TEXT, --prompt-file FILE, or text on standard input")
        try:
            prompts = [sys.stdin.buffer.read().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise InvalidPrompt(f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
                                f"{error.start}") from error
    return prompts


def _lines(path: str, text: str) -> list[str]:
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidPrompt(f"{path}, line {number}: not JSON: {error}") from error
            prompt = value.get("prompt") if isinstance(value, dict) else value
            if not isinstance(prompt, str):
                raise InvalidPrompt(f"{path}, line {number}: expected a string, or an object with a string \"prompt\"")
            prompts.append(prompt)
    return prompts


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> int:
    last = None
    for last in llm.stream(prompt, params):
        sys.stdout.write(last.outputs[0].delta)
        sys.stdout.flush()
    print()
    if last is not None:
        print(summary([last]), file=sys.stderr)
    return 0


def _print(outputs: list[RequestOutput]) -> None:
    many = len(outputs) > 1
    for i, output in enumerate(outputs):
        if output.error is not None:
            continue
        for sample in output.outputs:
            if many or len(output.outputs) > 1:
                name = f"prompt {i + 1}" + (f", sample {sample.index + 1}" if len(output.outputs) > 1 else "")
                print(f"--- {name}: {_one_line(output.prompt or '')}")
            print(sample.text)
    done = [o for o in outputs if o.error is None]
    if done:
        print(summary(done), file=sys.stderr)


def _one_line(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[:width - 1] + "…"


def summary(outputs: list[RequestOutput]) -> str:
    """One line: medians over requests; throughput over the span from the first arrival to the last token."""
    import statistics

    samples = [s.metrics for o in outputs for s in o.outputs if s.metrics is not None]
    tokens = sum(m.completion_tokens for m in samples)
    parts = [f"{sum(len(o.prompt_token_ids) for o in outputs)} prompt tokens, {tokens} generated"]
    ttft = [m.ttft_s for m in samples if m.ttft_s is not None]
    itl = [gap for m in samples for gap in m.itl_s]
    if ttft:
        parts.append(f"TTFT {statistics.median(ttft) * 1e3:.0f} ms")
    if itl:
        parts.append(f"ITL {statistics.median(itl) * 1e3:.1f} ms")
    ends = [m.finished for m in samples if m.finished is not None]
    span = max(ends) - min(m.arrival for m in samples) if ends else 0.0
    if span > 0 and tokens:
        parts.append(f"{tokens / span:.1f} tokens/s")
    return "[" + "; ".join(parts) + "]"


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One prompt: the first sample at the top level, all of them under `samples` where there are several."""
    result: dict[str, Any] = {"prompt": output.prompt}
    if output.error is not None:
        return {**result, "error": {"type": type(output.error).__name__, "message": str(output.error)}}
    samples = [_sample_json(s, len(output.prompt_token_ids)) for s in output.outputs]
    result |= samples[0]
    if len(samples) > 1:
        result["samples"] = samples
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if p is None else logprob_json(p) for p in output.prompt_logprobs]
    return result


def _sample_json(sample: CompletionOutput, prompt_tokens: int) -> dict[str, Any]:
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
        result["logprobs"] = [logprob_json(p) for p in sample.logprobs]
    return result


def logprob_json(entry: Logprob) -> dict[str, Any]:
    result: dict[str, Any] = {"token": entry.token, "token_id": entry.token_id, "bytes": list(entry.bytes),
                              "logprob": entry.logprob, "rank": entry.rank}
    if entry.top:
        result["top_logprobs"] = [logprob_json(t) for t in entry.top]
    return result
