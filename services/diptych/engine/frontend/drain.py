"""The drain of a whole worker: of every scheduler group that lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from diptych.common.drain.drain import DrainProgress
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.service import name_of


class WorkerDrain:
    """Implements `diptych.common.drain.draining.Drainable`."""

    def __init__(self, groups: Callable[[], Sequence[WorkerGroup]], drain_s: float) -> None:
        self._groups = groups
        self._drain_s = drain_s

    def ask(self, within_s: float | None, instance_id: int = 0) -> None:
        """Drain one instance; 0: all of them. Time that is not given is what is configured."""
        for group in self._groups():
            if instance_id in (0, group.instance_id):
                group.departure.draining.ask(self._drain_s if within_s is None else within_s)

    def progress(self) -> Mapping[str, DrainProgress]:
        return {name_of(group.instance_id): group.departure.draining.progress() for group in self._groups()}
