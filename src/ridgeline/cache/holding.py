"""What one sequence holds in one role, and where a run slice is placed."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.cache.recurrent import Checkpoints

NO_TOKEN = -1       # of a row that agrees with no committed token until it is kept: a node of a tree
UNLIMITED = 1 << 62


@dataclass
class Placement:
    """Where the rows of one run slice live.

    start: cache position of the first token; context: start + number of tokens; pages: the page table, covering
    `context` (the live list: read it before the sequence's next reserve or commit); state_read: slot with the state
    after `start` tokens, -1 = the zero state; state_write: per token the slot for the state after it, or -1;
    shared: page tables of the other roles that this role's `Shared` layers read.
    """

    start: int
    context: int
    pages: list[int]
    state_read: int
    state_write: list[int]
    shared: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Holding:
    """What one sequence holds in one role: rows 0..held agree with the committed tokens, `extra` follows them."""

    tokens: list[int]           # committed, owned by the engine
    keys: list[bytes]           # keys[0] is the root, keys[i + 1] that of page i
    checkpoints: Checkpoints
    publish: bool
    align: int                  # rows see up to the end of their block of so many tokens, and are valid in whole blocks
    pages: list[int] = field(default_factory=list)
    held: int = 0
    extra: list[int] = field(default_factory=list)       # tokens of the rows held, held + 1, ...
    run_start: int = 0
    run_tokens: list[int] = field(default_factory=list)  # written rows of the last run
    offered: int = 0            # leading pages that went to the prefix index
    fed_from: int = UNLIMITED   # rows from here on depend on more than tokens and are never published
    junction: int = 0           # length where other requests were seen to share pages but no state
    unsettled: bool = False

    def page_tokens(self, page: int, size: int) -> list[int]:
        """The tokens that the rows of a page add to its prefix: up to the end of the last block they belong to."""
        end = (page + 1) * size
        return self.tokens[page * size:end + -end % self.align]

    def full_pages(self, length: int, size: int) -> int:
        """How many leading pages depend on nothing beyond the first `length` tokens."""
        return (length - length % self.align) // size

    @property
    def length(self) -> int:
        return self.held + len(self.extra)

    def agree(self) -> None:
        """Move leading extra rows that equal the committed tokens into `held`; compares nothing twice."""
        committed, start, extra = self.tokens, self.held, self.extra
        end = min(len(extra), len(committed) - start)
        if extra[:end] == committed[start:start + end]:
            same = end
        else:
            same = next(i for i in range(end) if extra[i] != committed[start + i])
        self.held += same
        self.extra = extra[same:]


def linear_rows(parents: Sequence[int], offset: int, count: int) -> int:
    """Of a slice that starts at `offset` of its run: how many leading rows follow one another without branching."""
    return next((i for i in range(count) if parents[i] != offset + i - 1), count)
