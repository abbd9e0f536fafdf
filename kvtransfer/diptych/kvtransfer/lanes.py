"""What carries the pages of a link, from slow to fast, by the lanes that the transport library names and the path."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Literal

Requirement = Literal["any", "shm", "rdma", "nvlink"]
Transports = Literal["auto", "shm", "tcp"]  # what may carry pages; auto: the fastest that both ends have


class Lane(enum.IntEnum):
    """A kind of link. Higher is faster."""

    TCP = 0  # and whatever else is not known to be faster
    SHM = 1  # one host's memory
    RDMA = 2
    NVLINK = 3  # one GPU stores into another one's memory


REQUIREMENTS: Final[Mapping[Requirement, Lane]] = {
    "any": Lane.TCP,
    "shm": Lane.SHM,
    "rdma": Lane.RDMA,
    "nvlink": Lane.NVLINK,
}

_BY_PATH: Final[Mapping[str, Lane]] = {"copy": Lane.SHM, "mover": Lane.NVLINK}
_BY_PREFIX: Final[Mapping[str, Lane]] = {
    "cuda_ipc": Lane.NVLINK,
    "rc": Lane.RDMA,
    "dc": Lane.RDMA,
    "ud": Lane.RDMA,
    "srd": Lane.RDMA,
    "sysv": Lane.SHM,
    "posix": Lane.SHM,
    "cma": Lane.SHM,
    "xpmem": Lane.SHM,
    "knem": Lane.SHM,
    "inproc": Lane.SHM,
}


def lane_of(lanes: str, path: str) -> Lane:
    """Return what pages go over. `lanes` are as a link describes them: "sysv/memory, tcp/eth0"."""
    if path in _BY_PATH:
        return _BY_PATH[path]
    found = [_lane(name.strip()) for name in lanes.split(",")]
    if path == "staged":  # through host memory, on both sides
        found = [lane for lane in found if lane is not Lane.NVLINK]
    return max(found, default=Lane.TCP)


def shortfall(requirement: Requirement, lanes: str, path: str) -> str:
    """Say why a link does not meet a requirement; empty when it does."""
    if lane_of(lanes, path) >= REQUIREMENTS[requirement]:
        return ""
    return f"its pages go over {lanes or 'unknown lanes'} ({path}), and --kv-require asks for {requirement}"


def _lane(name: str) -> Lane:
    return next((lane for prefix, lane in _BY_PREFIX.items() if name.startswith(prefix)), Lane.TCP)
