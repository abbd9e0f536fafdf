"""Prompts made of the names of their blocks: as tokens, and as the names of their pages. Pure.

A trace says which blocks of 512 tokens are equal, and nothing of what is in them. So the tokens of a block are the two
halves of its name, in turns: equal names give equal tokens, and other names other ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.router.choose.page_chain import page_hashes
from diptych.simulator.traces.call import BLOCK_TOKENS, Call

OUTPUT_TOKEN: Final = 1  # every token that is generated
_HALF: Final = np.uint64(0x7FFF_FFFF)  # tokens have 31 bits
_SPREAD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)  # names may be small numbers
_UNNAMED: Final = 1 << 62  # the names of what a trace has not named


@dataclass(frozen=True, slots=True, eq=False)
class SimPrompt:
    """A prompt's tokens, and who asks for their pages by name."""

    ids: I64
    _names: dict[int, U64] = field(default_factory=dict)  # by page size, once somebody has asked

    def __len__(self) -> int:
        return len(self.ids)

    def names(self, page_size: int) -> U64:
        """Return the names of its whole pages."""
        if page_size not in self._names:
            self._names[page_size] = page_hashes(self.ids.astype(np.uint32), page_size)
        return self._names[page_size]

    def followed_by(self, num_tokens: int) -> SimPrompt:
        """Return the prompt of a request that goes on behind so many tokens of output."""
        return SimPrompt(np.append(self.ids, np.full(num_tokens, OUTPUT_TOKEN))) if num_tokens else self


def prompt_of(call: Call, number: int) -> SimPrompt:
    """Return a call's prompt; what the trace gives no name is like nobody else's. `number`: of the call."""
    num_blocks = -(-call.prompt_len // BLOCK_TOKENS)
    names = call.blocks[:num_blocks].astype(np.uint64)
    if len(names) < num_blocks:
        rest = _UNNAMED + number * 2**20 + np.arange(num_blocks - len(names), dtype=np.uint64)
        names = np.concatenate([names, rest.astype(np.uint64)])
    mixed = (names + np.uint64(1)) * _SPREAD
    halves = np.stack([mixed & _HALF, mixed >> np.uint64(33)], axis=1).astype(np.int64)
    return SimPrompt(np.repeat(halves, BLOCK_TOKENS // 2, axis=0).ravel()[: call.prompt_len].copy())
