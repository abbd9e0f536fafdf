"""What became of every offered call, and what it took: the result of a simulation. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I64

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Arrays have one entry for each offered call, in the order of the calls: `[num_calls]`."""

    arrival_s: F64  # when the client wanted to send it: what it then waited in a line of sessions is behind that
    first_s: F64  # when the client got its first token; nan: never
    last_s: F64  # and its last; nan: it has not got all
    prefill_id: I64  # who computed its prompt, in the last attempt; 0: nobody
    decode_id: I64  # who made its output
    prompt_len: I64
    output_len: I64  # tokens that it asked for
    cached_len: I64  # of the prompt, found where it was computed in the first attempt
    failure: tuple[str, ...]  # why it was not served; "": it was
    gpu_s: float  # GPUs times the seconds that they were held
    num_flips: int  # changes of role
    moved_bytes: int  # of KV, between workers
    num_steps: int  # of all workers
    virtual_s: float  # when the last call had ended
    decisions_digest: str  # of every decision: who was let in, each pair, each step's plan
    num_moves: int = 0  # outputs that went on at another worker

    @property
    def is_served(self) -> npt.NDArray[np.bool_]:
        served: npt.NDArray[np.bool_] = ~np.isnan(self.last_s)
        return served

    @property
    def ttft_s(self) -> F64:
        """Return the times to the first token; nan where none came."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> F64:
        """Return the mean time of each token after the first; 0 for outputs of one."""
        spans: F64 = (self.last_s - self.first_s) / np.maximum(self.output_len - 1, 1)
        return spans
