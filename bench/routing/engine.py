"""A simulated worker: computes prompts one after the other and decodes its running requests together, step by step.

Time is an argument. The steps between two events are all alike, so they pass as one *stretch* of known length; what
comes meanwhile cuts it at the next end of a step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace

from diptych.engine.schedule.kv_forecast import OutputLengths
from diptych.engine.schedule.pace.prompts import PATIENCE
from diptych.engine.schedule.pace.step_pace import HEADROOM
from diptych.engine.schedule.pace.token_deadlines import CATCH_UP, LOST, MAX_BORROWED
from diptych.engine.schedule.policies import PATIENCE_S
from diptych.engine.values.prompt_cost import MIN_CHUNK
from diptych.generation.slo import NO_SLO, Slo
from diptych.router.workers.worker_view import Pair
from routing.block_cache import BlockCache
from routing.hardware import Hardware
from routing.trace import BLOCK_TOKENS, TracedRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request under way, and what became of it."""

    request: TracedRequest
    pair: Pair
    number: int
    arrival_s: float
    believed_len: int = 0  # tokens of its prompt that the router believed cached there
    cached_blocks: int = 0  # where its prompt was computed
    held_blocks: int = 0  # leading ones of its prompt, at whoever had most of it when it came
    started_s: float = 0.0  # computing
    computed_len: int = 0  # prompt tokens that need no computing any more
    first_token_s: float = 0.0
    moved_len: int = 0  # prompt tokens whose KV went to the decode worker
    has_memory: bool = False  # to decode in
    has_kv: bool = False  # at its decode worker
    joined_s: float = 0.0  # the running requests there
    finished_s: float = 0.0

    @property
    def context_len(self) -> int:
        return self.request.prompt_len + self.request.output_len

    @property
    def cached_len(self) -> int:
        """Prompt tokens that were not computed: the last one always is."""
        return min(BLOCK_TOKENS * self.cached_blocks, self.request.prompt_len - 1)


@dataclass(frozen=True, slots=True)
class _Stretch:
    start_s: float
    num_steps: int
    first_step_s: float
    growth_s: float = 0.0  # from one step to the next
    computed_len: int = 0  # of the first prompt, when it ends; 0: it computes no prompt

    def end_s(self) -> float:
        return self.start_s + self.num_steps * (self.first_step_s + self.growth_s * (self.num_steps - 1) / 2)

    def cut(self, now_s: float) -> _Stretch:
        """Return the part of it that has begun by `now_s`: one step at least."""
        elapsed_s = now_s - self.start_s
        half = self.first_step_s / self.growth_s - 0.5
        begun = math.ceil(math.sqrt(half**2 + 2 * elapsed_s / self.growth_s) - half - 1e-9)
        return replace(self, num_steps=min(max(1, begun), self.num_steps))


@dataclass(slots=True)
class Engine:
    """One worker. Whoever holds it calls `step` when `next_s` has come, and `go_on` when all that follows is done.

    So the next step knows what this one has cached, and continues those whose prompt it completed.
    """

    instance_id: int
    hardware: Hardware
    cache: BlockCache
    prompts: deque[Job] = field(default_factory=deque)  # the first one is being computed
    waiting: deque[Job] = field(default_factory=deque)  # for memory
    reserved_tokens: int = 0
    next_s: float = math.inf
    slo: Slo = NO_SLO  # of all requests
    _batch: list[tuple[int, int, Job]] = field(default_factory=list)  # a heap by the step that ends the request
    _joining: list[Job] = field(default_factory=list)
    _due: list[tuple[float, int, Job]] = field(default_factory=list)  # by when tokens are due: see `TokenDeadlines`
    _young: deque[tuple[float, int, Job]] = field(default_factory=deque)  # with few tokens yet, and when they began
    _lengths: OutputLengths = field(default_factory=OutputLengths)
    _num_refused: int = 0  # steps in which a prompt that waits had no part
    _context_tokens: int = 0
    _num_steps: int = 0
    _stretch: _Stretch | None = None
    _has_ended: bool = False  # a stretch, and nothing has begun since

    @property
    def free_tokens(self) -> int:
        return self.hardware.kv_tokens - self.reserved_tokens

    @property
    def output_tokens(self) -> int:
        """Contexts of the requests that decode."""
        return self._context_tokens

    def prompt_budget(self, now_s: float) -> int:
        """Return how many tokens of a prompt the next step may have; -1: any number."""
        if not self._batch:
            return -1
        return max(0, self._fitting(0, max(now_s, self.next_s if self._stretch else now_s), self._decode_s))

    def add_prompt(self, job: Job, now_s: float) -> None:
        self.prompts.append(job)
        self._wake(now_s)

    def join(self, job: Job, now_s: float) -> None:
        """Decode a request from the next step on: its KV is here."""
        job.joined_s = now_s
        self._joining.append(job)
        self._wake(now_s)

    def grant(self) -> list[Job]:
        """Give memory for their whole contexts to those that wait for it, in order."""
        granted: list[Job] = []
        while self.waiting and (not self.reserved_tokens or self._fits(self.waiting[0])):
            job = self.waiting.popleft()
            self.reserved_tokens += job.context_len
            job.has_memory = True
            granted.append(job)
        return granted

    def release(self, job: Job) -> None:
        """Take back the memory of a finished request."""
        if job.has_memory:
            self.reserved_tokens -= job.context_len
        else:
            self.waiting.remove(job)

    def step(self) -> tuple[Job | None, list[Job]]:
        """End the stretch; return the prompt that it completed, if any, and the requests that are finished."""
        assert self._stretch is not None
        stretch = self._stretch
        self._num_steps += stretch.num_steps
        self._context_tokens += stretch.num_steps * len(self._batch)
        finished = self._pop_finished()
        completed = self._advance(stretch.computed_len) if stretch.computed_len else None
        self._has_ended = True
        return completed, finished

    def go_on(self, now_s: float) -> None:
        """Begin what comes next."""
        self._has_ended = False
        self._begin(now_s)

    def _fits(self, job: Job) -> bool:
        return job.context_len <= self.free_tokens

    def _pop_finished(self) -> list[Job]:
        finished: list[Job] = []
        while self._batch and self._batch[0][0] <= self._num_steps:
            job = heapq.heappop(self._batch)[2]
            self._context_tokens -= job.context_len
            self._lengths.observe(job.request.output_len)
            finished.append(job)
        return finished

    def _advance(self, computed_len: int) -> Job | None:
        self.prompts[0].computed_len = computed_len
        return self.prompts.popleft() if computed_len == self.prompts[0].request.prompt_len else None

    def _wake(self, now_s: float) -> None:
        if self._has_ended:
            return
        if self._stretch is None:
            self._begin(now_s)
        elif self._stretch.num_steps > 1:
            self._stretch = self._stretch.cut(now_s)
            self.next_s = self._stretch.end_s()

    def _begin(self, now_s: float) -> None:
        for job in self._joining:
            heapq.heappush(self._batch, (self._num_steps + job.request.output_len - 1, job.number, job))
            self._context_tokens += job.request.prompt_len + 1
            self._young.append((job.first_token_s, self._num_steps, job))
        self._joining.clear()
        self._stretch = self._next_stretch(now_s)
        self.next_s = self._stretch.end_s() if self._stretch else math.inf

    def _next_stretch(self, now_s: float) -> _Stretch | None:
        decode_s = self._decode_s
        if self.prompts:
            self._choose_prompt(now_s)
            budget = self._budget(self.prompts[0].computed_len, now_s, decode_s)
            computed_len, compute_s = self._chunk(self.prompts[0], now_s, budget) if budget else (0, 0.0)
            return _Stretch(now_s, 1, compute_s + decode_s, computed_len=computed_len)
        if self._batch:
            num_steps = self._batch[0][0] - self._num_steps
            return _Stretch(now_s, num_steps, decode_s, self.hardware.context_token_s * len(self._batch))
        return None

    def _choose_prompt(self, now_s: float) -> None:
        """Have a prompt go before others that are late already, if it may still be in time."""
        ttft_s = self.slo.ttft_s
        if not ttft_s or self.prompts[0].computed_len:
            return
        if PATIENCE_S > now_s - self.prompts[0].arrival_s - ttft_s > 0:
            in_time = (job for job in self.prompts if now_s <= job.arrival_s + ttft_s)
            if chosen := next(in_time, None):
                self.prompts.remove(chosen)
                self.prompts.appendleft(chosen)

    @property
    def _decode_s(self) -> float:
        hardware = self.hardware
        return hardware.step_s + hardware.context_token_s * self._context_tokens if self._batch else 0.0

    def _chunk(self, job: Job, now_s: float, budget: int) -> tuple[int, float]:
        """Return how much of the prompt is computed after its next chunk, and the time for it."""
        overhead_s = 0.0
        if not job.computed_len:  # its first one
            job.started_s, overhead_s = now_s, self.hardware.prompt_s
            job.cached_blocks = self.cache.cached(job.request.block_list)
            job.computed_len = job.cached_len
        end = min(job.computed_len + budget, job.request.prompt_len)
        return end, overhead_s + self.hardware.compute_s(job.computed_len, end)

    def _budget(self, first: int, now_s: float, decode_s: float) -> int:
        """Return how many tokens of a prompt a step computes, beside requests that take `decode_s` of it."""
        if not self._batch:
            return self.hardware.chunk_tokens
        fitting = self._fitting(first, now_s, decode_s)
        if not self.slo.tpot_s or decode_s >= LOST * self.slo.tpot_s:
            return min(self.hardware.chunk_tokens, max(MIN_CHUNK, len(self._batch), fitting))
        self._num_refused = 0 if fitting >= MIN_CHUNK else self._num_refused + 1
        if fitting < MIN_CHUNK and self._num_refused < PATIENCE:
            return 0
        self._num_refused = 0
        return min(self.hardware.chunk_tokens, max(MIN_CHUNK, fitting))

    def _next_due_s(self, decode_s: float) -> float:
        borrowed = max(1, min(MAX_BORROWED, self._lengths.short))
        while self._young and (self._young[0][2].finished_s or self._num_steps - self._young[0][1] >= borrowed):
            first_s, num_steps, job = self._young.popleft()
            heapq.heappush(self._due, (first_s - num_steps * self.slo.tpot_s, job.number, job))
        while self._due and self._due[0][2].finished_s:
            heapq.heappop(self._due)
        due_s = self._due[0][0] + (self._num_steps + 1) * self.slo.tpot_s if self._due else math.inf
        if self._young:
            first_s, num_steps, _ = self._young[0]
            num_left = borrowed - 1 - (self._num_steps - num_steps)
            due_s = min(due_s, first_s + borrowed * self.slo.tpot_s - num_left * CATCH_UP * decode_s)
        return due_s

    def _fitting(self, first: int, now_s: float, decode_s: float) -> int:
        """Return how many fit into the time that is left before tokens are due."""
        left_s = self.hardware.mixed_step_s
        if self.slo.tpot_s and decode_s < LOST * self.slo.tpot_s:
            left_s = HEADROOM * (self._next_due_s(decode_s) - now_s)
        return self.hardware.num_tokens(first, left_s - decode_s)
