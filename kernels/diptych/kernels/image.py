"""A compiled GPU kernel as a value, for programs that launch it without Python. Knows nothing of the compiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelImage:
    """What the driver needs to load and launch a kernel of one dimension."""

    binary: bytes  # for one architecture
    name: str
    num_warps: int  # of a program
    shared_nbytes: int
    num_programs: int  # how much of the GPU it takes


@dataclass(frozen=True, slots=True)
class TransferKernels:
    """The kernels of the KV transfer engine."""

    mover: KernelImage
    digester: KernelImage
