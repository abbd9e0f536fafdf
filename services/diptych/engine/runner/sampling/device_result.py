"""What a step gives back, while it is on the device still: the next step may use it there before the host knows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.engine.values.batch import StepResult, WaitForResult
from diptych.generation.logprobs import LogprobsBatch


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLogprobs:
    """As `LogprobsBatch`."""

    logprobs: Tensor  # float32 [num_rows]
    top_ids: Tensor  # int64 [num_rows, max_top]
    top_logprobs: Tensor  # float32 [num_rows, max_top]

    @staticmethod
    def empty(num_rows: int, num_top: int, device: torch.device) -> DeviceLogprobs:
        return DeviceLogprobs(
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, num_top, dtype=torch.int64, device=device),
            torch.empty(num_rows, num_top, device=device),
        )

    def to_host(self) -> LogprobsBatch:
        """Queue the copy; what it gives may be read when that is over."""
        copies = (_to_host(part).numpy() for part in (self.logprobs, self.top_ids, self.top_logprobs))
        return LogprobsBatch(*copies)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceResult:
    """As `StepResult`."""

    token_ids: Tensor  # int64 [num_samples]
    logprobs: DeviceLogprobs | None
    prompt_logprobs: DeviceLogprobs | None

    def start_copy(self) -> WaitForResult:
        """Queue the copy to the host on the current stream; return what waits for it."""
        result = StepResult(
            _to_host(self.token_ids).numpy(),
            None if self.logprobs is None else self.logprobs.to_host(),
            None if self.prompt_logprobs is None else self.prompt_logprobs.to_host(),
        )
        if self.token_ids.device.type == "cpu":
            return lambda: result
        is_over = torch.cuda.Event()
        is_over.record()

        def wait() -> StepResult:
            is_over.synchronize()
            return result

        return wait


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
