"""What the console is told of each worker, and of the router that it asks: values, taken at one moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diptych.router.choose.breakers import Pause, Suspect
from diptych.router.choose.estimates import WorkerSpeed
from diptych.router.choose.pools import Weights
from diptych.router.console.state import StepRate
from diptych.router.workers.worker_view import WorkerLoad, WorkerView
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.bootstrap_pb2 import WorkerLoad as ReportedLoad
from diptych.v1.worker_pb2 import LinkStatus, WorkerStatus


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """All that is known of one worker."""

    record: Instance
    reported: ReportedLoad  # as it told it last
    view: WorkerView
    load: WorkerLoad  # as requests are routed by
    speed: WorkerSpeed | None = None  # None: none was measured
    cached_pages: int = 0
    status: WorkerStatus | None = None  # None: it has not told
    links: Sequence[LinkStatus] = ()
    rate: StepRate | None = None
    link_rates: Mapping[int, float] = field(default_factory=dict)  # bytes/s, by peer; none: left out

    @property
    def instance_id(self) -> int:
        return self.view.instance_id


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """The router that answers."""

    instance_id: int
    version: str
    model_id: str
    problem: str | None = None  # why nothing can be served
    routers: Sequence[Instance] = ()  # that are listed
    pauses: Mapping[Suspect, Pause] = field(default_factory=dict)  # of open breakers
    pools: Weights = field(default_factory=dict)  # as declared
    others: Sequence[str] = ()  # the other models that it serves
