"""What a dispatch policy is: a choice of one scheduler group for a request, by what the groups have been given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GroupView:
    """How busy a living group is, as its frontend knows."""

    rank: int
    num_open: int  # requests given to it that have not ended
    waiting_tokens: int  # prompt tokens of those that have not answered yet


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt: Sequence[int]  # token ids
    extra_key: bytes = b""  # of its prefix-cache namespace


class DispatchPolicy(Protocol):
    """Chooses a group. What it remembers is only what it chose: the same requests and views give the same answers."""

    def choose(self, groups: Sequence[GroupView], request: RequestView) -> int:
        """Return the rank of one of `groups`, of which there is at least one, in order of rank."""
        ...
