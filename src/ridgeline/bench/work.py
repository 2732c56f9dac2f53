"""What a benchmark runs: workloads by their short names, and their prompts."""
from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ridgeline.errors import ConfigError

DEFAULT_WORK = "pp512,tg64,d8,d32"
ALLOWED = ("ppN (prefill of N tokens), tgN (N decode steps of one sequence), tgN@C (the same behind C tokens) and dN (decode "
           "of N sequences together), as in pp512,tg64,tg32@4096,d8")

BATCH_PROMPT = 128       # tokens before each sequence of dN
BATCH_STEPS = 48
TEXT = "The lighthouse keeper opened the door and"      # before tgN; 8 to 10 tokens in most vocabularies
TEXT_TOKENS = 9          # where a model has no tokenizer or no weights

_NAME = re.compile(r"(pp|tg|d)([1-9][0-9]{0,6})(?:@([1-9][0-9]{0,6}))?")


@dataclass(frozen=True)
class Work:
    """sequences: that run together; prompt_len: tokens of each, None = the fixed text; steps: of decode, 0 = prefill alone."""

    name: str
    sequences: int
    prompt_len: int | None
    steps: int

    def positions(self, max_num_batched_tokens: int) -> int:
        """Most positions that a sequence takes in the cache."""
        return (self.prompt_len or TEXT_TOKENS) + self.output_len(max_num_batched_tokens)

    def output_len(self, max_num_batched_tokens: int) -> int:
        """Tokens to ask of each sequence, so that all still decode when the last has decoded `steps` times.

        Sequences whose prompts are done go on while others have their prefill; each step of it leaves room for at least
        the rows that decode.
        """
        if self.sequences == 1:
            return 1 + self.steps
        room = max(1, max_num_batched_tokens - self.sequences)
        return 1 + self.steps + -(-self.sequences * (self.prompt_len or TEXT_TOKENS) // room)


def parse_work(text: str) -> list[Work]:
    """"pp512,tg64" -> workloads. raises ConfigError that lists the valid names."""
    names = [name.strip() for name in text.split(",")]
    works = []
    for name in names:
        match = _NAME.fullmatch(name)
        kind, count, behind = match.groups() if match else ("", "0", None)
        if match is None or (behind is not None and kind != "tg"):
            raise ConfigError(f"--work names {name!r}; valid: {ALLOWED}")
        if names.count(name) > 1:
            raise ConfigError(f"--work names {name!r} twice")
        if kind == "pp":
            works.append(Work(name, 1, int(count), 0))
        elif kind == "tg":
            works.append(Work(name, 1, None if behind is None else int(behind), int(count)))
        else:
            works.append(Work(name, int(count), BATCH_PROMPT, BATCH_STEPS))
    return works


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """The same ids for the same arguments."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
