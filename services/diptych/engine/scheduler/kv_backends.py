"""The libraries that move KV between workers. Imported and loaded when chosen: one UCX fits into a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych.common.members.roles import Role
from diptych.engine.options.config import KvBackend, SchedulerConfig
from diptych.kvtransfer.transport import Transport


def open_transport(config: SchedulerConfig) -> Transport | None:
    """Open the transport of a process; None where it has no peers. Raises `ConfigError` if its library is missing."""
    return None if Role(config.role) is Role.LOCAL else _BACKENDS[config.kv_backend](config)


def _open_ucx(config: SchedulerConfig) -> Transport:
    """Ranks other than 0 hear of a grant later than the peer that it is for, and can't tell a write that is early."""
    from diptych.kvtransfer import ucx

    options = ucx.UcxOptions(transports=config.transports, only_granted=config.rank == 0)
    return ucx.open_transport(config.transfer_id, options=options)


def _open_nixl(config: SchedulerConfig) -> Transport:
    from diptych.kvtransfer import nixl

    return nixl.open_transport(config.transfer_id, options=nixl.NixlOptions(transports=config.transports))


_BACKENDS: Final[dict[KvBackend, Callable[[SchedulerConfig], Transport]]] = {"ucx": _open_ucx, "nixl": _open_nixl}
