"""Replays a trace over simulated workers: in open loop as stamped, or in closed loop with so many requests at a time.

A pure discrete-event simulation: same arguments, same result. A request reserves memory at its decode worker when it
arrives, is computed at its prefill worker, which sends KV while it computes, and is decoded once both are there.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from routing.dispatch import Dispatch
from routing.engine import Engine, Job
from routing.trace import BLOCK_TOKENS, TracedRequest


@dataclass(slots=True)
class Replay:
    """One run. `open_loop` and `closed_loop` return what became of every request, in the order of arrival."""

    engines: Mapping[int, Engine]
    dispatch: Dispatch
    jobs: list[Job] = field(default_factory=list)
    _events: list[tuple[float, int, Engine | Job | TracedRequest]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _backlog: deque[TracedRequest] = field(default_factory=deque)  # of a closed loop
    _link_free_s: dict[int, float] = field(default_factory=dict)  # of prefill workers

    def open_loop(self, requests: Iterable[TracedRequest], speed: float) -> Sequence[Job]:
        """Let requests arrive `speed` times as fast as they did."""
        for request in requests:
            self._at(request.arrival_s / speed, request)
        return self._run()

    def closed_loop(self, requests: Iterable[TracedRequest], concurrency: int) -> Sequence[Job]:
        """Let a request arrive whenever one of `concurrency` is finished."""
        self._backlog.extend(requests)
        for _ in range(min(concurrency, len(self._backlog))):
            self._at(0.0, self._backlog.popleft())
        return self._run()

    def _run(self) -> Sequence[Job]:
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, TracedRequest):
                self._arrive(event, now_s)
            elif isinstance(event, Job):
                self._hand_off(event, now_s)
            elif event.next_s == now_s:  # else the stretch was cut meanwhile
                self._step(event, now_s)
        return self.jobs

    def _at(self, when_s: float, event: Engine | Job | TracedRequest) -> None:
        if when_s < math.inf:  # an idle engine waits for nothing
            heapq.heappush(self._events, (when_s, next(self._order), event))

    def _arrive(self, request: TracedRequest, now_s: float) -> None:
        job = self.dispatch.choose(request, now_s)
        self.jobs.append(job)
        job.held_blocks = max(engine.cache.cached(request.block_list) for engine in self.engines.values())
        prefill, decode = self._prefill(job), self._decode(job)
        decode.waiting.append(job)
        decode.grant()
        prefill.add_prompt(job, now_s)
        self._at(prefill.next_s, prefill)

    def _step(self, engine: Engine, now_s: float) -> None:
        completed, finished = engine.step()
        for job in finished:
            self._finish(job, now_s)
        if completed:
            self._complete(completed, now_s)
        engine.go_on(now_s)
        self._at(engine.next_s, engine)

    def _complete(self, job: Job, now_s: float) -> None:
        """The prompt is computed, and with it the first token."""
        job.first_token_s = now_s
        self._cache(job, self._prefill(job))
        self.dispatch.completed(job)
        if job.request.output_len == 1:
            self._finish(job, now_s)
        elif job.pair.is_local:
            self._kv_arrived(job, now_s)
        else:
            self._send(job)

    def _send(self, job: Job) -> None:
        """KV goes chunk by chunk while later ones are computed, the last one afterwards, over one link a worker."""
        prefill_id, hardware, prompt_len = job.pair.prefill_id, self._prefill(job).hardware, job.request.prompt_len
        there = BLOCK_TOKENS * self._decode(job).cache.cached(job.request.block_list)
        job.moved_len = max(0, prompt_len - there)
        begin_s = max(job.started_s, self._link_free_s.get(prefill_id, 0.0))
        last_s = job.first_token_s + hardware.transfer_s(min(job.moved_len, hardware.chunk_tokens))
        sent_s = max(last_s, begin_s + hardware.transfer_s(job.moved_len))
        self._link_free_s[prefill_id] = sent_s
        self.dispatch.sent(job)
        self._at(sent_s, job)

    def _hand_off(self, job: Job, now_s: float) -> None:
        """The KV is at the decode worker."""
        self._cache(job, self._decode(job))
        self.dispatch.handed_off(job, now_s)
        self._kv_arrived(job, now_s)

    def _cache(self, job: Job, engine: Engine) -> None:
        self.dispatch.cache_changed(engine.instance_id, *engine.cache.put(job.request.block_list))

    def _kv_arrived(self, job: Job, now_s: float) -> None:
        job.has_kv = True
        self._join_when_ready(job, now_s)

    def _join_when_ready(self, job: Job, now_s: float) -> None:
        if job.has_memory and job.has_kv:
            decode = self._decode(job)
            decode.join(job, now_s)
            self._at(decode.next_s, decode)

    def _finish(self, job: Job, now_s: float) -> None:
        job.finished_s = now_s
        self.dispatch.finished(job)
        decode = self._decode(job)
        decode.release(job)
        for granted in decode.grant():
            self._join_when_ready(granted, now_s)
        if self._backlog:
            self._at(now_s, self._backlog.popleft())

    def _prefill(self, job: Job) -> Engine:
        return self.engines[job.pair.prefill_id]

    def _decode(self, job: Job) -> Engine:
        return self.engines[job.pair.decode_id]
