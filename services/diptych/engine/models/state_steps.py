"""The steps of recurrent layers: one token of each of several requests, whose states are in slots of a pool.

An interface, and its torch implementation. Prompts are computed by the layers themselves.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from diptych.engine.models.layers import kimi_delta_rule, mamba2_scan, short_conv
from diptych.engine.models.layers.kimi_delta_rule import Decay
from diptych.engine.models.layers.mamba2_scan import Heads


class StateSteps(Protocol):
    """States are brought up to date in place. A request's slot is its own; -1, on GPUs alone, is nobody's."""

    def short_conv(
        self, x: Tensor, state: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """See `short_conv.convolve_step`."""
        ...

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, slots: Tensor, out: Tensor
    ) -> None:
        """See `kimi_delta_rule.step`."""
        ...

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, slots: Tensor, out: Tensor) -> None:
        """See `mamba2_scan.step`."""
        ...


class TorchStateSteps:
    """Any device; every slot is somebody's."""

    short_conv = staticmethod(short_conv.convolve_step)
    kimi_delta = staticmethod(kimi_delta_rule.step)
    mamba2 = staticmethod(mamba2_scan.step)
