"""A small load that has workers run steps of many shapes, so that each term of a step's time is told. Pure.

Three kinds of rounds, each with clients that send one request after the other. Lone prompts of growing lengths tell
what prompts cost, by their tokens and by their pairs. Outputs of more and more requests, once behind short and once
behind long prompts, tell rows from contexts. In the last rounds prompts come while others are continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

SHORTEST: Final = 16  # tokens of a prompt
GROWTH: Final = 4  # from one length to the next
LONE: Final = 3  # prompts of each length
FEW_TOKENS: Final = 4  # of an output that is there for its prompt
STEPS: Final = 48  # of a round that is there for its outputs
POOL_SHARE: Final = 0.5  # that a round may take


class StepRequest(NamedTuple):
    """A request: random tokens, and so many of output."""

    prompt_len: int
    output_len: int


class Round(NamedTuple):
    """Requests of clients that send one after the other."""

    num_clients: int
    asks: tuple[StepRequest, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the workers take."""

    context_len: int  # tokens of a request
    pool_tokens: int  # of all requests at once
    max_prompt: int  # tokens of the longest prompt that is wanted
    max_clients: int

    @property
    def longest(self) -> int:
        return max(1, min(self.max_prompt, self.context_len - STEPS, int(self.pool_tokens * POOL_SHARE) - STEPS))

    def longest_of(self, num_clients: int) -> int:
        """Return the longest prompt of so many at once."""
        return min(self.longest, int(self.pool_tokens * POOL_SHARE) // num_clients - STEPS)


def rounds(bounds: Bounds) -> Iterator[Round]:
    """Yield the rounds in their order: the first ones warm up."""
    lens = _lens(bounds.longest)
    yield Round(1, (StepRequest(lens[0], FEW_TOKENS), StepRequest(lens[-1], FEW_TOKENS)))
    yield Round(1, tuple(StepRequest(each, FEW_TOKENS) for each in lens for _ in range(LONE)))
    for num_clients in _powers(bounds.max_clients):
        yield from _outputs(num_clients, bounds)
    for num_clients in _powers(bounds.max_clients)[1:3]:
        fitting = [each for each in lens if each <= bounds.longest_of(num_clients)] or lens[:1]
        asks = (StepRequest(fitting[i % len(fitting)], STEPS // (1 + i % 3)) for i in range(3 * num_clients))
        yield Round(num_clients, tuple(asks))


def _outputs(num_clients: int, bounds: Bounds) -> Iterator[Round]:
    """Yield rounds with outputs of so many requests behind short, middling and long contexts."""
    longest = bounds.longest_of(num_clients)
    lens = dict.fromkeys(each for each in (SHORTEST, longest // 3, longest) if SHORTEST <= each <= longest)
    for prompt_len in lens or (max(1, longest),):
        yield Round(num_clients, (StepRequest(prompt_len, STEPS),) * num_clients)


def _lens(longest: int) -> list[int]:
    lens = [longest]
    while lens[-1] // GROWTH >= SHORTEST:
        lens.append(lens[-1] // GROWTH)
    return lens[::-1]


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]
