"""Puts the output tokens of the two legs of an attempt into one order.

Rule: prefill gives output token 0, decode the ones after it; a leg that is alone gives all. Two legs arrive over two
connections, so decode may be first: its tokens are held until token 0 is here. A token that was taken already is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.generation.logprobs import TokenLogprobs, join


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive output tokens of one leg."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None = None

    @property
    def end(self) -> int:
        return self.first_index + len(self.token_ids)

    def starting_at(self, index: int) -> Run:
        """Return the part from output `index` on."""
        count = index - self.first_index
        logprobs = None if self.logprobs is None else self.logprobs.span(count, len(self.token_ids))
        return Run(index, self.token_ids[count:], logprobs)


class Merger:
    """Takes runs of tokens in any order and gives them back in theirs, each token once.

    Tokens are copied out of their runs: a run may be part of a message with those of many requests, which must not
    stay for a client that is slow to take its own.
    """

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # of those
        self._held: list[Run] = []
        self.num_tokens = 0  # ready so far, with those that were taken

    @property
    def has_gap(self) -> bool:
        """A token is missing before some that are held."""
        return bool(self._held)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def accept(self, first_index: int, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> None:
        """Take a run, from output `first_index` on."""
        if first_index == self.num_tokens and not self._held:
            self._make_ready(token_ids, logprobs)
        elif token_ids:
            self._sort_in(Run(first_index, list(token_ids), logprobs))

    def take(self) -> tuple[list[int], TokenLogprobs | None]:
        """Return the tokens that are next, and their log-probabilities if they have them."""
        ready, self._ready = self._ready, []
        if not self._logprobs:
            return ready, None
        logprobs, self._logprobs = self._logprobs, []
        return ready, join(logprobs)

    def _make_ready(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        self._ready.extend(token_ids)
        self.num_tokens += len(token_ids)
        if logprobs is not None and token_ids:
            self._logprobs.append(logprobs)

    def _sort_in(self, run: Run) -> None:
        self._held.append(run)
        if run.first_index > self.num_tokens:  # so are all that are held
            return
        waiting = []
        for held in sorted(self._held, key=lambda held: held.first_index):
            if held.first_index > self.num_tokens:
                waiting.append(held)
            elif held.end > self.num_tokens:
                rest = held.starting_at(self.num_tokens)
                self._make_ready(rest.token_ids, rest.logprobs)
        self._held = waiting
