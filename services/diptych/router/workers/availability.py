"""What workers can serve as they are: the pairs that may have a request, and what follows from these.

A fleet makes it anew whenever a worker changes. Each answer is found when somebody first asks, and kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from diptych.common.members.record import State
from diptych.common.members.roles import LegKind, Role
from diptych.router.choose.pairing import (
    VECTOR_KINDS,
    adapters,
    heard,
    pair_up,
    singles,
    successions,
    vacating,
    with_adapter,
)
from diptych.router.choose.pools import Weights, grouped, meeting
from diptych.router.workers.known_worker import KnownWorker
from diptych.router.workers.session import Session
from diptych.router.workers.worker_view import Pair, WorkerView


class Availability:
    """What the workers of one model can serve until one of them changes."""

    def __init__(
        self, sessions: Mapping[int, Session], model_id: str, kinds: Sequence[LegKind], pools: Weights
    ) -> None:
        """`sessions`: of all workers, of other models too; `kinds`: the legs of requests; `pools`: as declared."""
        self._sessions = sessions
        self._model_id = model_id
        self._kinds = kinds
        self._pools = pools
        self._pairs: dict[str, tuple[Pair, ...]] = {}  # by adapter
        self._by_pool: dict[str, dict[str, tuple[Pair, ...]]] = {}  # likewise
        self._singles: dict[str, tuple[Pair, ...]] = {}
        self._successions: dict[str, tuple[Pair, ...]] = {}

    def views(self) -> list[WorkerView]:
        return [session.view() for session in self._sessions.values()]

    def own_views(self) -> list[WorkerView]:
        """Return the views of `own_workers`."""
        return [view for view in self.views() if view.model_id in (self._model_id, "")]

    def own_workers(self) -> tuple[KnownWorker, ...]:
        """Return those that were started with this model, or do not say yet with which."""
        workers = (session.worker for session in self._sessions.values())
        return tuple(worker for worker in workers if worker.started_as in (self._model_id, ""))

    def pairs(self, adapter: str) -> tuple[Pair, ...]:
        """Return the pairs that may serve, with `adapter` if it is not empty."""
        if self._kinds == VECTOR_KINDS:
            return self.singles(adapter)
        if adapter not in self._pairs:
            views = self.views()
            self._pairs[adapter] = self._fit(self._meeting(pair_up(views, self._model_id), views), views, adapter)
        return self._pairs[adapter]

    def by_pool(self, adapter: str) -> Mapping[str, tuple[Pair, ...]]:
        """Return `pairs` by declared pool; those of workers in none stand under `REST`."""
        if adapter not in self._by_pool:
            self._by_pool[adapter] = grouped(self.pairs(adapter), _pools_of(self.views()), self._pools)
        return self._by_pool[adapter]

    def singles(self, adapter: str) -> tuple[Pair, ...]:
        """Return the workers that may make vectors of prompts, each as a pair with itself."""
        if adapter not in self._singles:
            views = self.views()
            self._singles[adapter] = self._fit(singles(views, self._model_id), views, adapter)
        return self._singles[adapter]

    def successions(self, adapter: str) -> tuple[Pair, ...]:
        """Return who may go on with requests that run at whom."""
        if adapter not in self._successions:
            views = self.views()
            pairs = self._meeting(successions(views, self._model_id), views)
            self._successions[adapter] = self._fit(pairs, views, adapter)
        return self._successions[adapter]

    @cached_property
    def vacating(self) -> frozenset[int]:
        """The workers that wait for the outputs that they make to end."""
        return vacating(self.own_views())

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that clients may ask for."""
        return adapters(self.own_views())

    @cached_property
    def model_ids(self) -> tuple[str, ...]:
        """The names of what the pairs serve, the most served first; the model's own where there is no pair."""
        served = Counter(self._sessions[pair.prefill_id].worker.record.model_id for pair in self.pairs(""))
        return tuple(name for name, _ in served.most_common()) or (self._model_id,)

    @cached_property
    def page_sizes(self) -> frozenset[int]:
        """The page sizes of the KV pools of workers that serve requests, in tokens."""
        return frozenset(size for worker in self._serving_workers() if (size := worker.page_size))

    @cached_property
    def context_len(self) -> int:
        """The longest request, prompt and output, that every ready worker takes."""
        ready = [worker for worker in self._serving_workers() if worker.state is State.READY]
        return min((worker.record.context_len for worker in ready), default=sys.maxsize)

    def is_cut_off(self) -> bool:
        """Return whether a worker is listed as ready that is not reached."""
        ready = [view for view in self.views() if view.state is State.READY and view.role is not Role.ENCODE]
        return any(not view.session_open for view in ready)

    def _serving_workers(self) -> list[KnownWorker]:
        """Return those of `own_workers` that serve legs of requests: none that does no more than encode images."""
        return [each for each in self.own_workers() if any(map(each.role.serves, self._kinds))]

    def _meeting(self, pairs: Iterable[Pair], views: Iterable[WorkerView]) -> tuple[Pair, ...]:
        return meeting(pairs, _pools_of(views), self._pools)

    def _fit(self, pairs: tuple[Pair, ...], views: Sequence[WorkerView], adapter: str) -> tuple[Pair, ...]:
        """Return those with the adapter, and that are heard of."""
        return heard(with_adapter(pairs, views, adapter) if adapter else pairs, views)


def _pools_of(views: Iterable[WorkerView]) -> dict[int, str]:
    return {view.instance_id: view.pool for view in views}
