"""What recurrent layers compute between their projections: of one token of each of several requests, and of a prompt.

An interface, and its torch implementation. Requests' states are in slots of a pool; a prompt's is its own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from diptych.engine.models.layers import kimi_delta_rule, mamba2_scan, short_conv
from diptych.engine.models.layers.kimi_delta_rule import Decay
from diptych.engine.models.layers.mamba2_scan import Heads


class StateRules(Protocol):
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

    def kimi_delta_prompt(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, out: Tensor
    ) -> None:
        """See `kimi_delta_rule.in_chunks`."""
        ...

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, slots: Tensor, out: Tensor) -> None:
        """See `mamba2_scan.step`."""
        ...

    def mamba2_prompt(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, out: Tensor) -> None:
        """See `mamba2_scan.in_chunks`."""
        ...


class TorchStateRules:
    """Any device; every slot is somebody's. Prompts are computed in chunks."""

    short_conv = staticmethod(short_conv.convolve_step)
    kimi_delta = staticmethod(kimi_delta_rule.step)
    kimi_delta_prompt = staticmethod(kimi_delta_rule.in_chunks)
    mamba2 = staticmethod(mamba2_scan.step)
    mamba2_prompt = staticmethod(mamba2_scan.in_chunks)
