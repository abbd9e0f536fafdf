"""Puts the output tokens of the two legs of an attempt into one order.

Rule: prefill gives output token 0, decode the ones after it. The legs arrive over two connections, so decode may be
first: its tokens are held until token 0 is here. A token that was taken already is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence


class Merger:
    """Takes runs of tokens in any order and gives them back in theirs, each once."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self.num_tokens = 0  # given back so far

    @property
    def has_gap(self) -> bool:
        """A token is missing before some that are held."""
        return bool(self._held)

    def accept(self, first_index: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Take `token_ids`, the outputs from `first_index` on; return the tokens that are next."""
        if first_index == self.num_tokens and not self._held:
            self.num_tokens += len(token_ids)
            return token_ids
        for index, token_id in enumerate(token_ids, first_index):
            if index >= self.num_tokens:
                self._held[index] = token_id
        ready = []
        while self.num_tokens in self._held:
            ready.append(self._held.pop(self.num_tokens))
            self.num_tokens += 1
        return ready
