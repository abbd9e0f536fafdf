"""The document of the fleet, made of what is known of each worker. Pure.

It is made some times a second while somebody looks. So what is only known to so many digits is told with so many, and
does not change in between: a document that is the same costs no viewer anything. For 64 workers with 32 links each it
takes 2 ms, and 4 ms more when all their links are news; for 256 with 128 each 11 ms, and 30 ms more: in pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from diptych.common.members.instances import ranks_of, role_of, state_of
from diptych.common.members.roles import LegKind
from diptych.router.choose.breakers import Pause, Suspect
from diptych.router.console.fleet.pool_signals import pool_signals
from diptych.router.console.fleet.unpaired import state_name, unpaired_of_all
from diptych.router.console.fleet.worker_facts import RouterFacts, WorkerFacts
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import Drain, FleetState, Link, RouterCard, WorkerCard
from diptych.v1 import worker_pb2
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import LINK_STATE_UP, LinkStatus, WorkerStatus

MAX_LINKS: Final = 16  # of a worker that are told
_BY_TRAFFIC: Final = operator.itemgetter(0)


class LinkMemo:
    """The links of workers as they were last told: what has not changed is not made again, and stays the same object.

    Links are most of the document. They are news about once a second, and few of them change by then.
    """

    def __init__(self) -> None:
        self._workers: dict[int, _Shown] = {}

    def shown(self, worker: WorkerFacts) -> _Shown:
        """Return a worker's links that are told, and how many are up."""
        before = self._workers.get(worker.instance_id, _NOTHING)
        if before.links is worker.links and before.rates is worker.link_rates:
            return before
        told = shown_links(worker.links, worker.link_rates, before.told)
        num_up = sum(link.state == LINK_STATE_UP for link in worker.links)
        shown = self._workers[worker.instance_id] = _Shown(worker.links, worker.link_rates, told, num_up)
        return shown

    def keep(self, workers: Iterable[WorkerFacts]) -> None:
        """Forget all but these."""
        present = {worker.instance_id for worker in workers}
        for instance_id in self._workers.keys() - present:
            del self._workers[instance_id]


class _Shown(NamedTuple):
    """The links of a worker."""

    links: Sequence[LinkStatus]
    rates: Mapping[int, float]
    told: dict[str, Link]
    num_up: int


_NOTHING: Final = _Shown((), {}, {}, 0)


def fleet_state(here: RouterFacts, workers: Sequence[WorkerFacts], memo: LinkMemo) -> Pieces[FleetState]:
    """Return the document. `memo` is the caller's from one to the next."""
    memo.keep(workers)
    yield
    apart = yield from unpaired_of_all(workers, [here.model_id, *here.others], here.pauses)
    cards = {}
    for each in workers:
        cards[f"{each.instance_id:016x}"] = worker_card(each, here.pauses, memo)
        yield
    pools = pool_signals(workers, here.pools)
    yield
    return FleetState(
        router=f"{here.instance_id:016x}",
        version=here.version,
        model=here.model_id,
        problem=here.problem,
        routers={f"{each.instance_id:016x}": _router(each, here.instance_id) for each in here.routers},
        workers=cards,
        unpaired=apart.told,
        num_unpaired=apart.number,
        pools=pools,
    )


def _router(record: Instance, here_id: int) -> RouterCard:
    is_here = record.instance_id == here_id
    return RouterCard(address=record.address, version=record.version, pod=record.pod, is_here=is_here)


def worker_card(worker: WorkerFacts, pauses: Mapping[Suspect, Pause], memo: LinkMemo) -> WorkerCard:
    shown = memo.shown(worker)
    record, load, status, view = worker.record, worker.reported, worker.status, worker.view
    pause = pauses.get(view.instance_id)
    return WorkerCard(
        role=role_of(record),  # type: ignore[typeddict-item]  # a worker's
        pool=record.pool,
        pod=record.pod,
        nodes=[f"{each.pod or each.host}, ranks {ranks_of(each)}, {each.epoch:016x}" for each in record.nodes],
        address=f"{record.address}#{record.dp_rank}" if record.dp_rank else record.address,
        version=record.version,
        model=record.model_id,
        compat=record.compat,
        state=state_of(record),
        not_ready=record.not_ready,
        is_connected=view.session_open,
        silent_s=load.silent_s,
        is_paused=view.paused,
        breaker="" if pause is None else str(pause),
        started_unix_s=record.started_unix_ns / 1e9,
        queue_s=queue_s(worker),
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_tokens=worker.load.queued_tokens,
        page_size=record.transfer.layout.page_size,
        total_pages=load.total_pages,
        rate=worker.rate,
        adapters=sorted(view.adapters),
        links=shown.told,
        num_links_up=None if status is None else shown.num_up,
        cached_pages=worker.cached_pages,
        prompt_tokens_per_s=_prompt_speed(worker),
        kv_pages={} if status is None else dict(status.pages_by_state),
        drain=None if status is None else _drain(status),
        host_pages=None if status is None else status.host_pages,
        host_pages_saved=None if status is None else status.host_pages_saved,
        host_pages_restored=None if status is None else status.host_pages_restored,
        integrity_failures=None if status is None else status.integrity_failures,
        leaks_found=None if status is None else status.leaks_found,
        retractions=None if status is None else status.retractions,
        max_requests=None if status is None else status.max_requests,
        max_step_tokens=None if status is None else status.max_step_tokens,
        pages_pulled=None if status is None else status.pages_pulled,
        pages_lent=None if status is None else status.pages_lent,
        drafts_verified=None if status is None else _drafts(status, "verified"),
        drafts_accepted=None if status is None else _drafts(status, "accepted"),
        weights_taken_bytes=None if status is None else status.weights_taken_bytes,
    )


def queue_s(worker: WorkerFacts) -> float | None:
    """Return how long a prompt that came now would wait to be begun, as routing expects it.

    For its turn where prompts are computed; for pages where outputs are.
    """
    if worker.speed is None:
        return None
    load, speed = worker.load, worker.speed
    if worker.view.role.serves(LegKind.PREFILL):
        return round(speed.prefill.base * load.num_queued + speed.prefill.mean_slope * load.queued_tokens, 3)
    return 0.0 if load.has_credit else round(speed.grant_wait_s, 3)


def _drafts(status: WorkerStatus, counted: Literal["verified", "accepted"]) -> int | None:
    if not status.HasField("drafting"):
        return None
    return sum(sum(getattr(source, counted)) for source in status.drafting.sources)


def _prompt_speed(worker: WorkerFacts) -> float | None:
    slope = 0.0 if worker.speed is None else worker.speed.prefill.mean_slope
    return float(significant(1 / slope)) if slope and worker.view.role.serves(LegKind.PREFILL) else None


def _drain(status: WorkerStatus) -> Drain | None:
    if not status.HasField("drain"):
        return None
    drain = status.drain
    return Drain(
        phase="empty" if drain.phase == worker_pb2.Drain.PHASE_EMPTY else "draining",
        requests_left=drain.requests_left,
        oldest_s=round(drain.oldest_s, 1),
        deadline_s=round(drain.deadline_s, 1),
    )


def shown_links(links: Sequence[LinkStatus], rates: Mapping[int, float], before: Mapping[str, Link]) -> dict[str, Link]:
    """Return all links, or of many those that say most: not up, then those with the most traffic.

    One that is as it was `before` is the same object.
    """
    if len(links) > MAX_LINKS:
        busy = [(traffic, link) for link in links if (traffic := _traffic(link, rates))]
        links = [link for _, link in sorted(busy, key=_BY_TRAFFIC, reverse=True)[:MAX_LINKS]]
    shown = {}
    for link in links:
        name, rate = f"{link.peer_instance_id:016x}", rates.get(link.peer_instance_id, 0.0)
        old = before.get(name)
        shown[name] = old if old is not None and _is_as_before(link, rate, old) else _link(link, rate)
    return shown


def _traffic(link: LinkStatus, rates: Mapping[int, float]) -> float:
    if link.state != LINK_STATE_UP:
        return math.inf
    return rates.get(link.peer_instance_id, 0.0) + link.in_flight_bytes + link.queued_bytes


def _is_as_before(link: LinkStatus, rate: float, old: Link) -> bool:
    """Whether an idle link is the one that it was: of such there are many."""
    return (
        not rate
        and not old["bytes_per_s"]
        and link.state == LINK_STATE_UP
        and old["state"] == "up"
        and link.bytes_sent == old["bytes_sent"]
        and link.in_flight_bytes == old["in_flight_bytes"]
        and link.queued_bytes == old["queued_bytes"]
        and link.path == old["path"]
        and link.lanes == old["lanes"]
        and _whole(link.last_heard_s) == old["last_heard_s"]
    )


def _link(link: LinkStatus, rate: float) -> Link:
    return Link(
        state=state_name(link),  # type: ignore[typeddict-item]  # one of them
        reason=link.reason,
        path=link.path,
        lanes=link.lanes,
        tested_bytes_per_s=significant(link.bytes_per_s),
        bytes_per_s=significant(rate),
        bytes_sent=link.bytes_sent,
        in_flight_bytes=link.in_flight_bytes,
        queued_bytes=link.queued_bytes,
        last_heard_s=_whole(link.last_heard_s),
    )


def _whole(seconds: float) -> float:
    return float(math.floor(seconds)) if math.isfinite(seconds) else 0.0


def significant(value: float) -> float:
    """Return a number with three digits that count."""
    if not value or not math.isfinite(value):
        return 0.0
    return float(f"{value:.3g}")  # half the time of logarithm and `round`
