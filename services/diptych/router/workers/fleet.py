"""All workers as this router reaches them: keeps a session for each member, and knows which pairs may serve now.

What is said of pairs, adapters and limits is of one model. Where a router serves several, each has a fleet: they stand
beside each other over the same sessions, which the first one keeps, and learn of their own workers only.

Rule: level-triggered. Every change of the membership compares the whole set, so no lost update can strand a worker;
while the bootstrap service is away the last set stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from diptych.common.errors import Unavailable
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, LegKind, Role
from diptych.common.trust.trust import Trust
from diptych.router.choose.cached_prefixes import LATELY_S, ApproximateIndex, CachedPrefixes, TextIndex
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.pairing import (
    TEXT_KINDS,
    VECTOR_KINDS,
    explain,
    is_cold,
    is_missing,
)
from diptych.router.choose.pools import REST, Weights, group, may_serve
from diptych.router.choose.prefix_index import PrefixIndex
from diptych.router.metrics import RouterMetrics
from diptych.router.pool_metrics import PoolMember
from diptych.router.workers.availability import Availability
from diptych.router.workers.known_worker import KnownWorker
from diptych.router.workers.session import Session
from diptych.router.workers.worker_view import Pair
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

LAST_WORDS_S: Final = 1.0  # for what a worker sent before it said goodbye


class Membership(Protocol):
    """Who is alive, as the bootstrap service says."""

    def instances(self) -> Mapping[int, Instance]: ...

    def has_ended(self, instance_id: int) -> bool:
        """Whether one that is no longer listed ended by what it or bootstrap said: else it is missed."""
        ...

    def add_listener(self, listener: Callable[[], None]) -> object: ...


class Fleet:
    """The sessions to all workers of a membership. `run` must be running."""

    def __init__(
        self,
        membership: Membership,
        trust: Trust,
        model_id: str,
        metrics: RouterMetrics,
        router_id: int,
        kinds: Sequence[LegKind] = TEXT_KINDS,
    ) -> None:
        """`kinds`: the legs that requests have."""
        self._membership = membership
        self._trust = trust
        self._model_id = model_id
        self._kinds = kinds
        lately = ApproximateIndex(time.monotonic, LATELY_S)
        self.prefixes = CachedPrefixes(PrefixIndex(), ApproximateIndex(time.monotonic), lately)
        self.text_index = TextIndex(time.monotonic)
        self.estimates = Estimates()
        self._metrics = metrics
        self.router_id = router_id  # this router's instance id
        self._sessions: dict[int, Session] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.pools: Weights = {}  # as declared; see `declare`
        self.expected: frozenset[str] = frozenset()  # adapters; see `expect`
        self._now = self._availability()
        self._changed = asyncio.Event()
        self._closed_because = ""
        self.missing_since_s: float | None = None  # since when no worker of some role is listed
        self._beside: list[Fleet] = []

    def beside(self, model_id: str, kinds: Sequence[LegKind] = TEXT_KINDS) -> Fleet:
        """Return the fleet of another model: the same sessions, which run, are told and are closed with this one."""
        other = Fleet(self._membership, self._trust, model_id, self._metrics, self.router_id, kinds)
        other._sessions, other.prefixes, other.text_index = self._sessions, self.prefixes, self.text_index
        other._now = other._availability()
        self._beside.append(other)
        return other

    async def run(self) -> None:
        """Follow the membership until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._membership.add_listener(lambda: self._reconcile(group))
            self._reconcile(group)
            await asyncio.Event().wait()

    def close(self, reason: str) -> None:
        """Serve nobody any more: every open leg is lost at once, every later request gets `reason`."""
        self._closed_because = reason
        for task in self._tasks.values():
            task.cancel()
        for other in self._beside:
            other._closed_because = reason
        self._note_change()

    # what is known

    def routers(self) -> dict[int, Instance]:
        """The records of the routers that are members, this one too: each process of a router has one."""
        return {key: value for key, value in self._membership.instances().items() if _is_router(value)}

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_because)

    def encoders(self) -> dict[int, int]:
        """Return who may encode images now, of whom somebody who computes prompts reads rows; and how many each has."""
        able = [each for each in self._of_role(Role.ENCODE) if each.is_open and each.worker.takes_legs]
        if not able:
            return {}
        readers = [self._sessions[each].worker for each in {pair.prefill_id for pair in self.pairs()}]
        useful = [each for each in able if any(reader.reads_rows_of(each.worker) for reader in readers)]
        return {each.instance_id: each.num_open_legs for each in useful}

    def session(self, instance_id: int) -> Session:
        return self._sessions[instance_id]

    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def known_workers(self) -> tuple[KnownWorker, ...]:
        return tuple(session.worker for session in self._sessions.values())

    def pool_tokens(self) -> dict[int, int]:
        """Return how many tokens the KV pool of each worker holds, as it told last."""
        return {each.record.instance_id: each.load.total_pages * each.page_size for each in self.known_workers()}

    def own_workers(self) -> tuple[KnownWorker, ...]:
        """Those that were started with this fleet's model, or do not say yet with which."""
        return self._now.own_workers()

    @property
    def model_id(self) -> str:
        """What workers must have been started with to serve here."""
        return self._model_id

    def pairs(self, adapter: str = "") -> tuple[Pair, ...]:
        """The pairs that may serve now, with `adapter` if it is not empty; those that are silent only if all are.

        Of a model that makes no text each has one worker.
        """
        return () if self._closed_because else self._now.pairs(adapter)

    def by_pool(self, adapter: str = "") -> Mapping[str, tuple[Pair, ...]]:
        """Return `pairs` by declared pool; those of workers in none under `REST`."""
        return {} if self._closed_because else self._now.by_pool(adapter)

    def note_attempt(self, pair: Pair) -> None:
        """An attempt begins at a pair."""
        if self.pools:
            self._metrics.pool_attempts.labels(self._pool_of(pair)).inc()

    def note_failure(self, pair: Pair) -> None:
        """And has failed."""
        if self.pools:
            self._metrics.pool_failures.labels(self._pool_of(pair)).inc()

    def _pool_of(self, pair: Pair) -> str:
        there = (self._sessions.get(each) for each in (pair.prefill_id, pair.decode_id))
        pools = {session.instance_id: session.worker.record.pool for session in there if session}
        return group(pair, pools, self.pools) or REST

    def declare(self, pools: Weights) -> None:
        """Have pools stand beside each other with these weights, from the next choice on."""
        for fleet in (self, *self._beside):
            fleet.pools = pools
        self._note_change()

    def expect(self, adapters: frozenset[str]) -> None:
        """Hear which adapters are declared, and were not in vain: loaded, or to be so soon."""
        if adapters != self.expected:
            self.expected = adapters
            self._note_change()

    def singles(self, adapter: str = "") -> tuple[Pair, ...]:
        """The workers that may make vectors of prompts now, by the same rules, each as a pair with itself."""
        return () if self._closed_because else self._now.singles(adapter)

    def successions(self, adapter: str = "") -> tuple[Pair, ...]:
        """Who may go on with requests that run at whom, with `adapter` if it is not empty."""
        return self._now.successions(adapter)

    def vacating(self) -> frozenset[int]:
        """The workers that wait for the outputs that they make to end."""
        return self._now.vacating

    def adapters(self) -> tuple[str, ...]:
        """The adapters that clients may ask for."""
        return self._now.adapters

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The names of what the pairs serve now, the most served first: more than one while weights are updated."""
        return (self._model_id,) if self._closed_because else self._now.model_ids

    def problem(self, adapter: str = "") -> str | None:
        """Why no pair may serve, in words; None when one may."""
        if self.pairs(adapter):
            return None
        if adapter and self.pairs():
            return f"no linked prefill and decode worker have the same weights loaded as adapter {adapter!r}"
        return self._closed_because or explain(self._now.views(), self._model_id, self._kinds)

    def is_cut_off(self) -> bool:
        """Whether a worker is listed as ready that is not reached: it may be dead, or there for another router."""
        return self._now.is_cut_off()

    @property
    def page_sizes(self) -> frozenset[int]:
        """The page sizes of the KV pools of workers that serve requests, in tokens."""
        return self._now.page_sizes

    def context_len(self, default: int) -> int:
        """The longest request, prompt and output, that every ready worker takes; at most `default`."""
        return min(default, self._now.context_len)

    def num_open_legs(self, role: Role) -> int:
        return sum(session.num_open_legs for session in self._of_role(role))

    def num_cached_pages(self, role: Role) -> int:
        """Pages that workers of a role are known to have cached."""
        return sum(self.prefixes.told.num_pages(session.instance_id) for session in self._of_role(role))

    def num_in_sync(self, role: Role) -> int:
        """Workers of a role whose cached pages are all known."""
        return sum(self.prefixes.told.is_in_sync(session.instance_id) for session in self._of_role(role))

    @property
    def prefix_index_bytes(self) -> int:
        """Memory of what is known of the workers' cached pages."""
        return self.prefixes.nbytes

    def pool_members(self) -> Iterator[PoolMember]:
        """Yield what the pools' measures are made of; they may come and go meanwhile."""
        for session in self.sessions():
            worker, speed = session.worker, session.estimates.of(session.instance_id)
            yield PoolMember(worker.record, worker.load, speed.prefill)

    def is_cold(self, pool: str = "") -> bool:
        """Whether no worker for some leg is ready that may serve requests which name a pool, or, empty, none.

        So one has to be started, or is starting.
        """
        views = [view for view in self._now.own_views() if may_serve(view.pool, self.pools, pool)]
        return not self._serves(pool) and is_cold(views)

    def _serves(self, pool: str) -> bool:
        """Whether a pair may serve such requests."""
        if pool:
            return pool in self.by_pool()
        return any(may_serve(name, self.pools, "") for name in self.by_pool())

    async def wait_while_cold(self, timeout_s: float, pool: str = "") -> float:
        """Wait until a pair may serve, for so long at most, if workers have to start first; return how long it took."""
        if timeout_s <= 0 or not self.is_cold(pool):
            return 0.0
        begun_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._serves(pool) and not self._closed_because:
                    await self.wait_for_change()
        return time.monotonic() - begun_s

    def is_coming(self, adapter: str) -> bool:
        """Whether an adapter is to be loaded that clients may not ask for yet."""
        return adapter in self.expected and adapter not in self.adapters()

    async def wait_for_adapter(self, adapter: str, timeout_s: float) -> float:
        """Wait until an adapter that is coming is there or has failed, for so long at most; return how long it took."""
        begun_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.is_coming(adapter) and not self._closed_because:
                    await self.wait_for_change()
        return time.monotonic() - begun_s

    async def wait_for_singles(self, timeout_s: float, adapter: str = "") -> tuple[Pair, ...]:
        """Return `singles(adapter)` likewise."""
        alone = await self.wait_for(partial(self.singles, adapter), timeout_s)
        if not alone:
            raise Unavailable(self._closed_because or explain(self._now.views(), self._model_id, VECTOR_KINDS))
        return alone

    async def wait_for(self, found: Callable[[], tuple[Pair, ...]], timeout_s: float) -> tuple[Pair, ...]:
        """Return what is found now, or becomes so in time; nothing where it does not."""
        if pairs := found():
            return pairs
        try:
            async with asyncio.timeout(timeout_s):
                while not (pairs := found()) and not self._closed_because:
                    await self.wait_for_change()
        except TimeoutError:
            return ()
        return pairs

    async def wait_for_change(self) -> None:
        """Wait until another pair, or none any more, may serve, or might."""
        await self._changed.wait()

    def _of_role(self, role: Role) -> list[Session]:
        return [session for session in self._sessions.values() if session.worker.role is role]

    # changes

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        members = {key: value for key, value in self._membership.instances().items() if _is_worker(value)}
        for instance_id in self._sessions.keys() - members.keys():
            self._drop(instance_id, group)
        for instance_id, instance in members.items():
            if instance_id in self._sessions:
                self._sessions[instance_id].update(instance)
            elif not self._closed_because:
                self._add(instance, group)
        for fleet in (self, *self._beside):
            fleet._note_missing()
        self._note_change()

    def _note_missing(self) -> None:
        if not is_missing(self._now.own_views(), self._kinds):
            self.missing_since_s = None
        elif self.missing_since_s is None:
            self.missing_since_s = time.monotonic()

    def _add(self, instance: Instance, group: asyncio.TaskGroup) -> None:
        of_model = {fleet.model_id: fleet.estimates for fleet in (*self._beside, self)}
        estimates = of_model.get(instance.started_as or instance.model_id, self.estimates)
        session = Session(
            instance, self._trust, self._note_change, self.prefixes.told, estimates, self._metrics, self.router_id
        )
        self._sessions[session.instance_id] = session
        self._tasks[session.instance_id] = group.create_task(session.run())

    def _drop(self, instance_id: int, group: asyncio.TaskGroup) -> None:
        session = self._sessions.pop(instance_id)
        self.text_index.forget(instance_id)
        self.prefixes.forget(instance_id)
        if self._membership.has_ended(instance_id) and not self._closed_because:
            group.create_task(self._await_last_outputs(session))
        else:
            self._end(instance_id)

    async def _await_last_outputs(self, session: Session) -> None:
        """Keep the stream for the last outputs: a goodbye comes by another connection, and may overtake them."""
        await session.wait_until_idle(LAST_WORDS_S)
        self._end(session.instance_id)

    def _end(self, instance_id: int) -> None:
        self._tasks.pop(instance_id).cancel()
        for fleet in (self, *self._beside):
            fleet.estimates.forget(instance_id)

    def _note_change(self) -> None:
        for fleet in (self, *self._beside):
            fleet._forget()

    def _availability(self) -> Availability:
        return Availability(self._sessions, self._model_id, self._kinds, self.pools)

    def _forget(self) -> None:
        """Have what follows from the workers found anew, and wake who waits for a change."""
        self._now = self._availability()
        self._changed.set()
        self._changed = asyncio.Event()


class AnyOf:
    """The fleets of all models: something may be served when one of them may."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        """The first one is that which the others are beside."""
        self._fleets = fleets

    def problem(self) -> str | None:
        """Why nothing may be served, in words; None when something may."""
        problems = [fleet.problem() for fleet in self._fleets]
        return None if None in problems else "; ".join(dict.fromkeys(words for words in problems if words))

    def is_cut_off(self) -> bool:
        return self._fleets[0].is_cut_off()

    async def wait_for_change(self) -> None:
        await self._fleets[0].wait_for_change()


def _is_worker(instance: Instance) -> bool:
    return instance.role in WORKER_ROLES and State.STARTING <= instance.state < State.GONE


def _is_router(instance: Instance) -> bool:
    return instance.role == ROLE_ROUTER and State.STARTING <= instance.state < State.GONE
