"""A compiled GPU kernel as a value, for programs that launch it without Python. Knows nothing of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KernelImage:
    """What the driver needs to load and launch a kernel of one dimension."""

    binary: bytes  # for one architecture
    name: str
    num_warps: int  # of a program
    shared_nbytes: int
    num_programs: int  # how much of the GPU it takes
    chunk: int = 0  # of what it moves at a time, in its own units: cells, or words of 8 bytes


@dataclass(frozen=True, slots=True)
class PageShape:
    """What kernels are compiled for of a pool, whatever its peers will be like."""

    window_nbytes: int  # the smallest part of a page that is moved
    dtypes: tuple[str, ...]  # of its regions
    head_dim: int  # that the head sizes of all regions are multiples of
    head_nbytes: int  # and their bytes


@dataclass(frozen=True, slots=True)
class TransferKernels:
    """The kernels of the KV transfer engine."""

    mover: KernelImage
    digester: KernelImage
    packers: Mapping[tuple[str, str], KernelImage] = field(default_factory=dict)  # from one dtype to another
    unpacker: KernelImage | None = None
