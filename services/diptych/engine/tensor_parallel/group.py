"""What rank 0 does on behalf of its group: alone nothing, or as the lead of other ranks.

The lead wraps what touches weights or KV, so that each such act is an entry of the log before it is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.tensor_parallel.copier import TensorParallelCopier
from diptych.engine.tensor_parallel.pool import TensorParallelPages
from diptych.engine.tensor_parallel.rank_log import NoRanks, RankLog
from diptych.engine.tensor_parallel.ranked_link import ranked_metadata
from diptych.engine.tensor_parallel.runner import TensorParallelRunner
from diptych.engine.tensor_parallel.transport import TensorParallelTransport
from diptych.engine.values.batch import OverlapRunner
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PeerTransport, ProbePages, Transport

if TYPE_CHECKING:  # needs torch
    from diptych.engine.tensor_parallel.communicator import TorchCommunicator


class RankGroup(Protocol):
    """The ranks of a scheduler, as its composition root needs them."""

    def metadata(self, own: bytes) -> bytes:
        """Return what peers need to connect to all ranks. Once: waits for theirs."""
        ...

    def lead_transport(self, transport: Transport, layout: PoolLayout) -> PeerTransport:
        """Show the links of all ranks as one. `layout` is that of rank 0's part of the pool."""
        ...

    def lead_pool(self, pool: ProbePages) -> ProbePages: ...

    def lead_copier(self, copier: PageCopier) -> PageCopier: ...

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        """Wait until every rank has loaded its part."""
        ...

    def close(self) -> None: ...


class Alone:
    """Implements `RankGroup` for one rank."""

    def metadata(self, own: bytes) -> bytes:
        return ranked_metadata([own])

    def lead_transport(self, transport: Transport, layout: PoolLayout) -> PeerTransport:
        return TensorParallelTransport(transport, layout, NoRanks())  # a peer may have several

    def lead_pool(self, pool: ProbePages) -> ProbePages:
        return pool

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return copier

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        return runner

    def close(self) -> None:
        pass


class Lead:
    """Implements `RankGroup` for several."""

    def __init__(self, endpoint: str, size: int, join: Callable[[], TorchCommunicator]) -> None:
        """Wait until every rank is here, then `join` them; `endpoint` is the scheduler's own."""
        self._log = RankLog(endpoint, size)
        self._communicator = join()

    def metadata(self, own: bytes) -> bytes:
        return ranked_metadata([own, *(answer.engine_metadata for answer in self._log.answers())])

    def lead_transport(self, transport: Transport, layout: PoolLayout) -> PeerTransport:
        return TensorParallelTransport(transport, layout, self._log)

    def lead_pool(self, pool: ProbePages) -> ProbePages:
        return TensorParallelPages(pool, self._log)

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return TensorParallelCopier(copier, self._log)

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        assert all(answer.is_loaded for answer in self._log.answers())
        return TensorParallelRunner(runner, self._log)

    def close(self) -> None:
        self._log.close()
        self._communicator.close()
