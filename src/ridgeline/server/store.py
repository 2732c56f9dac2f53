"""Responses that later requests may refer to."""
from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ridgeline.server.errors import ApiError

STORED_CHARACTERS = 64 << 20           # of all conversations that are remembered


class Store:
    """Finished responses with the conversation behind them, the least recently used leaves first."""

    def __init__(self, most: int, most_characters: int = STORED_CHARACTERS):
        self.most, self.most_characters, self._characters = most, most_characters, 0
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = OrderedDict()

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        size = sum(len(str(message)) for message in messages)
        self._kept[response["id"]] = (response, messages, size)
        self._characters += size
        while self._kept and (len(self._kept) > self.most or self._characters > self.most_characters):
            self._characters -= self._kept.popitem(last=False)[1][2]

    def get(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The response and its conversation. raises ApiError for one that is not known, or no longer."""
        if name not in self._kept:
            raise ApiError(404, f"the response {name!r} is not known; at most {self.most} are kept, and none over a restart",
                           param="previous_response_id", code="response_not_found")
        self._kept.move_to_end(name)
        response, messages, _ = self._kept[name]
        return response, messages

    def drop(self, name: str) -> None:
        self.get(name)
        self._characters -= self._kept.pop(name)[2]
