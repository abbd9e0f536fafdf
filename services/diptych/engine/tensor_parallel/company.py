"""How a process finds the other ranks of its group, by where they are: on its host, or on several nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from diptych.engine.tensor_parallel.channels import (
    BesideLeader,
    HostChannels,
    LeaderChannels,
    NodeChannels,
    Reaching,
)
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.v1 import rank_pb2

if TYPE_CHECKING:  # needs torch
    from diptych.engine.options.node_place import NodePlace
    from diptych.engine.tensor_parallel.meeting import Meeting
    from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker


class Lead(Protocol):
    """Rank 0's way to the others."""

    def open_log(self, size: int) -> RankLog:
        """Listen for the other ranks."""
        ...

    def meeting(self, log: RankLog) -> Meeting:
        """Return where all meet, and have them told."""
        ...


class HostLead:
    """All ranks are on this host, started by the same process."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def open_log(self, size: int) -> RankLog:
        return RankLog(HostChannels(self._endpoint), size)

    def meeting(self, log: RankLog) -> Meeting:
        from diptych.engine.tensor_parallel.meeting import file_meeting

        return file_meeting(self._endpoint)


class NodesLead:
    """Some ranks are on other nodes, whose processes hear from ours where it listens."""

    def __init__(self, endpoint: str, place: NodePlace, size: int, tell: Callable[[rank_pb2.RankDoors], None]) -> None:
        """Listen at once, and `tell` where: other nodes start their ranks then."""
        channels = LeaderChannels(endpoint, place.host)
        self._log = RankLog(channels, size)
        self._place = place
        tell(channels.doors())

    def open_log(self, size: int) -> RankLog:
        return self._log

    def meeting(self, log: RankLog) -> Meeting:
        from diptych.engine.tensor_parallel.meeting import StoreMeeting

        meeting, where = StoreMeeting.open(self._place.host, self._place.interface, self._place.num_nodes)
        log.wait_for_ranks(self._place.wait_s)
        log.append(rank_pb2.RankEntry(meet=where))
        return meeting


def reaching(endpoint: str, place: NodePlace | None, on_lost: Callable[[str], None]) -> Reaching:
    """Return how a rank other than 0 reaches it. See `NodeChannels` for `on_lost`."""
    if place is None:
        return HostChannels(endpoint)
    if place.node == 0:
        return BesideLeader(endpoint)
    return NodeChannels(endpoint, place.host, place.ports, on_lost)


def joining(endpoint: str, place: NodePlace | None, worker: TpModelWorker) -> Meeting:
    """Return where a rank other than 0 meets the others."""
    from diptych.engine.tensor_parallel.meeting import StoreMeeting, file_meeting

    if place is None:
        return file_meeting(endpoint)
    return StoreMeeting.join(worker.meeting(), place.interface, place.num_nodes)
