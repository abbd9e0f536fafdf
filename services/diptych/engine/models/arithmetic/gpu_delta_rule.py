"""`DeltaRule` by our Triton kernels. Nothing waits for the device."""

from __future__ import annotations

from torch import Tensor

from diptych.architectures.recurrent import DeltaNet
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.delta_rule import DeltaWeights
from diptych.engine.models.arithmetic.gpu_state_rules import prompts_of
from diptych.kernels.gpu.recurrent.delta_chunks import mix_prompts
from diptych.kernels.gpu.recurrent.delta_rule import DeltaLayer, mix_single_tokens


class GpuDeltaRule:
    """Steps of rows alone can be recorded: whose they are is read when they are replayed."""

    def __init__(self, net: DeltaNet, weights: DeltaWeights) -> None:
        self._layer = DeltaLayer(
            num_key_heads=net.num_key_heads,
            num_value_heads=net.num_value_heads,
            key_dim=net.key_dim,
            value_dim=net.value_dim,
            conv=weights.conv,
            decay=weights.decay,
            decay_bias=weights.decay_bias,
            norm=weights.norm,
            eps=weights.eps,
        )

    def mix(self, projected: Tensor, state: tuple[Tensor, ...], batch: StagedBatch, out: Tensor) -> None:
        (newest, kept), rows, starts = state, batch.state_rows, batch.extend_starts
        if len(projected) == len(rows.slots):
            mix_single_tokens(self._layer, projected, newest, kept, rows, starts, out)
            return
        mix_prompts(self._layer, projected, newest, kept, prompts_of(batch), out)
        if (batch.host.extend_lens == 1).any():
            mix_single_tokens(self._layer, projected, newest, kept, rows, starts, out)
