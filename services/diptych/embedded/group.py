"""The schedulers of an embedded engine: groups for whole requests, or linked ones for each half. Asyncio.

A `Group` has what is due to its scheduler, the legs that are open there, and what it says. When the scheduler dies,
every open leg is lost at once, and every later question ends with its `SchedulerDied`. So it is with one that can't be
told what to do, or understood.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence, Set
from typing import Final

from diptych.common.errors import ConfigError
from diptych.common.members.roles import LegKind, Role
from diptych.engine.frontend.scheduler_client import (
    PendingQueries,
    SchedulerClient,
    SchedulerDied,
    share_experts,
    start_scheduler,
)
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.scheduler.messages import outputs_said
from diptych.engine.tensor_parallel.sharing.places import shared_places
from diptych.engine.values.transfer_rules import TransferRules
from diptych.router.workers.known_worker import reported_load
from diptych.router.workers.legs import Leg, LegReceiver, OpenLegs, Work
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S: Final = 60.0  # for every link to pass its test, once the models are loaded
MAX_BATCH_BYTES: Final = 16 << 20  # of legs in a message, beyond the first: protobuf takes less than 2 GiB


class Group:
    """Built in the event loop; `run` once it is `ready`."""

    def __init__(self, scheduler: SchedulerClient, instance_id: int, role: Role, page_size: int) -> None:
        self.instance_id = instance_id
        self.role = role
        self.linked: Set[int] = frozenset()  # peers
        self.problem = ""  # why no peer is linked
        self.scheduler = scheduler
        self._page_size = page_size
        self._legs = OpenLegs()
        self._due, self._is_due = engine_pb2.SchedulerCommands(), asyncio.Event()
        self._starts: deque[tuple[int, worker_pb2.StartLeg]] = deque()  # legs that are due, and their bytes
        self._reported = reported_load(bootstrap_pb2.WorkerLoad(), page_size)
        self._link_news = asyncio.Event()
        self._death: asyncio.Future[SchedulerDied] = asyncio.get_running_loop().create_future()
        self.queries = PendingQueries(scheduler, self._death)

    @property
    def death(self) -> SchedulerDied | None:
        return self._death.result() if self._death.done() else None

    @property
    def load(self) -> WorkerLoad:
        return self._legs.load(self._reported)

    async def run(self) -> None:
        """Send what is due and deliver what the scheduler says, until it dies, or can't be told or understood any more.

        Legs that are open then are lost.
        """
        halves = [asyncio.create_task(self._send()), asyncio.create_task(self._listen())]
        try:
            ended, _ = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            for half in ended:
                half.result()
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            self._legs.lose_all("the engine was closed")

    async def _listen(self) -> None:
        try:
            async for events in self.scheduler.events():
                self._on_events(events)
        except SchedulerDied as death:
            self._die(death)
        except Exception as error:
            logger.exception("what the scheduler says can't be understood")
            self._die(SchedulerDied(f"what it says can't be understood: {error!r}"))

    def _die(self, death: SchedulerDied) -> None:
        if not self._death.done():
            self._death.set_result(death)
        self._link_news.set()
        self._legs.lose_all(f"its scheduler group died: {death}")

    async def link(self, peers: Iterable[bootstrap_pb2.Instance]) -> None:
        """Link to these, and wait until each link has passed its test. Raises `SchedulerDied`."""
        self._due.peers.CopyFrom(engine_pb2.PeerView(instances=peers))
        wanted = {peer.instance_id for peer in self._due.peers.instances}
        self._is_due.set()
        while not wanted <= self.linked:
            self._link_news.clear()
            if self.death is not None:
                raise self.death
            await self._link_news.wait()

    # legs

    def start(self, kind: LegKind, leg: worker_pb2.StartLeg, prompt: bytes, work: Work, receiver: LegReceiver) -> None:
        """Send a leg and its prompt, a `StartLeg` in bytes; `receiver` gets its outputs up to the last one."""
        num_bytes = leg.ByteSize() + len(prompt)
        self._legs.add(leg.room, Leg(receiver, kind, work, leg.peer_instance_id, leg.num_prior_output_tokens))
        leg.kind = kind.wire
        leg.MergeFromString(prompt)
        self._starts.append((num_bytes, leg))
        self._is_due.set()

    def abort(self, room: int) -> None:
        """Tell the scheduler to end a leg, unless it has ended. Its last output still comes."""
        if self._legs.mark_aborted(room):
            self._due.abort.append(room)
            self._is_due.set()

    def tool_called(self, room: int, tool: str) -> None:
        """Tell the scheduler that a request which ends there has called a tool."""
        self._due.tool_called.add(room=room, tool=tool)
        self._is_due.set()

    # the scheduler

    async def _send(self) -> None:
        """Send all that became due in one turn of the event loop: in one message, unless legs are long."""
        try:
            while True:
                await self._is_due.wait()
                await self.scheduler.send(self._pop_due())
        except Exception as error:
            logger.exception("the scheduler can't be told what to do")
            self._die(SchedulerDied(f"it can't be told what to do: {error!r}"))

    def _pop_due(self) -> engine_pb2.SchedulerCommands:
        """Return what is to be sent next. What is no leg waits until all are sent: no abort may overtake its start."""
        commands, num_bytes = engine_pb2.SchedulerCommands(), 0
        while self._starts and (not num_bytes or num_bytes + self._starts[0][0] <= MAX_BATCH_BYTES):
            leg_bytes, leg = self._starts.popleft()
            num_bytes += leg_bytes
            commands.start.append(leg)
        if not self._starts:
            commands.MergeFrom(self._due)
            self._due.Clear()
            self._is_due.clear()
        return commands

    def _on_events(self, events: engine_pb2.SchedulerEvents) -> None:
        now_s = time.monotonic()
        for output in outputs_said(events):
            self._legs.deliver(output, now_s)
        self.queries.on_admin_answers(events.admin_answers)
        if events.HasField("load"):
            self._reported = reported_load(events.load, self._page_size)
            self._legs.told()
            self.linked = frozenset(events.load.linked_instances)
            self._link_news.set()
        if events.HasField("link_news"):
            self.problem = events.link_news.problem


def roles_of(dp: int, prefill: int, decode: int) -> Sequence[Role]:
    """Return the roles of an engine's groups. Raises `ConfigError`."""
    if not prefill and not decode:
        return [Role.LOCAL] * dp
    if min(prefill, decode) < 1:
        raise ConfigError(f"an engine has prefill and decode groups, or neither: not {prefill} and {decode}")
    if dp > 1:
        raise ConfigError("dp is for groups that serve whole requests: give the numbers prefill and decode only")
    return [Role.PREFILL] * prefill + [Role.DECODE] * decode


@contextlib.asynccontextmanager
async def launched(options: EngineOptions, roles: Sequence[Role]) -> AsyncIterator[tuple[Sequence[Group], int]]:
    """Yield groups that serve, and the tokens that a request may have. Raises `SchedulerDied`, `ConfigError`."""
    groups: list[Group] = []
    running: list[asyncio.Task[None]] = []
    places = contextlib.ExitStack()
    sharing = places.enter_context(shared_places(options))
    try:
        for number, role in enumerate(roles):
            place = sharing[number] if options.dp_attention else None
            groups.append(await _start(options.of_group(number), role, place))
        if options.dp_attention:
            share_experts([group.scheduler for group in groups])
        readies = await asyncio.gather(*(group.scheduler.ready() for group in groups))
        running += [asyncio.create_task(_run(group)) for group in groups]
        await _link(groups, readies)
        yield groups, min(ready.context_len for ready in readies)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*(group.scheduler.stop() for group in groups))
        places.close()


async def _run(group: Group) -> None:
    """Run a group until it dies; those that share its experts can't step without it, and end with it.

    Its scheduler may live on, when it can't be told what to do, or understood: nobody waits for what it computes.
    """
    await group.run()
    if group.death is not None:
        await group.scheduler.end_companions()
        await group.scheduler.stop()


async def _start(options: EngineOptions, role: Role, sharing: SharedExperts | None) -> Group:
    """Start a scheduler. It lets a request wait for memory as long as it takes: nobody else would compute it."""
    config = SchedulerConfig(
        component="engine" if role is Role.LOCAL else role.value,
        log_format="auto",
        log_level="warning",
        instance_id=secrets.randbits(64) or 1,
        transports="auto",
        transfer=TransferRules(),
        engine=options,
        role=role.value,
        retracted_s=math.inf,
        sharing=sharing,
    )
    return Group(await start_scheduler(config), config.instance_id, role, options.page_size)


async def _link(groups: Sequence[Group], readies: Sequence[engine_pb2.SchedulerReady]) -> None:
    """Link each group to those that it exchanges KV with."""
    records = [
        (group.role, bootstrap_pb2.Instance(instance_id=group.instance_id, transfer=ready.transfer))
        for group, ready in zip(groups, readies, strict=True)
    ]
    peers = [[record for role, record in records if group.role.exchanges_with(role)] for group in groups]
    try:
        async with asyncio.timeout(LINK_TIMEOUT_S):
            await asyncio.gather(*(group.link(each) for group, each in zip(groups, peers, strict=True) if each))
    except TimeoutError:
        problems = "; ".join({group.problem for group in groups if group.problem})
        raise ConfigError(f"prefill and decode were not linked within {LINK_TIMEOUT_S:g} s: {problems}") from None
