"""One call of a trace: when it comes, how long its prompt and output are, and which blocks its prompt consists of.

A trace holds no text. Equal names at the same place of two prompts mean equal tokens from the beginning to the end of
that block, as in Mooncake's traces; the last block need not be full, and its name then stands for what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.common.arrays import U64

BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request that is offered to a platform."""

    arrival_s: float  # since the trace began
    prompt_len: int  # tokens, 1 or more
    output_len: int  # tokens, 1 or more
    blocks: U64  # [ceil(prompt_len / 512)] names of the prompt's blocks
    tenant: str = ""
    tier: str = ""  # the named objectives it asks for
    session: str = ""  # the conversation or the agent that it belongs to
