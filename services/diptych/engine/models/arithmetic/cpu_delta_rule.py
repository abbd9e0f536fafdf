"""`DeltaRule` by the C kernel: float32 on the CPU."""

from __future__ import annotations

from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.delta_rule import DeltaWeights
from diptych.kernels.cpu.delta_rule import DeltaRuleKernel


class CpuDeltaRule:
    """A prompt's tokens are computed one by one, too: so they have the same bits however the prompt is cut."""

    def __init__(self, net: DeltaNet, weights: DeltaWeights) -> None:
        self._kernel = DeltaRuleKernel(
            net.num_key_heads,
            net.num_value_heads,
            net.key_dim,
            conv=weights.conv,
            decay=weights.decay,
            decay_bias=weights.decay_bias,
            norm=weights.norm,
            eps=weights.eps,
        )

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        assert batch.state_slots is not None
        newest, kept = state
        self._kernel.mix(projected, newest, kept, batch.extend_starts.long(), batch.state_slots, out)
