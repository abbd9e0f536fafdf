"""Puts the output tokens of the two legs of an attempt into one order.

Rule: prefill gives output token 0, decode the ones after it. The legs arrive over two connections, so decode may be
first: its tokens are held until token 0 is here. A token that was taken already is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.logprobs import TokenLogprobs, join


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
    """Takes runs of tokens in any order and gives them back in theirs, each token once."""

    def __init__(self) -> None:
        self._held: list[Run] = []
        self.num_tokens = 0  # given back so far

    @property
    def has_gap(self) -> bool:
        """A token is missing before some that are held."""
        return bool(self._held)

    def accept(self, run: Run) -> Sequence[Run]:
        """Take a run; return those that are next."""
        if not run.token_ids:
            return ()
        if run.first_index == self.num_tokens and not self._held:
            self.num_tokens = run.end
            return (run,)
        ready, waiting = [], []
        for held in sorted([*self._held, run], key=lambda held: held.first_index):
            if held.first_index > self.num_tokens:
                waiting.append(held)
            elif held.end > self.num_tokens:
                ready.append(held.starting_at(self.num_tokens))
                self.num_tokens = held.end
        self._held = waiting
        return ready


def concatenate(runs: Sequence[Run]) -> tuple[Sequence[int], TokenLogprobs | None]:
    """Return the tokens of consecutive runs, and their log-probabilities if the runs have them."""
    token_ids = [token_id for run in runs for token_id in run.token_ids]
    logprobs = [run.logprobs for run in runs if run.logprobs is not None]
    return token_ids, join(logprobs) if logprobs else None
