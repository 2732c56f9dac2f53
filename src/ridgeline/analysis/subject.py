"""What is explained: a model, the machine it runs or would run on, and how the engine cuts its passes."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.analysis.cost import count
from ridgeline.analysis.hardware import Hardware, Speed
from ridgeline.analysis.predict import Predicted, predict
from ridgeline.analysis.spec import Spec
from ridgeline.analysis.work import Rows, Step, decode

CHUNK = 512                  # rows of a pass, the engine's default
MOST_PRUNED = 4              # rows of a step up to which the engine prunes a head
HIGH, LOW = 18 / 34, 16 / 34  # of the bytes of a head in Q8_0: scales and high halves, which are always read; low halves


@dataclass(frozen=True)
class Subject:
    """chunk: most rows of a pass; now: how fast the machine is, None: as when it was calibrated; head_share: of
    the head's bytes that a step with a few rows reads, below 1 where the head is pruned."""

    spec: Spec
    hardware: Hardware
    chunk: int = CHUNK
    now: Speed | None = None
    head_share: float = 1.0

    def other(self, **changes: object) -> Subject:
        """The same with another spec, hardware, chunk or speed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def predict(self, step: Step) -> list[Predicted]:
        """The works of a pass, and on a calibrated machine what the engine adds to it."""
        return [self._pruned(p) for p in predict(count(self.spec, step), self.hardware, now=self.now)]

    def _pruned(self, p: Predicted) -> Predicted:
        work = p.work
        if self.head_share == 1 or work.component != "head" or work.rows > MOST_PRUNED:
            return p
        work = replace(work, weight_bytes=round(work.weight_bytes * self.head_share))
        return Predicted(work, p.seconds * self.head_share, p.bound)

    def step_s(self, step: Step) -> float:
        return sum(p.seconds for p in self.predict(step))

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
        return batch * (positions * self.spec.kv_bytes_per_token() + self.spec.state_bytes())


def spec_json(spec: Spec) -> dict[str, Any]:
    """Facts about a model that a report repeats."""
    kinds = dict.fromkeys(m.kind for m in (*spec.matrices, spec.embed, spec.head))
    return {"parameters": spec.parameters, "weight_bytes": spec.weight_bytes, "weight_types": list(kinds),
            "kv_cache_dtype": spec.kv_dtype}


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
