"""What rank 0 does on behalf of its group: alone nothing, or as the lead of other ranks.

The lead wraps what touches weights or KV, so that each such act is an entry of the log before it is done here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from diptych.engine.batch import OverlapRunner
from diptych.engine.host_tier import PageCopier
from diptych.engine.tensor_parallel.communicator import Communicator, TorchCommunicator
from diptych.engine.tensor_parallel.copier import TensorParallelCopier
from diptych.engine.tensor_parallel.rank_log import NoRanks, RankLog, store_path
from diptych.engine.tensor_parallel.runner import TensorParallelRunner
from diptych.engine.tensor_parallel.transport import TensorParallelTransport
from diptych.kvtransfer.transport import Transport


class RankGroup(Protocol):
    """The ranks of a scheduler, as its composition root needs them."""

    @property
    def communicator(self) -> Communicator | None:
        """None for one rank."""
        ...

    def lead_transport(self, transport: Transport) -> Transport: ...

    def lead_copier(self, copier: PageCopier) -> PageCopier: ...

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        """Wait until every rank has loaded its part."""
        ...

    def close(self) -> None: ...


class Alone:
    """Implements `RankGroup` for one rank."""

    communicator = None

    def lead_transport(self, transport: Transport) -> Transport:
        return TensorParallelTransport(transport, NoRanks())  # a peer may have several

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return copier

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        return runner

    def close(self) -> None:
        pass


class Lead:
    """Implements `RankGroup` for several."""

    def __init__(self, endpoint: str, size: int, device: torch.device) -> None:
        """Wait until every rank is here; `endpoint` is the scheduler's own."""
        self._log = RankLog(endpoint, size)
        self.communicator = TorchCommunicator(0, size, store_path(endpoint), device)

    def lead_transport(self, transport: Transport) -> Transport:
        return TensorParallelTransport(transport, self._log)

    def lead_copier(self, copier: PageCopier) -> PageCopier:
        return TensorParallelCopier(copier, self._log)

    def lead_runner(self, runner: OverlapRunner) -> OverlapRunner:
        assert all(answer.is_loaded for answer in self._log.answers())
        return TensorParallelRunner(runner, self._log)

    def close(self) -> None:
        self._log.close()
        self.communicator.close()


def rank_group(endpoint: str, size: int, device: torch.device) -> RankGroup:
    """Return the group of rank 0."""
    return Lead(endpoint, size, device) if size > 1 else Alone()
