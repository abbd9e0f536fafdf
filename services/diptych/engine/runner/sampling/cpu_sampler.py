"""`Sampler` by the C kernels: float32 on the CPU."""

from __future__ import annotations

from torch import Tensor

from diptych.common.arrays import I32, I64
from diptych.engine.values.batch import SamplingBatch
from diptych.generation.logprobs import LogprobsBatch
from diptych.kernels.cpu import sampling as kernels


class CpuSampler:
    """Reads each row a few times and sorts none."""

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> I64:
        return kernels.sample(
            logits,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seeds=sampling.seeds,
            positions=sampling.positions,
        )

    def logprobs(self, logits: Tensor, token_ids: I64, num_top: int) -> LogprobsBatch:
        return LogprobsBatch(*kernels.logprobs(logits, token_ids, num_top))

    def forbid(self, logits: Tensor, token_mask: I32) -> None:
        kernels.forbid(logits, token_mask)
