"""Kernels of a decode step that begin while the one before them ends (Hopper's programmatic dependent launch).

Launching a kernel, and what it does before it needs another one's results, takes a microsecond or two. A kernel that is
launched with `launch_options` may do that while the one before it runs; it calls `wait` before it reads or writes
anything that another kernel has to do with. Rule: `release` comes late, when a kernel's own reading is over, and never
before `wait`. Else programs of the next kernel fill multiprocessors that programs of this one still need, or of the one
before: products whose programs do not lie evenly, one or two on each, take a fifth longer.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY: Final = 9


@cache
def _launches_dependents(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= FIRST_CAPABILITY


def launch_options(x: torch.Tensor) -> dict[str, bool]:
    """Return how kernels that `wait` are launched where `x` is; they take it as the constant `DEPENDS`, too."""
    depends = x.is_cuda and not triton.knobs.runtime.interpret and _launches_dependents(x.get_device())
    return {"DEPENDS": True, "launch_pdl": True} if depends else {"DEPENDS": False}


@triton.jit
def wait(DEPENDS: tl.constexpr):
    """Wait until all that was launched before is over and can be read."""
    if DEPENDS:
        gdc_wait()


@triton.jit
def release(DEPENDS: tl.constexpr):
    """Let the next kernel begin when all programs have come here, or are over. It may not read what this one writes."""
    if DEPENDS:
        gdc_launch_dependents()
