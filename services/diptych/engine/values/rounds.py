"""Rounds of schedulers that share experts: each step of one is a step of all, and all know how large it is for each.

A scheduler that has a step says so to all others, and so does each other one when it hears of it: with a step of its
own, or without a token. When all have spoken, the round is closed, and all compute. Nobody speaks of a round before the
one before it was closed, so of each scheduler at most two rounds are heard of: this one and the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Part:
    """One scheduler's part of a round."""

    num_tokens: int  # new ones, of all layers but the last
    num_picked: int  # those whose logits are wanted: behind its attention the last layer computes no others
    is_plain: bool = False  # a decode step whose tokens are all picked, or none
    late_tokens: int = 0  # of `num_tokens`, those of the second of two micro-batches; 0: there is one
    late_picked: int = 0  # likewise, of `num_picked`


NOTHING: Final = Part(0, 0, is_plain=True)


@dataclass(frozen=True, slots=True)
class Round:
    """A round that is closed."""

    parts: tuple[Part, ...]  # by scheduler

    @property
    def are_any_picked(self) -> bool:
        """Whether the last layer is computed anywhere: else it is nowhere."""
        return any(part.num_picked for part in self.parts)

    @property
    def are_plain(self) -> bool:
        """Whether all have such steps: then each may be computed as one of as many rows as the largest has."""
        return all(part.is_plain for part in self.parts)

    @property
    def halves(self) -> tuple[Round, Round] | None:
        """The rounds of all first micro-batches, and of all second ones; None: each has one.

        Who has one is without a token in the other round.
        """
        if not any(part.late_tokens for part in self.parts):
            return None
        late = tuple(Part(part.late_tokens, part.late_picked) for part in self.parts)
        whole = zip(self.parts, late, strict=True)
        first = (Part(a.num_tokens - b.num_tokens, a.num_picked - b.num_picked) for a, b in whole)
        return Round(tuple(first)), Round(late)

    def num_rows(self, *, is_last: bool) -> int:
        """Return the most rows that a scheduler has in a layer."""
        return max(part.num_picked if is_last else part.num_tokens for part in self.parts)


class Rounds:
    """The rounds as one of several schedulers knows them."""

    def __init__(self, own: int, num_schedulers: int) -> None:
        self._own = own
        self.number = 0  # of the next round
        self._heard: list[deque[Part]] = [deque() for _ in range(num_schedulers)]

    @property
    def is_called(self) -> bool:
        """Whether somebody waits for us."""
        return any(self._heard)

    def hear(self, scheduler: int, number: int, part: Part) -> None:
        """Another scheduler speaks of the round `number`."""
        heard = self._heard[scheduler]
        assert number == self.number + len(heard), f"scheduler {scheduler} speaks of {number} in round {self.number}"
        assert len(heard) < 2, "nobody closes a round without us"
        heard.append(part)

    def close(self, own: Part) -> Round | None:
        """Return the round with our part of it, and go on to the next; None while somebody has not spoken."""
        others = [heard for scheduler, heard in enumerate(self._heard) if scheduler != self._own]
        if not all(others):
            return None
        self._heard[self._own].append(own)
        self.number += 1
        return Round(tuple(heard.popleft() for heard in self._heard))
