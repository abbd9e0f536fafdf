"""Where experts are that several GPUs share, and tokens that came to those of one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """Where experts are: the number of a place counts those of the ranks before, as many of each (`room`)."""

    places: Tensor  # int32 [num_experts, most copies]; of copies that there are not, anything
    num_copies: Tensor  # int32 [num_experts]: tokens take turns among them


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """Tokens of all ranks for the experts of this one, until the next `dispatch`: `num_ranks * bound` places.

    In a place without a token `chosen` is nobody's everywhere, and `x` is what was there before.
    """

    x: Tensor  # [places, size]
    chosen: Tensor  # int32 [places, experts_per_token]: of this rank's places, from 0; `room`: nobody's
    shares: Tensor  # float32, the same; 0 where nobody is chosen
    asked: Tensor  # int32 [num_rows]: of this rank's own, bit r: rank r has some of its experts
