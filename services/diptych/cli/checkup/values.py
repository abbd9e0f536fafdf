"""What is known of a machine, and what that comes to. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Level(enum.Enum):
    """How bad it is."""

    GOOD = "ok"
    NOTE = "note"  # works, and could be better or is merely absent
    BAD = "BAD"  # will not work, or not as promised


class Finding(NamedTuple):
    """What one rule says."""

    level: Level
    subject: str
    words: str
    change: str = ""  # what to do about it


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device."""

    name: str  # "mlx5_0:1"
    state: str  # "ACTIVE", as the kernel names it
    link_layer: str  # "InfiniBand", "Ethernet"
    rate: str = ""  # "200 Gb/sec (4X HDR)"


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine as a process of ours sees it. None: it can't be told."""

    versions: Mapping[str, str] = field(default_factory=dict)  # of packages that are installed
    torch_cuda: str | None = None  # that PyTorch was built for, "13.0"; empty: for none
    machine: str = "x86_64"
    cpu_flags: frozenset[str] = frozenset()
    num_cores: int = 1  # that we may use
    governor: str = ""
    memory_bytes: int | None = None  # that we may use
    cache_dir: str = ""
    is_cache_writable: bool = True
    temporary_free_bytes: int | None = None
    shm_bytes: int | None = None  # of /dev/shm
    sysv_segment_bytes: int | None = None  # kernel.shmmax
    sysv_bytes: int | None = None  # kernel.shmall
    memlock_bytes: int | None = None  # hard limit; None: there is none
    files: int | None = None  # likewise, that may be open
    ptrace_scope: int | None = None
    ucx: str = ""  # version and origin
    ucx_problem: str = ""  # why none can be used
    ucx_has_infiniband: bool = False
    rdma_ports: Sequence[RdmaPort] = ()
    rdma_doors: bool = True  # /dev/infiniband is there
    gpus: Sequence[str] = ()
    gpu_driver: str = ""  # version
    has_peer_memory: bool = False  # nvidia_peermem is loaded
    compiler: str = ""
    clock_is_synchronised: bool | None = None
    hostname: str = ""
    hostname_addresses: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # asked for: "" if it is found, else why not
    server_skew_s: Mapping[str, float] = field(default_factory=dict)  # clocks of servers by theirs less ours
