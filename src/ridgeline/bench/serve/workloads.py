"""What is asked: jobs of one request or several. The seed fixes lengths; the words are fresh for every salt and cell.

A server with a prefix cache answers a prompt that it has seen an order of magnitude sooner, so nothing but the workloads that
share prefixes on purpose may send the same prompt twice: not in two cells of a sweep, not in two runs against one server.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError

# Short English words, each of them one token behind a space for common tokenizers: N words are about N tokens.
WORDS = resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split()
FIRST_ID, LAST_ID = 1000, 20_000       # token ids that no common vocabulary reserves


@dataclass(frozen=True)
class Spec:
    """dataset: a name of DATASETS; lengths in tokens; path: the trace; form: words or ids."""

    dataset: str = "random"
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    form: str = "words"
    prefix_len: int = 256
    num_prefixes: int = 1
    turns: int = 4
    path: str | None = None
    trace_speed: float = 1.0
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        """What makes two runs ask the same, but for the words."""
        found = asdict(self)
        used = {"dataset", "seed", "form", *DATASETS[self.dataset].uses}
        return {name: value for name, value in found.items() if name in used and value is not None}


@dataclass(frozen=True, slots=True)
class Turn:
    """text: what is new in this request; ids: the same as token ids (then text is empty)."""

    text: str
    input_len: int
    output_len: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that follow one another; system: what stands before the first; at: seconds after the start, of a trace."""

    turns: tuple[Turn, ...]
    system: str = ""
    system_len: int = 0
    at: float | None = None


@dataclass(frozen=True)
class Dataset:
    make: Callable[[Spec, int, str], list[Job]]
    uses: tuple[str, ...]                # fields of Spec that it reads
    shares: bool = False                 # prompts have common prefixes


def jobs(spec: Spec, requests: int, fresh: str) -> list[Job]:
    """Jobs with at least `requests` requests together (a trace: at most); fresh: names this use, so that no text comes twice.

    raises ConfigError for a trace that cannot be read.
    """
    return DATASETS[spec.dataset].make(spec, requests, f"{spec.seed}/{fresh}")


def words(count: int, key: str) -> str:
    """`count` words that depend on the key alone."""
    return " ".join(random.Random(key).choices(WORDS, k=count))


def _turn(spec: Spec, input_len: int, output_len: int, key: str) -> Turn:
    if spec.form == "ids":
        ids = random.Random(key).choices(range(FIRST_ID, LAST_ID), k=input_len)
        return Turn("", input_len, output_len, tuple(ids))
    return Turn(words(input_len, key), input_len, output_len)


def _random(spec: Spec, requests: int, fresh: str) -> list[Job]:
    lengths = random.Random(spec.seed)
    return [Job((_turn(spec, _about(spec.input_len, spec, lengths), _about(spec.output_len, spec, lengths), f"{fresh}/{i}"),))
            for i in range(requests)]


def _about(length: int, spec: Spec, lengths: random.Random) -> int:
    low, high = round(length * (1 - spec.range_ratio)), round(length * (1 + spec.range_ratio))
    return lengths.randint(max(1, low), max(1, high))


def sharegpt_lengths() -> dict[str, Any]:
    """{"source", "kept", "tokenizer", "pairs": [[prompt tokens, answer tokens], ...]}"""
    text = resources.files(__package__).joinpath("sharegpt_lengths.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _sharegpt(spec: Spec, requests: int, fresh: str) -> list[Job]:
    pairs = sharegpt_lengths()["pairs"]
    drawn = random.Random(spec.seed).choices(pairs, k=requests)
    return [Job((_turn(spec, prompt, answer, f"{fresh}/{i}"),)) for i, (prompt, answer) in enumerate(drawn)]


def _prefix(spec: Spec, requests: int, fresh: str) -> list[Job]:
    """Every prompt: one of `num_prefixes` openings of `prefix_len` tokens, then `input_len` of its own."""
    openings = [_turn(spec, spec.prefix_len, 1, f"{fresh}/prefix{p}") for p in range(spec.num_prefixes)]
    found = []
    for i in range(requests):
        opening, own = openings[i % spec.num_prefixes], _turn(spec, spec.input_len, spec.output_len, f"{fresh}/{i}")
        found.append(Job((Turn(f"{opening.text} {own.text}".strip(), spec.prefix_len + spec.input_len, spec.output_len,
                               opening.ids + own.ids),)))
    return found


def _agent(spec: Spec, requests: int, fresh: str) -> list[Job]:
    """Sessions of `turns` requests behind one system prompt of `prefix_len`; each turn adds `input_len` to what was said."""
    sessions = -(-requests // spec.turns)
    system = words(spec.prefix_len, f"{fresh}/system")
    return [Job(tuple(_turn(spec, spec.input_len, spec.output_len, f"{fresh}/{s}/{t}") for t in range(spec.turns)),
                system, spec.prefix_len) for s in range(sessions)]


TRACE_BLOCK = 512                        # tokens that one hash of a Mooncake trace stands for


def _trace(spec: Spec, requests: int, fresh: str) -> list[Job]:
    """Mooncake JSONL: {"timestamp": ms, "input_length", "output_length", "hash_ids": one for each 512 tokens of the prompt}.

    Equal hashes become equal text, so requests share the prefixes that they shared when the trace was taken.
    """
    assert spec.path is not None
    found: list[Job] = []
    first = None
    for number, entry in enumerate(_lines(spec.path), 1):
        if len(found) == requests:
            break
        try:
            at, length, output = float(entry["timestamp"]) / 1e3, int(entry["input_length"]), int(entry["output_length"])
            hashes = list(entry.get("hash_ids") or ())
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"line {number} of trace {spec.path!r} has no valid {error}; it must be an object with "
                              "timestamp, input_length, output_length and hash_ids") from None
        if length < 1 or output < 1 or 0 < len(hashes) * TRACE_BLOCK < length:
            raise ConfigError(f"line {number} of trace {spec.path!r} has input_length {length}, output_length {output} and "
                              f"{len(hashes)} hash_ids; lengths are at least 1, with a hash for each {TRACE_BLOCK} tokens")
        blocks = hashes or [f"own{number}/{b}" for b in range(-(-length // TRACE_BLOCK))]
        parts = [_turn(spec, min(TRACE_BLOCK, length - b * TRACE_BLOCK), 1, f"{fresh}/block{name}")
                 for b, name in enumerate(blocks[:-(-length // TRACE_BLOCK)])]
        first = at if first is None else first
        turn = Turn(" ".join(p.text for p in parts), length, output, tuple(i for p in parts for i in p.ids))
        found.append(Job((turn,), at=(at - first) / spec.trace_speed))
    if not found:
        raise ConfigError(f"trace {spec.path!r} is empty")
    return sorted(found, key=lambda job: job.at or 0.0)


def _lines(path: str) -> list[Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"line {number} of trace {path!r} is not JSON: {error}") from error
    return found


DATASETS = {
    "random": Dataset(_random, ("input_len", "output_len", "range_ratio")),
    "sharegpt": Dataset(_sharegpt, ()),
    "prefix": Dataset(_prefix, ("input_len", "output_len", "prefix_len", "num_prefixes"), shares=True),
    "agent": Dataset(_agent, ("input_len", "output_len", "prefix_len", "turns"), shares=True),
    "trace": Dataset(_trace, ("path", "trace_speed"), shares=True),
}
