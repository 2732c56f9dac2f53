"""What is explained: a model, the machine it runs or would run on, and how the engine cuts its passes."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.analysis.cost import count
from ridgeline.analysis.hardware import Hardware
from ridgeline.analysis.predict import predict
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.work import Rows, Step, Work, decode

CHUNK = 512                  # rows of a pass, the engine's default


class Predicted(NamedTuple):
    work: Work
    seconds: float
    bound: str               # compute | memory | kv | overhead


@dataclass(frozen=True)
class Subject:
    """chunk: most rows of a pass; overhead_s: what the engine adds to each step, measured, 0 where nothing was."""

    spec: Spec
    hardware: Hardware
    chunk: int = CHUNK
    overhead_s: float = 0.0

    def other(self, **changes: object) -> Subject:
        """The same with another spec, hardware or chunk."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def predict(self, step: Step) -> list[Predicted]:
        return [Predicted(*found) for found in predict(count(self.spec, step), self.hardware)]

    def step_s(self, step: Step) -> float:
        """One engine step: its pass and what the engine adds."""
        return sum(p.seconds for p in self.predict(step)) + self.overhead_s

    def decode_s(self, batch: int, context: int, drafts: int = 0) -> float:
        """Seconds between two tokens of each of `batch` sequences behind `context` cached tokens."""
        return self.step_s(decode(context, batch=batch, drafts=drafts))

    def prefill_s(self, tokens: int, *, start: int = 0, prompts: int = 1) -> float:
        """Seconds until the last of `prompts` prompts, which came together, has its first token."""
        return sum(self.step_s(step) for step in chunks(tokens, self.chunk, start=start, prompts=prompts))

    def memory_bytes(self, batch: int, positions: int) -> int:
        """Weights, and keys and values of `batch` sequences of so many positions."""
        return self.spec.weight_bytes + self.cache_bytes(batch, positions)

    def cache_bytes(self, batch: int, positions: int) -> int:
        return batch * (positions * self.spec.kv_bytes_per_token() + state_bytes(self.spec))


def state_bytes(spec: Spec) -> int:
    """Of the recurrent state of one sequence."""
    found = getattr(spec, "state_bytes", None)
    return int(found()) if callable(found) else 0


def chunks(tokens: int, chunk: int, *, start: int = 0, prompts: int = 1) -> list[list[Rows]]:
    """The passes of a prefill as the scheduler cuts them: full ones, a prompt after the other."""
    steps: list[list[Rows]] = [[]]
    room = chunk
    for _ in range(prompts):
        at = 0
        while at < tokens:
            if not room:
                steps.append([])
                room = chunk
            taken = min(room, tokens - at)
            steps[-1].append(Rows(start + at, taken, int(at + taken == tokens)))
            at, room = at + taken, room - taken
    return steps


def bound_of(found: Sequence[Predicted]) -> str:
    """What most of the time goes to."""
    seconds: dict[str, float] = {}
    for p in found:
        seconds[p.bound] = seconds.get(p.bound, 0.0) + p.seconds
    return max(seconds, key=lambda bound: seconds[bound], default="memory")
