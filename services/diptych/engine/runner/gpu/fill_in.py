"""Puts the tokens of the step before in place of their placeholders, on the device: nobody waits for them.

See `batch_builder.placeholder`, and `stepping.fill_in`, which does it on the host.
"""

from __future__ import annotations

from torch import Tensor


def filled_in(input_ids: Tensor, newest: Tensor) -> Tensor:
    """Return `[num_tokens]` ids without placeholders; `newest` holds the tokens sampled last, int64.

    `NO_TOKEN` becomes any token: its request fails, and what is computed for it is thrown away.
    """
    sampled = newest[(-1 - input_ids).clamp_(min=0)].clamp_(min=0)
    return sampled.where(input_ids < 0, input_ids)
