"""How the UCX transport is set up. What UCX needs to be fast and honest is set here, not left to users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.kvtransfer.lanes import Transports

_TLS: Final[Mapping[Transports, str]] = {"shm": "sysv,posix,self", "tcp": "tcp,self"}

_SETTINGS: Final[Mapping[str, str]] = {
    "MM_ERROR_HANDLING": "y",  # without it, links that report failures drop shared memory and fall back to TCP
    "TCP_TX_SEG_SIZE": "512K",  # twice the speed of the 8K default
    "TCP_RX_SEG_SIZE": "512K",
    "TCP_MAX_IOV": "24",  # a message of ours in one piece; with 6, receivers put it together, which is one more copy
    "TCP_CONN_NB": "y",  # else connecting to a host that is gone stops every link for two minutes
    "KEEPALIVE_INTERVAL": "1s",  # the default of 20 s leaves a dead peer unnoticed for as long
}
_HARDWARE: Final = (Path("/sys/class/infiniband"), Path("/proc/driver/nvidia/gpus"))  # one entry a device


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options of a transport over UCX, ours or that in NIXL."""

    transports: Transports = "auto"  # what may move bytes; auto: the fastest that both ends have
    heartbeat_s: float = 0.25
    heartbeat_misses: int = 5  # silent heartbeats until a link is given up
    connect_s: float = 3.0  # for a new link to come up
    max_operations: int = 4096  # open; more is refused until some complete
    max_waiting_notes: int = 8192  # received and not polled; beyond it nothing more is received, by NIXL of one peer


@dataclass(frozen=True, slots=True)
class UcxOptions(LinkOptions):
    """Options of `UcxTransport`."""

    remote_access: bool | None = None  # offer remote memory access; None: where hardware does it
    only_granted: bool = False  # page messages are written where their sender was granted pages, or nowhere


def ucx_settings(transports: Transports, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings to make, by UCX's names without `UCX_`. What the environment sets is the user's choice."""
    wanted = dict(_SETTINGS)
    if transports in _TLS:
        wanted["TLS"] = _TLS[transports]
    return {name: value for name, value in wanted.items() if f"UCX_{name}" not in environment or name == "TLS"}


def offers_remote_access(options: UcxOptions, folders: Sequence[Path] = _HARDWARE) -> bool:
    """Whether UCX is to offer remote memory access: where hardware does it. What it emulates over TCP checks nobody."""
    if options.remote_access is not None:
        return options.remote_access
    return options.transports == "auto" and any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
