"""What one forward step computes, as plain arrays: the contract between the scheduler and the model runner.

The scheduler decides and knows no torch; the runner computes and knows no requests. A batch is one mode only:
EXTEND runs new prompt tokens (a chunk of each request), DECODE runs one token of each request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]


class ForwardMode(enum.Enum):
    """What a step computes."""

    EXTEND = "extend"  # new prompt tokens, attending to the cached prefix and to themselves (causal)
    DECODE = "decode"  # one new token a request, attending to everything before it


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose the next token of `num_samples` rows. All arrays are `[num_samples]`."""

    temperature: F32  # >= 0; 0 is greedy
    top_p: F32  # (0, 1]
    top_k: I64  # 0: all tokens
    seeds: U64
    positions: I64  # index of the sampled token in the request: with the seed it fixes the random draw


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. Slots and pages index the KV pool: slot = page * page_size + offset."""

    mode: ForwardMode
    input_ids: I64  # [num_tokens]: the requests' new tokens, concatenated
    positions: I64  # [num_tokens]: position of each in its request
    out_slots: I64  # [num_tokens]: where its KV goes
    page_table: I32  # [batch_size, max_pages]: pages of each request in order, 0-padded
    seq_lens: I64  # [batch_size]: tokens in the KV pool after this step
    extend_lens: I64  # [batch_size]: new tokens of each request; all 1 in DECODE; their sum is num_tokens
    sample_rows: I64  # [num_samples]: which requests' last token is sampled from, ascending
    sampling: SamplingBatch

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)


class Runner(Protocol):
    """Runs a batch: writes its KV into the pool and samples. Blocks until the tokens are known."""

    def execute(self, batch: ForwardBatch) -> I64:
        """Return the sampled token ids, `[num_samples]`."""
        ...
