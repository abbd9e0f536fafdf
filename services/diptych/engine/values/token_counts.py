"""Which tokens a request has seen and how often it output each: what penalties are made of.

They are derived from the request's tokens alone, so a request that continues on another worker is penalised the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.common.arrays import I64


class TokenCounts:
    """Counts one request's tokens: cheap for the few that are new, whatever the length of the request."""

    def __init__(self, *, prompt_len: int, max_tokens: int, counts_prompt: bool) -> None:
        self._prompt_len = prompt_len
        self._first = 0 if counts_prompt else prompt_len  # token that is counted
        self._num_counted = 0
        self._index: dict[int, int] = {}  # of a token in the arrays
        self._ids = np.zeros(max_tokens, dtype=np.int64)
        self._counts = np.zeros(max_tokens, dtype=np.int64)

    @property
    def ids(self) -> I64:
        """The distinct tokens: of prompt and output, or of the output only."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> I64:
        """How often each was output; 0 for a token of the prompt only."""
        return self._counts[: len(self._index)]

    def update(self, tokens: I64) -> None:
        """Take all tokens of the request; those counted before are the first of them."""
        if self._num_counted == 0:
            self._count_first(tokens)
        else:
            for token_id in tokens[self._num_counted :].tolist():
                at = self._index.setdefault(token_id, len(self._index))
                self._ids[at] = token_id
                self._counts[at] += 1
        self._num_counted = len(tokens)

    def with_more(self, token_ids: Sequence[int]) -> tuple[I64, I64]:
        """Return `ids` and `counts` as they would be if these few tokens were output, too."""
        if not token_ids:
            return self.ids, self.counts
        more = dict.fromkeys(token_id for token_id in token_ids if token_id not in self._index)
        ids = np.concatenate([self.ids, np.array(list(more), dtype=np.int64)])
        counts = np.concatenate([self.counts, np.zeros(len(more), dtype=np.int64)])
        index = {token_id: at for at, token_id in enumerate(more, len(self._index))}
        for token_id in token_ids:
            counts[index.get(token_id, self._index.get(token_id, -1))] += 1
        return ids, counts

    def _count_first(self, tokens: I64) -> None:
        prompt, output = tokens[self._first : self._prompt_len], tokens[self._prompt_len :]
        prompt = prompt[prompt >= 0]  # keys below zero stand for content
        ids, inverse = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = np.bincount(inverse[len(prompt) :], minlength=len(ids))
        self._index = {token_id: at for at, token_id in enumerate(ids.tolist())}
