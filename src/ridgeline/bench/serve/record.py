"""What happened to one request: its stamps, its chunks, its counts. All times are seconds after the start of the cell."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

USAGE, CHUNKS = "usage", "chunks"       # where the number of generated tokens comes from


@dataclass(slots=True)
class Record:
    """times, tokens: of the chunks that carried something, in any channel; tokens: of the answer that arrived with each.

    scheduled: when it was due (a closed loop: when its client was free), before any wait for a free slot; sent: when it was
    handed to the connection; lateness: how long the client dallied between being allowed to send and sending.
    error: one line, None if the answer is whole; error_kind: what errors are counted by.
    """

    index: int
    turn: int
    input_len: int                       # tokens asked for, history included
    output_len: int
    scheduled: float
    sent: float | None = None
    ended: float = 0.0
    lateness: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spread: bool = False                 # tokens were spread over chunks by the length of their text
    counted: str = CHUNKS
    prompt_tokens: int | None = None     # the server's counts
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def completion_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.scheduled

    @property
    def service_ttft(self) -> float:
        assert self.sent is not None
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """None where nothing came after the first chunk."""
        after = self.completion_tokens - self.tokens[0]
        return (self.times[-1] - self.times[0]) / after if after > 0 else None

    def chunk_gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:])]

    def token_gaps(self) -> list[float]:
        """A chunk of k tokens D seconds after the one before gives k values D/k; time without a token goes to the next."""
        gaps: list[float] = []
        before = self.times[0]
        for time, tokens in zip(self.times[1:], self.tokens[1:]):
            if tokens:
                gaps += [(time - before) / tokens] * tokens
                before = time
        return gaps

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = round(value, 6)
        found["times"] = [round(time, 6) for time in self.times]
        return found

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """raises TypeError or KeyError for an object that is no request of ours."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def share_out(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` tokens over chunks in proportion to their sizes, every chunk at least one while there are enough.

    With fewer tokens than chunks the first chunk gets one and the others follow evenly: a token may span chunks.
    """
    count = len(sizes)
    if total <= count:
        # The i-th token falls into chunk i * count // total.
        shares = [0] * count
        for token in range(total):
            shares[token * count // total] += 1
        return shares
    rest, weight = total - count, max(1, sum(sizes))
    exact = [size * rest / weight for size in sizes] if any(sizes) else [rest / count] * count
    shares = [1 + int(part) for part in exact]
    by_fraction = sorted(range(count), key=lambda i: int(exact[i]) - exact[i])
    for i in by_fraction[:total - sum(shares)]:
        shares[i] += 1
    return shares
