"""All workers as this router reaches them: keeps a session for each member, and knows which pairs may serve now.

Rule: level-triggered. Every change of the membership compares the whole set, so no lost update can strand a worker;
while the bootstrap service is away the last set stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from diptych.common.errors import Unavailable
from diptych.common.membership import State
from diptych.router.metrics import RouterMetrics
from diptych.router.pairing import adapters, explain, pair_up, with_adapter
from diptych.router.prefix_index import PrefixIndex
from diptych.router.session import ROLES, Session
from diptych.router.worker_view import Pair, Role, WorkerView
from diptych.v1.bootstrap_pb2 import Instance


class Membership(Protocol):
    """Who is alive, as the bootstrap service says."""

    def instances(self) -> Mapping[int, Instance]: ...

    def add_listener(self, listener: Callable[[], None]) -> object: ...


class Fleet:
    """The sessions to all workers of a membership. `run` must be running."""

    def __init__(self, membership: Membership, model_id: str, metrics: RouterMetrics) -> None:
        self._membership = membership
        self._model_id = model_id
        self.prefix_index = PrefixIndex()
        self._metrics = metrics
        self._sessions: dict[int, Session] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pairs: dict[str, tuple[Pair, ...]] = {}  # by adapter; empty after a change
        self._adapters: tuple[str, ...] | None = None
        self._changed = asyncio.Event()
        self._closed_because = ""

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
        self._note_change()

    # what is known

    def session(self, instance_id: int) -> Session:
        return self._sessions[instance_id]

    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def pairs(self, adapter: str = "") -> tuple[Pair, ...]:
        """The pairs that may serve now, with `adapter` if it is not empty."""
        if self._closed_because:
            return ()
        if adapter not in self._pairs:
            pairs = pair_up(self._views(), self._model_id)
            self._pairs[adapter] = with_adapter(pairs, self._views(), adapter) if adapter else pairs
        return self._pairs[adapter]

    def adapters(self) -> tuple[str, ...]:
        """The adapters that clients may ask for."""
        if self._adapters is None:
            self._adapters = adapters(self._views())
        return self._adapters

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The names of what the pairs serve now, the most served first: more than one while weights are updated."""
        served = Counter(self._sessions[pair.prefill_id].model_id for pair in self.pairs())
        return tuple(name for name, _ in served.most_common()) or (self._model_id,)

    def problem(self, adapter: str = "") -> str | None:
        """Why no pair may serve, in words; None when one may."""
        if self.pairs(adapter):
            return None
        if adapter and self.pairs():
            return f"no linked prefill and decode worker have the same weights loaded as adapter {adapter!r}"
        return self._closed_because or explain(self._views(), self._model_id)

    def context_len(self, default: int) -> int:
        """The longest request, prompt and output, that every ready worker takes; at most `default`."""
        ready = [session.context_len for session in self._sessions.values() if session.is_ready]
        return min([default, *ready])

    def num_open_legs(self, role: Role) -> int:
        return sum(session.num_open_legs for session in self._sessions.values() if session.role is role)

    def num_cached_pages(self, role: Role) -> int:
        """Pages that workers of a role are known to have cached."""
        workers = [session for session in self._sessions.values() if session.role is role]
        return sum(self.prefix_index.num_pages(session.instance_id) for session in workers)

    def num_in_sync(self, role: Role) -> int:
        """Workers of a role whose cached pages are all known."""
        workers = [session for session in self._sessions.values() if session.role is role]
        return sum(self.prefix_index.is_in_sync(session.instance_id) for session in workers)

    async def wait_for_pairs(self, timeout_s: float, adapter: str = "") -> tuple[Pair, ...]:
        """Return `pairs(adapter)`, waiting for one if need be. Raises `Unavailable`, saying why there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (pairs := self.pairs(adapter)) and not self._closed_because:
                    await self.wait_for_change()
        except TimeoutError:
            pairs = ()
        if not pairs:
            raise Unavailable(self.problem(adapter) or "no worker is available")
        return pairs

    async def wait_for_change(self) -> None:
        """Wait until another pair, or none any more, may serve, or might."""
        await self._changed.wait()

    def _views(self) -> list[WorkerView]:
        return [session.view() for session in self._sessions.values()]

    # changes

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        members = {key: value for key, value in self._membership.instances().items() if _is_worker(value)}
        for instance_id in self._sessions.keys() - members.keys():
            self._drop(instance_id)
        for instance_id, instance in members.items():
            if instance_id in self._sessions:
                self._sessions[instance_id].update(instance)
            elif not self._closed_because:
                self._add(instance, group)
        self._note_change()

    def _add(self, instance: Instance, group: asyncio.TaskGroup) -> None:
        session = Session(instance, self._note_change, self.prefix_index, self._metrics)
        self._sessions[session.instance_id] = session
        self._tasks[session.instance_id] = group.create_task(session.run())

    def _drop(self, instance_id: int) -> None:
        del self._sessions[instance_id]
        self._tasks.pop(instance_id).cancel()

    def _note_change(self) -> None:
        self._pairs.clear()
        self._adapters = None
        self._changed.set()
        self._changed = asyncio.Event()


def _is_worker(instance: Instance) -> bool:
    return instance.role in ROLES and State.STARTING <= instance.state < State.GONE
