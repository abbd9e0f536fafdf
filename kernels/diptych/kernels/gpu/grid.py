"""Arithmetic of launches. Triton has it, too, but for kernels as well: each call there takes the host up to two
microseconds, a tenth of a launch, and a step of a model has hundreds of launches.
"""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Divide, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Return the smallest one that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()
