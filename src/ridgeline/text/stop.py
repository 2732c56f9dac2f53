"""Stop strings, searched in the text rather than in the tokens: one may begin in one token and end in another."""
from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import InvalidParams


class StopChecker:
    """Passes text on until the first stop string is complete.

    Of several stop strings the one that is complete first counts, of those that end at the same character the longest.
    So the result is the same however the text is cut. With `include` the stop string is passed on too.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        for item in stop:
            if not isinstance(item, str) or not item:
                raise InvalidParams(f"stop contains {item!r}; each stop string must be a str of at least one character")
        self._stop = tuple(stop)
        self._include = include
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; returns what can be shown now, and the stop string once one was found."""
        if self.stopped is not None:
            return "", self.stopped
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[:end if self._include else start], self.stopped
        keep = self._length_of_beginning(text)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep], None

    def flush(self) -> str:
        """What was held back because it might have been the beginning of a stop string."""
        text, self._held = self._held, ""
        return text

    def _length_of_beginning(self, text: str) -> int:
        """The length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
