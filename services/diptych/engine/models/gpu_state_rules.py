"""`StateRules` on GPUs: steps by our Triton kernels, which a graph can capture, and prompts in torch.

Nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from diptych.engine.models.layers import kimi_delta_rule, mamba2_scan
from diptych.engine.models.layers.kimi_delta_rule import Decay
from diptych.engine.models.layers.mamba2_scan import Heads
from diptych.kernels.gpu.recurrent.kimi_delta_step import kimi_delta_step
from diptych.kernels.gpu.recurrent.mamba2_step import mamba2_step
from diptych.kernels.gpu.recurrent.short_conv_step import short_conv_step


class TritonStateRules:
    """A slot of -1 is a padded row."""

    short_conv = staticmethod(short_conv_step)

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, slots: Tensor, out: Tensor
    ) -> None:
        kimi_delta_step(mixed, decays, betas, decay.rate, decay.bias, state, slots, out)

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, slots: Tensor, out: Tensor) -> None:
        mamba2_step(mixed, steps, heads.rate, heads.bias, heads.skip, heads.min_step, state, slots, out)

    kimi_delta_prompt = staticmethod(kimi_delta_rule.in_chunks)
    mamba2_prompt = staticmethod(mamba2_scan.in_chunks)
