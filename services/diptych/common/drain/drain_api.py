"""Serves drains over HTTP: POST begins, or leaves less time, and answers 202; GET returns the progress. Both need the
token. A POST with `?instance=` answers 404 unless that instance is here: another may have its address by now.

    {"phase": "draining", "instances": {"9f2c...": {"phase": "draining", "requests_left": 3, "oldest_s": 4.2,
     "deadline_s": 25.8}}}

`phase` is that of the instance with most left to do: "empty" means that the process may be ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

from starlette.requests import Request
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.drain.drain import DrainProgress, Phase
from diptych.common.errors import NotFound
from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route, seconds
from diptych.common.trust.trust import Trust

_ORDER: Final = list(Phase)


class InstanceDrain(TypedDict):
    """How far one instance is."""

    phase: str
    requests_left: int
    oldest_s: float
    deadline_s: float | None


class DrainAnswer(TypedDict):
    """How far all of a process is."""

    phase: str
    instances: dict[str, InstanceDrain]


class Drainable(Protocol):
    """What can be drained."""

    def ask(self, within_s: float | None) -> None:
        """Begin, or leave less time; None: what is configured."""
        ...

    def progress(self) -> Mapping[str, DrainProgress]:
        """Return how far it is, by instance id as hex digits."""
        ...


def drain_route(path: str, drainable: Drainable, trust: Trust, refusals: Refusals) -> Route:
    """Return the path for both methods."""

    async def handle(request: Request) -> Answer:
        if request.method != "POST":
            return 200, progress_body(drainable.progress())
        wanted = request.query_params.get("instance")
        if wanted is not None and wanted not in drainable.progress():
            raise NotFound(f"instance {wanted} is not here")
        drainable.ask(seconds(request, "deadline_s"))
        return 202, progress_body(drainable.progress())

    return operator_route(path, ("GET", "POST"), handle, trust, refusals)


def progress_body(progress: Mapping[str, DrainProgress]) -> DrainAnswer:
    furthest_back = min((each.phase for each in progress.values()), key=_ORDER.index, default=Phase.GONE)
    return {"phase": furthest_back.value, "instances": {name: _fields(each) for name, each in progress.items()}}


def _fields(progress: DrainProgress) -> InstanceDrain:
    return {
        "phase": progress.phase.value,
        "requests_left": progress.requests_left,
        "oldest_s": round(progress.oldest_s, 3),
        "deadline_s": round(progress.deadline_s, 3) if math.isfinite(progress.deadline_s) else None,
    }
