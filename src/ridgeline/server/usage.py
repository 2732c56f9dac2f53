"""How many tokens a request took and gave."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.types import RequestOutput


class Usage:
    """Sums over the prompts of a request, each counted once whatever n is."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int, int]] = {}

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Usage:
        usage = cls()
        for index, output in enumerate(outputs):
            usage.take(index, output)
        return usage

    def take(self, index: int, output: RequestOutput) -> None:
        """The newest snapshot of prompt number `index`."""
        self._of[index] = (len(output.prompt_token_ids), sum(len(s.token_ids) for s in output.outputs),
                           output.metrics.cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _, _ in self._of.values())

    @property
    def completion_tokens(self) -> int:
        return sum(completion for _, completion, _ in self._of.values())

    @property
    def cached_tokens(self) -> int:
        return sum(cached for _, _, cached in self._of.values())

    @property
    def openai(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
