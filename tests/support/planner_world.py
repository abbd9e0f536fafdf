"""A small world for planners: requests, workers and a cluster in virtual time, without schedulers.

Prompts wait in one line for the workers that take them; outputs advance a token a step, and steps take what the step
model says for the rows of their worker. A cluster has so many places, and workers take time to start.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from diptych.common.members.roles import Role
from diptych.engine.values.step_model import H200_LLAMA_8B, StepShape
from diptych.planner.offered import Asked, offered
from diptych.planner.plan import plan
from diptych.planner.values import (
    PLANNED_ROLES,
    UNBOUNDED,
    Capacity,
    Goal,
    Limits,
    Memory,
    Observed,
    Occupancy,
    Plan,
    Sizes,
    Worker,
    WorkerState,
)

TICK_S: Final = 0.5
WINDOWS_S: Final = (60.0, 300.0)
H200: Final = Capacity(H200_LLAMA_8B, kv_tokens=900_000)
GOAL: Final = Goal(1.0, 0.03, 0.9)
LIMITS: Final = Limits(least=Sizes(0, 0, 1), budget_gpus=16)
SEES_ALL: Final[Callable[[Observed], Observed]] = lambda observed: observed  # noqa: E731


@dataclass(slots=True)
class Request:
    arrival_s: float
    prompt_len: int
    output_len: int
    first_s: float = math.inf
    last_s: float = math.inf
    due: float = 0.0  # tokens that its worker has made since it began, when this one has all of its own

    def is_kept(self, goal: Goal) -> bool:
        """Whether it got its first token and the others in time."""
        tpot_s = (self.last_s - self.first_s) / max(1, self.output_len - 1)
        late = goal.ttft_s and self.first_s - self.arrival_s > goal.ttft_s
        return self.last_s < math.inf and not late and not (goal.tpot_s and tpot_s > goal.tpot_s)


@dataclass(slots=True)
class Server:
    """A worker of the world."""

    worker_id: int
    role: Role
    state: WorkerState
    since_s: float
    free_s: float = 0.0  # when the prompt that it computes is done
    tokens: float = 0.0  # of each row that was there all the time
    rows: list[tuple[float, int, Request]] = field(default_factory=list)  # by when they are due
    context: float = 0.0
    piece_tokens: int = UNBOUNDED
    cached: float = 0.0

    def step_s(self) -> float:
        return H200.step_model.seconds(StepShape(len(self.rows), round(self.context), 0, 0.0, 0))

    def enter(self, state: WorkerState, now_s: float) -> None:
        self.state, self.since_s = state, now_s


@dataclass
class World:
    """Everything, and a planner that looks at it every so often."""

    goal: Goal = GOAL
    limits: Limits = LIMITS
    start_s: float = 60.0
    every_s: float = 15.0
    places: int = 16
    broken: frozenset[Role] = frozenset()  # roles whose workers do not start
    seen: Callable[[Observed], Observed] = SEES_ALL  # what metrics make of the truth
    seed: int = 1

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.servers: dict[int, Server] = {}
        self.line: deque[Request] = deque()
        self.all: list[Request] = []
        self.memory = Memory()
        self.plans: list[tuple[float, Plan]] = []
        self.num_flips = 0
        self.gpu_s = 0.0
        self._ids = 0
        self._rng = random.Random(self.seed)

    # what tests do and ask

    def has(self, sizes: Sizes, state: WorkerState = WorkerState.READY) -> World:
        """Add workers, as somebody might by hand."""
        for role in PLANNED_ROLES:
            for _ in range(sizes.of(role)):
                self._ids += 1
                self.servers[self._ids] = Server(self._ids, role, state, self.now_s - 1000.0)
        return self

    def run(self, seconds: float, rate: float, draw: Callable[[random.Random], tuple[int, int]]) -> World:
        """Let time pass, with requests that come at random; `draw` gives the lengths of prompt and output."""
        until_s, arrival_s = self.now_s + seconds, self.now_s
        while self.now_s < until_s - 1e-9:
            self.now_s += TICK_S
            while rate:
                arrival_s += self._rng.expovariate(rate)
                if arrival_s > self.now_s:
                    arrival_s = self.now_s  # without memory: it begins anew
                    break
                self._comes(arrival_s, *draw(self._rng))
            self._tick()
            if math.floor(self.now_s / self.every_s) > math.floor((self.now_s - TICK_S) / self.every_s):
                self._plans()
        return self

    def sizes(self, *states: WorkerState) -> Sizes:
        """Return how many workers there are in some states, ready ones if none is named."""
        wanted = states or (WorkerState.READY,)
        there = [each.role for each in self.servers.values() if each.state in wanted]
        return Sizes(*(there.count(role) for role in PLANNED_ROLES))

    def attained(self, since_s: float, until_s: float = math.inf) -> float:
        """Return the share of the requests offered in a time that kept the goal."""
        came = [each for each in self.all if since_s <= each.arrival_s < until_s]
        return sum(each.is_kept(self.goal) for each in came) / max(1, len(came))

    def targets(self, since_s: float = 0.0) -> list[Sizes]:
        """Return the sizes that were wanted, each once while it lasted."""
        wanted = [each.sizes for at_s, each in self.plans if at_s >= since_s]
        return [each for each, before in zip(wanted, [None, *wanted], strict=False) if each != before]

    @property
    def last(self) -> Plan:
        return self.plans[-1][1]

    # time

    def _comes(self, arrival_s: float, prompt_len: int, output_len: int) -> None:
        request = Request(arrival_s, prompt_len, output_len)
        self.all.append(request)
        self.line.append(request)

    def _tick(self) -> None:
        self._start_workers()
        self._start_prompts()
        for server in list(self.servers.values()):
            self._advance(server)
        self.gpu_s += TICK_S * sum(each.state is not WorkerState.PENDING for each in self.servers.values())

    def _start_workers(self) -> None:
        used = sum(each.state is not WorkerState.PENDING for each in self.servers.values())
        for server in self.servers.values():
            if server.state is WorkerState.PENDING and used < self.places:
                used += 1
                server.enter(WorkerState.STARTING, self.now_s)
            elif server.state is WorkerState.STARTING and self.now_s >= server.since_s + self.start_s:
                failed = server.role in self.broken
                server.enter(WorkerState.FAILED if failed else WorkerState.READY, self.now_s)

    def _start_prompts(self) -> None:
        ready = [each for each in self.servers.values() if each.state is WorkerState.READY]
        taking = [(each.free_s, each.worker_id) for each in ready if each.role is not Role.DECODE]
        if not any(each.role is not Role.PREFILL for each in ready):
            return
        heapq.heapify(taking)
        while self.line and taking and taking[0][0] < self.now_s:
            request, (free_s, worker_id) = self.line.popleft(), heapq.heappop(taking)
            server = self.servers[worker_id]
            request.first_s = max(request.arrival_s, free_s) + self._prompt_s(server, request)
            server.free_s = request.first_s
            heapq.heappush(taking, (server.free_s, worker_id))
            self._place(request, server)

    def _prompt_s(self, server: Server, request: Request) -> float:
        """A prompt shares steps with the rows of its worker, as large a piece at a time as the goal allows."""
        model, n = H200.step_model, request.prompt_len
        work_s = model.work_s(StepShape(0, 0, n, n**2 / 2, 1))
        pause_s = server.step_s() - model.step + model.prompt_step
        piece = H200.max_step_tokens
        if server.rows and self.goal.tpot_s:
            piece_s = max(16 * model.prompt_token, self.goal.tpot_s * 0.95 - pause_s)
            piece = min(piece, max(16, round(piece_s / work_s * n)))
        return max(work_s / math.ceil(n / piece) + pause_s, server.step_s()) * math.ceil(n / piece)

    def _place(self, request: Request, server: Server) -> None:
        """Give an output to the worker that computed its prompt, else to the one with the fewest."""
        generating = [
            each for each in self.servers.values() if each.state is WorkerState.READY and each.role is not Role.PREFILL
        ]
        target = server if server.role is Role.UNIFIED else min(generating, key=lambda each: len(each.rows))
        request.due = target.tokens + request.output_len - 1
        heapq.heappush(target.rows, (request.due, id(request), request))
        target.context += request.prompt_len + request.output_len / 2

    def _advance(self, server: Server) -> None:
        step_s = server.step_s()
        if server.role is Role.UNIFIED and server.free_s > self.now_s - TICK_S and server.rows and self.goal.tpot_s:
            step_s = max(step_s, self.goal.tpot_s * 0.95)  # with a piece of a prompt
        server.tokens += TICK_S / step_s
        while server.rows and server.rows[0][0] <= server.tokens:
            due, _, request = heapq.heappop(server.rows)
            request.last_s = max(request.first_s, self.now_s - (server.tokens - due) * step_s)
            server.context -= request.prompt_len + request.output_len / 2
        if server.state is WorkerState.DRAINING and not server.rows and server.free_s <= self.now_s:
            del self.servers[server.worker_id]

    # the planner

    def _plans(self) -> None:
        made, self.memory = plan(self.seen(self.observed()), self.memory)
        self.plans.append((self.now_s, made))
        for worker_id in made.leaving:
            self._leaves(self.servers[worker_id])
        for flip in made.roles:
            self.num_flips += 1
            self.servers[flip.worker_id].role = flip.role
            self.servers[flip.worker_id].enter(WorkerState.STARTING, self.now_s - self.start_s + 10.0)
        there = self.sizes(*(each for each in WorkerState if each is not WorkerState.DRAINING))
        self._asked(Sizes(*(max(0, want - have) for want, have in zip(made.sizes, there, strict=True))))

    def _asked(self, sizes: Sizes) -> None:
        before = set(self.servers)
        self.has(sizes, WorkerState.PENDING)
        for worker_id in set(self.servers) - before:
            self.servers[worker_id].since_s = self.now_s

    def _leaves(self, server: Server) -> None:
        if server.state is WorkerState.READY:
            server.enter(WorkerState.DRAINING, self.now_s)
        else:
            del self.servers[server.worker_id]

    def observed(self) -> Observed:
        """Return the truth."""
        first = bisect_left(self.all, self.now_s - WINDOWS_S[-1], key=lambda each: each.arrival_s)
        asked = (Asked(each.arrival_s, each.prompt_len, 0, *self._output(each)) for each in self.all[first:])
        return Observed(
            self.now_s,
            tuple(self._worker(each) for each in self.servers.values()),
            offered(asked, self.now_s, WINDOWS_S, 0.0),
            self.goal,
            H200,
            self.limits,
            len(self.line),
            sum(each.prompt_len for each in self.line),
            start_s=self.start_s,
        )

    def _output(self, request: Request) -> tuple[int, bool]:
        if request.last_s <= self.now_s:
            return request.output_len, True
        share = (self.now_s - request.first_s) / 0.01 if request.first_s < self.now_s else 0.0
        return min(request.output_len, round(share)), False

    def _worker(self, server: Server) -> Worker:
        left = max(0.0, server.free_s - self.now_s) / H200.step_model.prompt_token
        tokens_left = sum(due - server.tokens for due, _, _ in server.rows)
        held = Occupancy(len(server.rows), 0, round(left), round(server.context), tokens_left)
        return Worker(server.worker_id, server.role, server.state, server.since_s, held, only_here_tokens=server.cached)


def fixed(prompt_len: int, output_len: int) -> Callable[[random.Random], tuple[int, int]]:
    """All requests alike."""
    return lambda rng: (prompt_len, output_len)


def chats(rng: random.Random) -> tuple[int, int]:
    """Draw lengths as varied as in chats, 1,000 and 200 tokens in the mean."""
    return max(16, round(rng.expovariate(1 / 1000))), max(2, round(rng.expovariate(1 / 200)))


def turns(sizes: Iterable[Sizes]) -> int:
    """Return how often a fleet went from growing to shrinking or back."""
    totals = [each.total for each in sizes]
    ways = [b > a for a, b in itertools.pairwise(totals) if a != b]
    return sum(one != other for one, other in itertools.pairwise(ways))
