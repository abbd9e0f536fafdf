"""A controller's rounds in virtual time: what it is shown of a platform, and what becomes of its plans.

It sees what a real one would: who was asked for, what came lately, and how busy workers are; never what is to come.
Outputs of requests in flight are expected to become as long as those that have ended.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.generation.slo import Slo
from diptych.planner.values import (
    PLANNED_ROLES,
    Capacity,
    Goal,
    Kind,
    Observed,
    Occupancy,
    Offered,
    Plan,
    Worker,
    WorkerState,
)
from diptych.router.size_metrics import size_of
from diptych.simulator.fleet import Fleet, Member
from diptych.simulator.served import Served
from diptych.simulator.setup import Controller, Drain, Flip, Setup, Start, WorkerSetup

WINDOWS_S: Final = (60.0, 300.0)  # over which loads are told
_STATES: Final = {
    State.STARTING: WorkerState.STARTING,
    State.READY: WorkerState.READY,
    State.DRAINING: WorkerState.DRAINING,
}


class Control:
    """Lets a controller act on a fleet. Call `round` every so often."""

    def __init__(
        self,
        controller: Controller,
        setup: Setup,
        fleet: Fleet,
        clock: Callable[[], float],
        output_len: Callable[[], float],
        only_here: Callable[[], Mapping[int, int]],
    ) -> None:
        """`output_len` says how long outputs are as a rule; `only_here` how many pages each worker alone has cached."""
        self._controller = controller
        self._setup = setup
        self._fleet = fleet
        self._clock = clock
        self._output_len = output_len
        self._only_here = only_here
        self._lately: deque[Served] = deque()  # that came in the longest window, oldest first

    def came(self, served: Served) -> None:
        """A call is offered."""
        self._lately.append(served)

    def round(self) -> None:
        """Show what there is, and do what the plan says."""
        self._forget()
        self._act(self._controller(self._observed()))

    # what it sees

    def _observed(self) -> Observed:
        now_s, slo = self._clock(), self._setup.slo
        waiting = [each for each in self._lately if not each.has_ended and each.attempt is None]
        pages = self._only_here()
        listed = [each for each in self._fleet.members.values() if each.state is not State.GONE]
        workers = [self._worker(each, pages.get(each.worker_id, 0)) for each in listed]
        return Observed(
            now_s=now_s,
            workers=tuple(workers),
            offered=tuple(self._offered(window_s, now_s) for window_s in WINDOWS_S),
            goal=Goal(slo.ttft_s, slo.tpot_s),
            capacity=capacity_of(self._setup.more),
            limits=self._setup.bounds,
            num_queued=len(waiting),
            queued_prompt_tokens=sum(each.call.prompt_len for each in waiting),
            attained=self._attained(slo, now_s),
            start_s=self._setup.more.start_s,
        )

    def _offered(self, window_s: float, now_s: float) -> Offered:
        came = [each for each in self._lately if each.call.arrival_s > now_s - window_s]
        return Offered(window_s, kinds_of(came, min(window_s, now_s) or window_s, self._output_len()))

    def _attained(self, slo: Slo, now_s: float) -> float:
        """Those who wait for longer than they may count as missed, those who still may do not count."""
        verdicts = [kept for each in self._lately if (kept := was_kept(each, slo, now_s)) is not None]
        return sum(verdicts) / len(verdicts) if verdicts else math.nan

    def _worker(self, member: Member, only_here_pages: int) -> Worker:
        state = _STATES[member.state]
        worker = self._fleet.living.get(member.worker_id)
        if worker is None:
            return Worker(member.worker_id, member.serves_next, state, member.since_s)
        load, page_size = worker.core.load(), member.setup.page_size
        unanswered = [
            each.call.arrival_s
            for each in self._lately
            if each.attempt is not None and math.isnan(each.first_s) and each.pair.prefill_id == member.worker_id
        ]
        occupancy = Occupancy(
            load.num_running,
            load.num_waiting,
            load.waiting_tokens,
            (load.total_pages - load.free_pages - load.window_pages) * page_size,
            load.num_running * self._output_len() / 2 + load.num_waiting * self._output_len(),
            self._clock() - min(unanswered, default=self._clock()),
        )
        only_here = only_here_pages * page_size
        return Worker(
            member.worker_id, member.serves_next, state, member.since_s, occupancy, only_here_tokens=only_here
        )

    def _forget(self) -> None:
        while self._lately and self._lately[0].call.arrival_s <= self._clock() - WINDOWS_S[-1]:
            self._lately.popleft()

    # what it wants

    def _act(self, plan: Plan) -> None:
        now_s = self._clock()
        for flip in plan.roles:
            self._fleet.act(Flip(now_s, flip.worker_id, flip.role))
        for worker_id in plan.leaving:
            self._fleet.act(Drain(now_s, worker_id))
        counted = self._counted(plan)
        for role in PLANNED_ROLES:
            for _ in range(plan.sizes.of(role) - counted[role]):
                self._fleet.act(Start(now_s, replace(self._setup.more, role=role)))

    def _counted(self, plan: Plan) -> Mapping[Role, int]:
        """Return how many workers of each role there are, or will be when what was asked for is done."""
        flipped = {flip.worker_id: flip.role for flip in plan.roles}
        staying = [each for each in self._fleet.members.values() if each.state in (State.STARTING, State.READY)]
        return Counter(flipped.get(each.worker_id, each.serves_next) for each in staying)


def capacity_of(setup: WorkerSetup) -> Capacity:
    return Capacity(
        setup.step_model,
        setup.num_pages * setup.page_size,
        setup.max_step_tokens,
        setup.max_requests,
        setup.kv_token_bytes,
        setup.link_bytes_per_s,
        setup.num_gpus,
    )


def kinds_of(came: Iterable[Served], window_s: float, output_len: float) -> tuple[Kind, ...]:
    """Return requests by the tokens that were computed of their prompts, as routers count them.

    Those of which nobody knows yet what is cached of them are taken for such as the others; if none is known, for new.
    """
    there = list(came)
    known = [each for each in there if each.knows_cached] or there
    groups: dict[int, list[Served]] = {}
    for each in known:
        groups.setdefault(size_of(each.call.prompt_len - each.cached_len), []).append(each)
    rate = len(there) / len(known) / window_s if known else 0.0
    return tuple(_kind(groups[size], rate, output_len) for size in sorted(groups))


def _kind(group: Sequence[Served], rate: float, output_len: float) -> Kind:
    """`rate`: requests a second that each of the group stands for."""
    ended = [each for each in group if not math.isnan(each.last_s)]
    known = sum(each.call.output_len for each in ended)
    return Kind(
        len(group) * rate,
        sum(each.call.prompt_len for each in group) / len(group),
        sum(each.cached_len for each in group) / len(group),
        (known + output_len * (len(group) - len(ended))) / len(group),
    )


def was_kept(served: Served, slo: Slo, now_s: float) -> bool | None:
    """Return whether a call was served as the objectives say; None: nobody can tell yet."""
    waited_s = (now_s if math.isnan(served.first_s) else served.first_s) - served.call.arrival_s
    if served.has_ended and math.isnan(served.last_s):
        return False
    if math.isnan(served.last_s):
        return False if slo.ttft_s and waited_s > slo.ttft_s else None
    gap_s = (served.last_s - served.first_s) / max(1, served.call.output_len - 1)
    return slo.are_kept(waited_s, gap_s)
