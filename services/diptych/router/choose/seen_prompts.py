"""The prompts that workers were chosen for of late, by the names of their pages. Pure.

Noting one costs about a microsecond, whether anybody looks or not: what is made of the names is made when somebody
asks. Nobody asks for long: the oldest are forgotten, at `MAX_NAMES` names or `MAX_PROMPTS` prompts, some 5 MB.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from diptych.common.arrays import U64

MAX_NAMES: Final = 1 << 19
MAX_PROMPTS: Final = 1 << 12
MAX_TOKENS: Final = 1 << 22  # that are kept, in 4 bytes each: 16 MB, and none unless texts may be shown


class SeenPrompt(NamedTuple):
    """One prompt."""

    seen_s: float  # on the clock of whoever noted it
    num_tokens: int
    page_size: int  # tokens
    names: U64  # of the pages that a cache could have had: the last token is always computed
    token_ids: Sequence[int]  # empty: not to be shown


_Noted: TypeAlias = tuple[float, int, int, U64, Sequence[int]]  # a `SeenPrompt` with the names of all full pages


class SeenPrompts:
    """Those that were noted last, each with a number that counts from 0."""

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        """`keeps_tokens`: the operator allows that texts of prompts are shown."""
        self._keeps_tokens = keeps_tokens
        self._prompts: deque[_Noted] = deque()
        self._num_names = 0
        self._num_token_ids = 0
        self.end = 0  # number of the next one

    def note(self, now_s: float, num_tokens: int, chains: Mapping[int, U64], token_ids: Sequence[int] = ()) -> None:
        """A worker is about to compute a prompt; `chains`: the names of its pages, by page size; none: not read.

        `token_ids`: of one that is neither private to a key nor behind a salt.
        """
        if not chains:
            return
        page_size = min(chains)
        names = chains[page_size]
        kept = token_ids if self._keeps_tokens else ()
        self._prompts.append((now_s, num_tokens, page_size, names, kept))
        self._num_names += len(names)
        self._num_token_ids += len(kept)
        self.end += 1
        while self._is_too_much():
            _, _, _, forgotten, ids = self._prompts.popleft()
            self._num_names -= len(forgotten)
            self._num_token_ids -= len(ids)

    @property
    def begin(self) -> int:
        """The number of the oldest that is known."""
        return self.end - len(self._prompts)

    def since(self, number: int, limit: int = MAX_PROMPTS) -> list[SeenPrompt]:
        """Return those from this one on that are still known, the oldest first, and no more than `limit`."""
        first = max(0, number - self.begin)
        return [_seen(*prompt) for prompt in itertools.islice(self._prompts, first, first + limit)]

    def _is_too_much(self) -> bool:
        return self._num_names > MAX_NAMES or len(self._prompts) > MAX_PROMPTS or self._num_token_ids > MAX_TOKENS


def _seen(seen_s: float, num_tokens: int, page_size: int, names: U64, token_ids: Sequence[int]) -> SeenPrompt:
    return SeenPrompt(seen_s, num_tokens, page_size, names[: max(0, num_tokens - 1) // page_size], token_ids)
