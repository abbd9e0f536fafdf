"""What a device has for kernels: whether it runs those that are for Hopper alone, why not, and its shared memory.

Triton compiles those for Hopper from Gluon, an experiment of its own: a release may come without it, or with other
names. Rule: a module with Gluon in it is imported where `why_not` has no reason against it, never at the top of one
that others need.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Final

import torch

CAPABILITY: Final = (9, 0)
SHARED_NBYTES: Final = 227 << 10  # of a program, which tiles of these kernels fill
GLUON: Final = {  # what they take from it
    "triton.experimental.gluon": ("jit", "language"),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
    "triton.experimental.gluon.language": ("NVMMASharedLayout", "warp_specialize"),
    "triton.experimental.gluon.language.nvidia.hopper": (
        "async_copy",
        "fence_async_shared",
        "mbarrier",
        "tma",
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "async_copy.async_copy_global_to_shared",
        "async_copy.commit_group",
        "async_copy.mbarrier_arrive",
        "async_copy.wait_group",
        "mbarrier.MBarrierLayout",
        "mbarrier.arrive",
        "mbarrier.expect",
        "mbarrier.init",
        "mbarrier.wait",
        "tma.async_copy_global_to_shared",
    ),
}


def why_not(device: torch.device) -> str | None:
    """Return why kernels for Hopper are not launched on a device, in words; None: they are."""
    if device.type != "cuda":
        return "the device is no GPU"
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) != CAPABILITY:
        return f"they are for GPUs of capability 9.0, and this one has {found.major}.{found.minor}"
    if _shared_nbytes(found) < SHARED_NBYTES:
        return f"a program has {_shared_nbytes(found) >> 10} KiB of shared memory there, and they take 227"
    return without_gluon()


def shared_nbytes(device: torch.device) -> int:
    """Return the shared memory that a program may have; that of the interpreter has as much as on Hopper."""
    return _shared_nbytes(torch.cuda.get_device_properties(device)) if device.type == "cuda" else SHARED_NBYTES


def starts_early(device: torch.device) -> bool:
    """Whether launches there begin while those before them run, if both say so ("programmatic dependent launch")."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def _shared_nbytes(properties: Any) -> int:
    return int(properties.shared_memory_per_block_optin)


@cache
def without_gluon() -> str | None:
    """Return what is missing of Gluon; None: nothing."""
    for module, names in GLUON.items():
        try:
            found = import_module(module)
        except ImportError as error:
            return f"this Triton has no Gluon for them: {error}"
        missing = [name for name in names if not _has(found, name)]
        if missing:
            return f"this Triton's Gluon has no {missing[0]} in {module}"
    return None


def _has(module: object, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True
