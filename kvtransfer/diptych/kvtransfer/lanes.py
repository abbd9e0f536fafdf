"""What carries the pages of a link, from slow to fast, by the lanes that the transport library names and the path.

And which paths to a peer an operator allows: `--kv-path` pins one, `--kv-require` excludes slow ones.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Requirement = Literal["any", "shm", "rdma", "nvlink"]
KvPath = Literal["auto", "copy", "put", "message", "mover", "staged"]
Transports = Literal["auto", "shm", "tcp"]  # what may carry pages; auto: the fastest that both ends have


class Lane(enum.IntEnum):
    """A kind of link. Higher is faster."""

    TCP = 0  # and whatever else is not known to be faster
    SHM = 1  # one host's memory
    RDMA = 2
    NVLINK = 3  # one GPU stores into another one's memory


SHARED_MEMORY: Final = ("sysv", "posix", "cma", "xpmem", "knem")  # UCX's lanes

_BY_PATH: Final[Mapping[str, Lane]] = {"copy": Lane.SHM, "mover": Lane.NVLINK}
_BY_PREFIX: Final[Mapping[str, Lane]] = {
    "cuda_ipc": Lane.NVLINK,
    **dict.fromkeys(("rc", "dc", "ud", "srd"), Lane.RDMA),
    **dict.fromkeys((*SHARED_MEMORY, "inproc"), Lane.SHM),
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
    if requirement == "any" or lane_of(lanes, path) >= Lane[requirement.upper()]:
        return ""
    return f"its pages go over {lanes or 'unknown lanes'} ({path}), and --kv-require asks for {requirement}"


@dataclass(frozen=True, slots=True)
class PathRule:
    """What an operator asked for."""

    pinned: KvPath = "auto"
    requirement: Requirement = "any"

    def allowed(self, paths: tuple[str, ...], lanes: str) -> tuple[str, ...]:
        """Return those of `paths` that may be used, in their order."""
        wanted = paths if self.pinned == "auto" else tuple(path for path in paths if path == self.pinned)
        return tuple(path for path in wanted if not shortfall(self.requirement, lanes, path))

    def refusal(self, paths: tuple[str, ...], lanes: str) -> str:
        """Say why none of `paths` may be used."""
        if self.pinned != "auto" and self.pinned not in paths:
            return f"there is no path {self.pinned} to this peer, as --kv-path asks for; there is: {', '.join(paths)}"
        path = paths[0] if self.pinned == "auto" else self.pinned
        return shortfall(self.requirement, lanes, path)


def _lane(name: str) -> Lane:
    return next((lane for prefix, lane in _BY_PREFIX.items() if name.startswith(prefix)), Lane.TCP)
