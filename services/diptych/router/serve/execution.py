"""One request on its way through the workers: attempts, retries, and replays after tokens were sent.

A failure before the first token is simply tried again on another pair. After it, the next attempt continues behind
the tokens that were given out: the client sees a pause, and no token twice or lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Final

from diptych.common.errors import DeadlineExceeded, DiptychError, Unavailable
from diptych.common.logging import bind
from diptych.generation.output import FailureCode
from diptych.router.choose.explain import AttemptRecord, Explanations, Selection, failure_words
from diptych.router.choose.moves import RunningOutput
from diptych.router.errors import ContextLengthExceeded, ModelNotFound
from diptych.router.metrics import RouterMetrics
from diptych.router.serve.attempt import Attempt, AttemptFailed
from diptych.router.serve.hedging import Hedging, first_answer
from diptych.router.serve.moving import MIN_MOVED, Move
from diptych.router.serve.request_log import RequestLog, Served
from diptych.router.serve.selection import Selector
from diptych.router.serve.starting import have_images_encoded, start_attempt, start_move
from diptych.router.tracing.record import AttemptTrace
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import NOTHING_PREDICTED, Delta, Predicted, Report
from diptych.router.values.progress import Progress
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.worker_view import Pair

logger = logging.getLogger(__name__)

REFUSALS: Final = frozenset({FailureCode.OVERLOADED, FailureCode.TOO_LONG})  # before any work


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """What it takes to start an attempt."""

    fleet: Fleet
    selector: Selector
    metrics: RouterMetrics
    explanations: Explanations
    hedging: Hedging
    rng: random.Random
    request_log: RequestLog | None = None  # of all outputs of text that end
    running: set[Execution] = field(default_factory=set)  # requests that have begun, and have not ended


class Execution:
    """Runs one request. Call `next` until it returns a delta with `finish`; `close` in any case."""

    def __init__(self, progress: Progress, dispatcher: Dispatcher) -> None:
        self._progress = progress
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._pair = Pair(0, 0)
        client = progress.request.client
        self._record = dispatcher.explanations.begin(client.life.request_id, client.life.arrival_s)
        self._attempt: Attempt | None = None
        self._is_proven = False  # both legs of the attempt have done their part of an output token
        self._knows_cached = False
        self._knows_prompt_len = progress.request.prompt.text is None
        self._num_refused = 0  # attempts that a worker did not begin
        self.trace = client.trace.begin_output()
        self.cached_tokens = 0  # of the prompt, when the first attempt was prefilled
        self._move: Move[Attempt] | None = None
        self._moving_to: Selection | None = None
        self._asked: set[Pair] = set()  # who was to hand the output on to whom
        self._predicted_before = NOTHING_PREDICTED  # in attempts that failed
        dispatcher.running.add(self)

    async def next(self) -> Delta:
        """Return the next output tokens, at least one or `finish`. Raises the caller's `DiptychError`."""
        # without an attempt the output so far may end the request: its worker died before it could say so
        while (finish := self._progress.finish if self._attempt is None else None) is None:
            attempt = self._attempt or await self._dispatch()
            try:
                delta = await (self._race(attempt) if self._may_hedge() else attempt.next())
            except AttemptFailed as failed:
                if not self._goes_on_elsewhere():
                    await self._recover(self._attempt or attempt, failed.failure)
                continue
            self._on_delta(self._attempt or attempt, delta)
            return delta
        return Delta((), finish)

    async def report(self, timeout_s: float) -> Report | None:
        """Return what the legs measured, waiting for the last word of the prefill leg."""
        if self._attempt is None:
            return None
        await self._attempt.wait_for_prefill_end(timeout_s)
        return self._attempt.report(self._pair)

    def tool_called(self, tool: str) -> None:
        """The output is complete, and calls a tool: its session is likely to come back."""
        if self._attempt is not None:
            self._attempt.tool_called(tool)

    def compute_s(self) -> float:
        """Return what computing the prompt is expected to take; 0 before it is sent."""
        return self._record.attempts[-1].selection.compute_s if self._record.attempts else 0.0

    def close(self) -> None:
        """Abort what is still running. Idempotent."""
        was_over, self._record.is_over = self._record.is_over, True
        self._dispatcher.running.discard(self)
        if self._move is not None:
            self._move.cancel()
        if self._attempt is not None:
            self._attempt.close()
            for record in self._record.attempts:
                record.end("closed", time.monotonic())
        request, log = self._progress.request, self._dispatcher.request_log
        if not was_over and log is not None and request.client.vectors is None:
            log.add(request, self._served())

    def _served(self) -> Served:
        """Return what came of it, once it is over."""
        attempts = self._record.attempts
        return Served(
            self._progress.request_len,
            self.cached_tokens,
            len(self._progress.output_ids),
            next((each.first_token_s for each in attempts if each.first_token_s is not None), None),
            (attempts[-1].ended_s if attempts else None) or time.monotonic(),
            attempts[-1].outcome.partition(":")[0] if attempts else "",
        )

    # moves

    @property
    def worker_id(self) -> int:
        """Who makes the output; 0 before it is sent."""
        return self._pair.decode_id

    def output(self) -> RunningOutput | None:
        """Return the output as it is made now; None while it can't move."""
        attempt, progress = self._attempt, self._progress
        is_moving = self._move is not None and not self._move.is_over
        if attempt is None or is_moving or attempt.has_ended or attempt.num_tokens < MIN_MOVED:
            return None
        request, num_output = progress.request, len(progress.output_ids)
        return RunningOutput(
            worker_id=self._pair.decode_id,
            slo=request.client.tier.slo,
            num_tokens=progress.prompt_len,
            num_output_tokens=num_output,
            num_left_at_most=request.params.max_tokens - num_output,
            adapter=request.client.hints.adapter,
            asked=frozenset(self._asked),
        )

    def move(self, target_id: int, reason: str) -> None:
        """Have the output, which can move, go on at another worker of a pair that may serve it."""
        assert self._attempt is not None
        pair = Pair(self._pair.decode_id, target_id)
        selection = self._dispatcher.selector.of_move(self._progress, pair, reason)
        self._asked.add(pair)
        self._moving_to = selection
        self._metrics.moves_begun.inc()
        self._move = start_move(self._dispatcher.fleet, self._attempt, self._progress, selection)

    def _goes_on_elsewhere(self) -> bool:
        """The attempt has failed behind its last token; return whether another one has the request already."""
        move, self._move = self._move, None
        new = None if move is None else move.pop()
        if new is None:
            return False
        now_s, selection = time.monotonic(), self._moving_to
        assert selection is not None
        self._record.attempts[-1].end("moved", now_s)
        record = AttemptRecord(selection, new.room, now_s, first_token_s=now_s)
        self._record.attempts.append(record)
        self.trace.attempts.append(AttemptTrace(now_s, record, new.stats))
        if self._attempt is not None:
            self._predicted_before += self._attempt.predicted(self._attempt.num_tokens)
        self._attempt, self._pair, self._is_proven = new, selection.pair, False
        self._progress.moved(now_s)
        self._metrics.moves.inc()
        return True

    def _may_hedge(self) -> bool:
        return self._dispatcher.hedging.is_on and not self._progress.output_ids and len(self._record.attempts) == 1

    async def _race(self, first: Attempt) -> Delta:
        """Return the first answer of the request, perhaps from a second attempt, which then is the one that counts."""
        hedging = self._dispatcher.hedging
        hedging.count()
        attempt, outcome = await first_answer(first, hedging.after_s, self._start_second, self._lose)
        self._go_on_with(attempt)
        if isinstance(outcome, AttemptFailed):
            raise outcome
        return outcome

    async def _start_second(self) -> Attempt | None:
        """Begin another attempt on another pair, if there is one and it may be."""
        progress, selector = self._progress, self._dispatcher.selector
        avoided = progress.blamed | {self._pair.prefill_id, self._pair.decode_id}
        if not selector.has_fresh_pair(progress.request, avoided) or not self._dispatcher.hedging.spend():
            return None
        progress.blamed |= avoided  # for being slow
        self._metrics.hedges.inc()
        asked_s = time.monotonic()
        return self._start(await selector.select(progress, 0.0), asked_s)

    def _lose(self, attempt: Attempt, failure: LegFailure) -> None:
        """An attempt has failed while another goes on."""
        self._progress.blamed |= failure.blamed(self._failed(attempt, failure))

    def _failed(self, attempt: Attempt, failure: LegFailure) -> Pair:
        """Tell breakers and record of an attempt that has failed; return its pair."""
        record = next(record for record in self._record.attempts if record.room == attempt.room)
        self._num_refused += failure.code in REFUSALS and not attempt.num_tokens
        self._dispatcher.selector.failed(record.selection.pair, failure)
        record.end(failure_words(failure), time.monotonic())
        return record.selection.pair

    def _go_on_with(self, attempt: Attempt) -> None:
        attempts, now_s = self._record.attempts, time.monotonic()
        for record in [record for record in attempts if record.room != attempt.room]:
            record.end("hedged", now_s)
        attempts.sort(key=lambda record: record.room == attempt.room)
        self._attempt, self._pair = attempt, attempts[-1].selection.pair

    def _on_delta(self, attempt: Attempt, delta: Delta) -> None:
        record = self._record.attempts[-1]
        if record.first_token_s is None:
            self._first_token(record)
        if delta.finish is not None:
            record.end(delta.finish.value, time.monotonic())
        if not self._knows_cached and self._progress.is_first_attempt and (stats := attempt.prompt_stats):
            self.cached_tokens, self._knows_cached = stats.cached_tokens, True
            self._note_prompt_len(stats.prompt_tokens)
        self._progress.add(delta.token_ids)
        if not self._is_proven and (self._progress.num_attempt_tokens > 1 or delta.finish):
            self._is_proven = True
            self._dispatcher.selector.succeeded(self._pair)

    def predicted(self, num_cut: int) -> Predicted:
        """Return what came of guesses so far, without the newest tokens, so many, that a stop string cuts off."""
        if self._attempt is None:
            return self._predicted_before
        return self._predicted_before + self._attempt.predicted(self._progress.num_attempt_tokens - num_cut)

    @property
    def prompt_len(self) -> int:
        """Tokens of the request's prompt."""
        return self._progress.request_len

    @property
    def used_prompt_len(self) -> int:
        """The same as far as it is known, once a worker has begun with it; else 0."""
        is_begun = len(self._record.attempts) > self._num_refused
        return self.prompt_len if is_begun and self._knows_prompt_len else 0

    def _note_prompt_len(self, num_tokens: int) -> None:
        self._knows_prompt_len |= num_tokens > 0
        text = self._progress.request.prompt.text
        if text is not None and num_tokens not in (0, self._progress.request_len):
            self._progress.tokenized(num_tokens)
            self._dispatcher.fleet.text_index.tokenized(len(text.utf8), num_tokens)

    def _first_token(self, record: AttemptRecord) -> None:
        record.first_token_s = time.monotonic()
        ttft_s = record.first_token_s - record.begun_s
        self._metrics.first_token.observe(ttft_s)
        expected_s = record.selection.expected_ttft_s
        if expected_s:
            self._metrics.ttft_ratio.observe(ttft_s / expected_s)

    async def _dispatch(self) -> Attempt:
        progress = self._progress
        if progress.is_new and progress.request.prompt.contents:
            await self._have_images_encoded()
        wait_s = progress.pair_wait_s(now_s := time.monotonic(), self._dispatcher.fleet.missing_since_s)
        try:
            selection = await self._dispatcher.selector.select(progress, wait_s)
        except Unavailable as error:
            progress.request.client.trace.mark("select")
            self._check_deadline()
            self._check_adapter()
            raise self._without_pair(error, progress.waited_s(time.monotonic(), now_s)) from None
        self._metrics.select.observe(time.monotonic() - now_s)
        self._check_deadline()
        begun_s = time.monotonic()
        progress.begin(begun_s)
        self._pair = selection.pair
        self._attempt = self._start(selection, now_s)
        self._metrics.dispatch.observe(time.monotonic() - begun_s)
        return self._attempt

    async def _have_images_encoded(self) -> None:
        """What a worker has cached of the prompt needs no encoding: it goes there, or its pages come from there."""
        fleet = self._dispatcher.fleet
        if fleet.encoders():
            num_cached = self._dispatcher.selector.num_cached(self._progress)
            await have_images_encoded(fleet, self._progress, num_cached, self._metrics)

    def _without_pair(self, error: Unavailable, waited_s: float) -> Unavailable:
        words = "" if self._dispatcher.fleet.is_closed else f"; waited {waited_s:.1f} s"
        return Unavailable(f"{error}{words}", retry_after_s=error.retry_after_s)

    def _start(self, selection: Selection, asked_s: float) -> Attempt:
        now_s = time.monotonic()
        attempt = start_attempt(self._dispatcher.fleet, self._progress, selection, now_s)
        record = AttemptRecord(selection, attempt.room, now_s)
        self._record.attempts.append(record)
        self.trace.attempts.append(AttemptTrace(asked_s, record, attempt.stats))
        self._metrics.attempts.labels(selection.plan.name, str(selection.pair.num_workers)).inc()
        return attempt

    async def _recover(self, attempt: Attempt, failure: LegFailure) -> None:
        """Return when the next attempt may begin; raise the caller's error when there is none."""
        progress = self._progress
        self._predicted_before += attempt.predicted(attempt.num_tokens)
        self._attempt, self._is_proven = None, False
        pause_s = progress.fail(failure, self._failed(attempt, failure), time.monotonic())
        self._log(failure, is_last=pause_s is None)
        if progress.finish is not None:
            return
        if pause_s is None:
            raise self._error(failure)
        self._metrics.went_on(failure.code)
        if progress.output_ids:
            self._metrics.replays.inc()
        if not self._dispatcher.selector.has_fresh_pair(progress.request, progress.blamed):
            await asyncio.sleep(pause_s)

    def _error(self, failure: LegFailure) -> DiptychError:
        text = self._progress.request.prompt.text
        if text is not None and failure.code is FailureCode.TOO_LONG:
            return ContextLengthExceeded(failure.message, param=text.param)
        return failure.to_error()

    def _log(self, failure: LegFailure, *, is_last: bool) -> None:
        level, words = (logging.WARNING, "giving up") if is_last else (logging.INFO, "trying again")
        with bind(request_id=self._progress.request.client.life.request_id):
            logger.log(level, "%s leg: %s: %s; %s", failure.leg.value, failure.code.name, failure.message, words)

    def _check_adapter(self) -> None:
        adapter = self._progress.request.client.hints.adapter
        if adapter and adapter not in self._dispatcher.fleet.adapters():
            raise ModelNotFound(f"the adapter {adapter!r} has been unloaded")

    def _check_deadline(self) -> None:
        wait_budget, now_s = self._progress.wait_budget, time.monotonic()
        if now_s >= wait_budget.ends_s:
            raise DeadlineExceeded(f"{wait_budget.words(now_s)}, and no worker could take it")
