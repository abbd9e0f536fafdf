"""One request on its way through the workers: attempts, retries, and replays after tokens were sent.

A failure before the first token is simply tried again on another pair. After it, the next attempt continues behind
the tokens that were given out: the client sees a pause, and no token twice or lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

from diptych.common.errors import DeadlineExceeded, Unavailable
from diptych.common.logging import bind
from diptych.engine.finish import Finish
from diptych.engine.runtime.codec import params_to_wire
from diptych.router.attempt import Attempt, AttemptFailed
from diptych.router.errors import ModelNotFound
from diptych.router.failure import LegFailure
from diptych.router.fleet import Fleet
from diptych.router.metrics import RouterMetrics
from diptych.router.progress import Progress
from diptych.router.request import Delta, Report
from diptych.router.selection import Selector
from diptych.router.worker_view import Pair, Role
from diptych.v1.worker_pb2 import StartLeg

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """What it takes to start an attempt."""

    fleet: Fleet
    selector: Selector
    metrics: RouterMetrics


class Execution:
    """Runs one request. Call `next` until it returns a delta with `finish`; `close` in any case."""

    def __init__(self, progress: Progress, dispatcher: Dispatcher) -> None:
        self._progress = progress
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._pair = Pair(0, 0)
        self._attempt: Attempt | None = None
        self.cached_tokens = 0  # of the prompt, when the first attempt was prefilled

    async def next(self) -> Delta:
        """Return the next output tokens, at least one or `finish`. Raises the caller's `DiptychError`."""
        while (finish := self._finish_without_workers()) is None:
            attempt = self._attempt or await self._dispatch()
            try:
                delta = await attempt.next()
            except AttemptFailed as failed:
                await self._recover(failed.failure)
                continue
            self._take(attempt, delta)
            return delta
        return Delta((), finish)

    async def report(self, timeout_s: float) -> Report | None:
        """Return what the legs measured, waiting a moment for the last word of the prefill leg."""
        if self._attempt is None:
            return None
        await self._attempt.wait_for_prefill_end(timeout_s)
        return Report(self._pair, self._attempt.room, dict(self._attempt.stats))

    def close(self) -> None:
        """Abort what is still running. Idempotent."""
        if self._attempt is not None:
            self._attempt.close()

    def _finish_without_workers(self) -> Finish | None:
        """How the output ends the request when the worker died before it could say so."""
        return self._progress.finish if self._attempt is None else None

    def _take(self, attempt: Attempt, delta: Delta) -> None:
        if not self._progress.output_ids and Role.PREFILL in attempt.stats:
            self.cached_tokens = attempt.stats[Role.PREFILL].cached_tokens
        self._progress.add(delta.token_ids)

    async def _dispatch(self) -> Attempt:
        progress, now_s = self._progress, time.monotonic()
        try:
            self._pair = await self._dispatcher.selector.select(
                len(progress.prompt_ids), progress.request.adapter, progress.blamed, progress.pair_wait_s(now_s)
            )
        except Unavailable:
            self._check_deadline()
            self._check_adapter()
            raise
        self._metrics.select.observe(time.monotonic() - now_s)
        self._check_deadline()
        self._attempt = self._start(self._pair)
        return self._attempt

    def _start(self, pair: Pair) -> Attempt:
        timeout_s = self._progress.request.deadline_s - time.monotonic()
        session = self._dispatcher.fleet.session
        sessions = {Role.PREFILL: session(pair.prefill_id), Role.DECODE: session(pair.decode_id)}
        prefill = self._start_leg(timeout_s, peer=pair.decode_id)
        prefill.compat = sessions[Role.PREFILL].compat
        decode = StartLeg()
        decode.CopyFrom(prefill)
        decode.peer_instance_id = pair.prefill_id
        decode.sampling.ClearField("prompt_logprobs")  # prefill reports them
        return Attempt(sessions, {Role.PREFILL: prefill, Role.DECODE: decode}, timeout_s)

    def _start_leg(self, timeout_s: float, peer: int) -> StartLeg:
        progress = self._progress
        return StartLeg(
            room=secrets.randbits(64) or 1,
            request_id=progress.request.request_id,
            prompt_token_ids=progress.prompt_ids,
            sampling=params_to_wire(progress.params),
            peer_instance_id=peer,
            num_prior_output_tokens=len(progress.output_ids),
            timeout_ms=max(1, round(timeout_s * 1000)),
            cache_salt=progress.request.cache_salt,
            priority=progress.request.priority,
            tenant=progress.request.tenant,
            lora=progress.request.adapter,
        )

    async def _recover(self, failure: LegFailure) -> None:
        """Return when the next attempt may begin; raise the caller's error when there is none."""
        progress = self._progress
        self._attempt = None
        pause_s = progress.fail(failure, self._pair, time.monotonic())
        self._log(failure, is_last=pause_s is None)
        if progress.finish is not None:
            return
        if pause_s is None:
            raise failure.to_error()
        self._metrics.retries.labels(failure.code.name.lower()).inc()
        if progress.output_ids:
            self._metrics.replays.inc()
        if not self._dispatcher.selector.has_fresh_pair(progress.request.adapter, progress.blamed):
            await asyncio.sleep(pause_s)

    def _log(self, failure: LegFailure, *, is_last: bool) -> None:
        level, words = (logging.WARNING, "giving up") if is_last else (logging.INFO, "trying again")
        with bind(request_id=self._progress.request.request_id):
            logger.log(level, "%s leg: %s: %s; %s", failure.role.value, failure.code.name, failure.message, words)

    def _check_adapter(self) -> None:
        adapter = self._progress.request.adapter
        if adapter and adapter not in self._dispatcher.fleet.adapters():
            raise ModelNotFound(f"the adapter {adapter!r} has been unloaded")

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._progress.request.deadline_s:
            raise DeadlineExceeded("the request's deadline passed before a worker could take it")
