"""How the NIXL transport is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.ucx.options import ucx_settings

_SHARED_MEMORY: Final = "sysv,posix,cma,self"  # only cma can put where UCX has not allocated
_EARLY: Final = {
    "NIXL_LOG_LEVEL": "FATAL",  # a dead peer is an event of ours, not several errors of NIXL's
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",  # signal handlers are the program's
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """Options of `NixlTransport`."""

    transports: Literal["auto", "shm", "tcp"] = "auto"  # what the UCX inside NIXL may use
    heartbeat_s: float = 0.25
    heartbeat_misses: int = 5  # silent heartbeats until a link is given up
    connect_s: float = 3.0  # for a new link to come up
    max_operations: int = 4096  # open; more is refused until some complete
    max_waiting_notes: int = 8192  # of one peer, received and not polled; beyond it that peer must wait


def environment(transports: Transports, present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before NIXL is loaded: its plugins take no other settings."""
    wanted = {f"UCX_{name}": value for name, value in ucx_settings(transports, present).items()}
    if transports == "shm":
        wanted["UCX_TLS"] = _SHARED_MEMORY
    return {name: value for name, value in _EARLY.items() if name not in present} | wanted
