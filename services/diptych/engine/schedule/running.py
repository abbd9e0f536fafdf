"""Requests that are computed here: the running batch, what is on its way into it, and the steps launched for them.

A request takes its next page only when it needs it. When there is none, the request of the lowest priority that would
lose the least progress is retracted, and goes on later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.aside import Reason
from diptych.engine.schedule.batch_builder import BuildBatch, build_batch
from diptych.engine.schedule.decode_batch import DecodeBatch
from diptych.engine.schedule.extend_queue import Coming, ExtendQueue, nothing_comes
from diptych.engine.schedule.kv_forecast import KvForecast
from diptych.engine.schedule.pace.prompts import NextPrompt
from diptych.engine.schedule.pace.step_pace import AT_LAST, StepPace
from diptych.engine.schedule.sampling_builder import SamplingBuilder
from diptych.engine.schedule.steps_in_flight import StepsInFlight
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.batch import ForwardBatch, SamplingBatch
from diptych.engine.values.core_report import NO_DRAFTS, DraftReport
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request
from diptych.engine.values.step import NO_PLAIN_STEPS, Chunk, Drafts, PlainSteps, Step, new_step


class Drafter(Protocol):
    """Guesses how requests go on. A wrong guess costs the time to compute it; no guess changes an output.

    What it is told beside is for who learns from it.
    """

    def propose(self, requests: Sequence[Request]) -> Drafts:
        """Return guesses for some of the requests that the next step continues.

        They begin behind the newest token that is known, `tokens[num_tokens - 1]`. Where `extend_len` is 0 a running
        step computes the token behind that: then the first guess is of it, and is not computed itself.
        """
        ...

    def follows(self, step: Step) -> bool:
        """Return whether a draft model, where there is one, is to compute a step that is about to be launched."""
        return True

    def row_behind(self, request: Request) -> bytes:
        """Return what guessing behind the computed tokens of a request takes elsewhere, beside its pages."""
        return b""

    def go_on_behind(self, request: Request, row: bytes) -> None:
        """Take that of a request whose prompt was computed elsewhere; it has its pages."""
        return

    def launched(self, step: Step, now_s: float) -> None:
        """A step is launched, with all that was proposed for it or with less."""
        return

    def committed(self, now_s: float) -> None:
        """The oldest step that was launched has run; its tokens are appended next."""
        return

    def given_up(self) -> None:
        """The step launched last was not run to its end."""
        return

    def report(self) -> DraftReport:
        """Say what has come of its guesses, since the start."""
        return NO_DRAFTS


class Running:
    """Chooses and launches steps. `on_retracted` hears of each request that has to wait in `waiting` again."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        waiting: WaitingQueue,
        pace: StepPace,
        on_retracted: Callable[[Request], None],
        drafter: Drafter | None = None,
        build: BuildBatch = build_batch,
        turns: Turns = ENOUGH_SLOTS,
        coming: Coming = nothing_comes,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = waiting
        self._pace = pace
        self._on_retracted = on_retracted
        self._drafter = drafter
        self._build = build
        self._turns = turns
        self._queue = ExtendQueue(cache, waiting, limits, turns, coming)
        self._batch = DecodeBatch(cache)
        self._held: set[int] = set()  # rooms of requests that no further step continues
        self._steps = StepsInFlight(cache)
        self._forecast = KvForecast(cache)
        self._sampling = SamplingBuilder(limits.eos_ids, limits.vocab_size, limits.processors)

    def __len__(self) -> int:
        """How many requests decode."""
        return len(self._batch.by_room)

    @property
    def admitted(self) -> list[Request]:
        """Requests that hold pages and go on."""
        return [*self._batch.by_room.values(), *self._queue.admitted]

    @property
    def leaving(self) -> list[Request]:
        """Requests that have ended but hold their pages until a step is over."""
        return self._steps.leaving

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts and of retracted requests that are to be computed."""
        return self._queue.waiting_tokens

    @property
    def num_prompts(self) -> int:
        """Requests of which such tokens are."""
        return len(self._queue)

    # steps

    def plan(self, now_s: float, elsewhere: NextPrompt | None = None) -> Step | None:
        """Every running request decodes; prompts share what is left of the token budget, and of the time.

        They have nothing of it where one `elsewhere` comes before them. No step is planned behind one with drafts:
        where its requests stand is known when it is known how many came true.
        """
        if self._steps and self._steps.newest.drafts:
            return None
        decodes = self._decodes()
        drafts = None if self._drafter is None else self._drafts(decodes, self._drafter)
        chunks = self._chunks(now_s, decodes, drafts, elsewhere) if self._queue else []
        return new_step(decodes, chunks, drafts) if decodes or chunks else None

    def launch(self, step: Step, now_s: float) -> ForwardBatch:
        cost = 0
        joining: Sequence[Request] = ()
        if step.chunks:
            cost = self._limits.prompt_cost.of_chunks(step.chunks)
            joining = [chunk.request for chunk in step.chunks if chunk.is_last]
        self._pace.begin(cost, now_s, len(step.decodes), joining)
        cache = self._cache
        pending, pages_per_state = self._steps.samples(), cache.pages_per_state
        batch = self._build(step, cache.page_table, cache.page_size, pending, pages_per_state, cache.window_table)
        if self._drafter is not None and not self._drafter.follows(step):
            batch = replace(batch, is_followed=False)
        begun = _begin_states(step.decodes) if pages_per_state else ()
        self._steps.launch(step)
        if self._drafter is not None:
            self._drafter.launched(step, now_s)
        for request in begun:
            self._steps.read_state(request)
        if step.chunks:
            for request in self._queue.launch(step.chunks):
                self._batch.add(request)
        return batch

    def sampling(self) -> SamplingBatch:
        """Say how to sample the step launched last."""
        step = self._steps.newest
        return self._sampling.build(step.sampled, step.drafts)

    @property
    def gives_back(self) -> bool:
        """Whether the oldest step may give pages back when it is over, beside those of requests that end with it."""
        return self._steps.keep_any or self._cache.windows.num_groups > 0

    def commit(self, ended_s: float) -> Step:
        """Return the oldest step launched, which ended then."""
        self._pace.end(ended_s)
        if self._drafter is not None:
            self._drafter.committed(ended_s)
        step = self._steps.commit()
        if self._cache.windows.num_groups:
            self._pass_windows(step)
        return step

    def _pass_windows(self, step: Step) -> None:
        """Give up what is behind the windows of requests whose newest known token a step has computed.

        Steps in flight compute what comes behind it.
        """
        cache, page_size = self._cache, self._cache.page_size
        fewest, held = cache.windows.fewest_passed(page_size), (one for one in step.decodes if one.node is not None)
        cache.pass_windows([one for one in held if one.num_tokens // page_size - one.first_window >= fewest])

    def share(self, step: Step) -> None:
        """Let others reuse what a step that is over has computed of prompts; not of requests that have ended."""
        for chunk in step.chunks:
            if chunk.request.node is not None and not chunk.request.has_ended:
                self._steps.share(chunk.request, chunk.start + chunk.num_tokens)

    def rooms_of_step(self) -> set[int]:
        return self._steps.newest.rooms

    def give_up(self) -> None:
        """The step launched last was not run to its end, and its requests are about to be taken out."""
        self._pace.give_up()
        if self._drafter is not None:
            self._drafter.given_up()
        self._steps.commit().undo()

    @property
    def drafts(self) -> DraftReport:
        """What has come of drafts."""
        return NO_DRAFTS if self._drafter is None else self._drafter.report()

    def spare_pages(self, candidate: Request, importing: Sequence[Request] = ()) -> int:
        """Return how many pages must be left when `candidate` has got its own."""
        return self._forecast.spare_pages([*self.admitted, *importing], candidate)

    # steps that can be told beforehand

    def plain_steps(self, token_id: int) -> PlainSteps:
        """Return the steps that follow, as far as they do nothing but give each request its next token, `token_id`.

        That is what they do unless something is heard meanwhile.
        """
        is_told = not self._steps and not self._queue and self._drafter is None
        if not is_told or self._cache.pages_per_state or self._cache.windows.num_groups:
            return NO_PLAIN_STEPS
        count = min((_plain_steps(request, token_id) for request in self._batch), default=0)
        while count and sum(self._new_pages(each, count) for each in self._batch) > self._cache.num_available:
            count //= 2
        return PlainSteps(count, tuple(self._batch))

    def pass_plain_steps(self, began_s: float, ends_s: Sequence[float], token_id: int) -> None:
        """Be behind some of them, which ended at these times, one after the other from `began_s` on."""
        self._pace.pass_steps(len(self._batch), began_s, ends_s)
        num_steps, growing = len(ends_s), []
        for request in self._batch:
            end = request.num_tokens + num_steps
            request.tokens[request.num_tokens : end] = token_id
            request.num_tokens, request.computed_len = end, end - 1
            if end - 1 > request.num_pages * self._cache.page_size:
                growing.append(request)
        self._cache.grow_all(growing)

    def _new_pages(self, request: Request, count: int) -> int:
        return max(0, self._cache.pages_for(request.computed_len + count) - request.num_pages)

    # requests

    def reason_to_wait(self, request: Request) -> Reason | None:
        """Return what brings some of its prefix, if it should not be admitted before that is done."""
        return self._queue.reason_to_wait(request)

    def take_turn(self, request: Request) -> None:
        """Have a request that lets others pass keep its place among those that are computed here."""
        self._queue.take_turn(request)

    def given_len(self, request: Request) -> int:
        """Return how many tokens of a request need not be computed: cached, or coming from who computes them."""
        return self._queue.given_len(request)

    def join(self, request: Request, first_s: float) -> None:
        """Take in a request whose KV is here; its first token came at `first_s`."""
        self._batch.add(request)
        self._pace.join(request, first_s)

    def extend(self, request: Request) -> None:
        """Take in a request that holds its pages, to be computed."""
        self._queue.add_admitted(request)

    def has(self, request: Request) -> bool:
        """Whether each step continues the request."""
        return request in self._batch

    def hold(self, request: Request) -> None:
        """Let no further step continue a request, which keeps its pages."""
        self._leave(request)
        self._held.add(request.room)

    def release(self, request: Request, now_s: float) -> None:
        """Let steps continue a request that is held."""
        self._held.remove(request.room)
        self.join(request, now_s)

    def is_still(self, request: Request) -> bool:
        """Whether no step that is launched computes anything of a request that is held."""
        return not self._steps.involve(request)

    def give_away(self, request: Request) -> None:
        """Forget a request that is still: its pages are the caller's."""
        self._held.discard(request.room)
        self._turns.end(request.room)

    def finish(self, request: Request) -> None:
        """Take out a request that has come to its own end."""
        self._forecast.learn(request)
        self._pace.expect(self._forecast.lengths)
        self.retire(request)

    def retire(self, request: Request) -> None:
        """Take out a request; what is computed of it stays as a cached prefix."""
        self._remove(request)
        if request.node is not None:
            self._steps.retire(request)

    def distrust(self, request: Request) -> None:
        """Let nobody reuse what is computed of a request."""
        self._cache.distrust(request)

    def drop(self, request: Request) -> None:
        """Take out a request and keep nothing of it but what others share already."""
        self._remove(request)
        if request.node is not None:
            self._steps.drop(request)

    def _remove(self, request: Request) -> None:
        if request in self._batch:
            self._leave(request)
        elif request.room in self._held:
            self._held.remove(request.room)
        else:
            self._queue.remove(request)

    def expire(self, now_s: float) -> None:
        """Give requests that were set aside their places again, as far as they need not wait any longer."""
        if self._waiting.has_aside:
            self._queue.expire(now_s)

    def next_s(self) -> float | None:
        """Return when `expire` has something to do, if no event comes before."""
        return self._queue.next_s()

    def next_prompt(self, now_s: float) -> NextPrompt | None:
        """Return whose prompt is computed next, if there is one."""
        return self._queue.next_prompt(now_s) if self._queue else None

    def _chunks(
        self, now_s: float, decodes: Sequence[Request], drafts: Drafts | None, elsewhere: NextPrompt | None
    ) -> list[Chunk]:
        first = self._queue.next_prompt(now_s)
        if first is not None and elsewhere is not None and elsewhere.place < first.place:
            return []
        num_tokens = len(decodes) + (sum(map(len, drafts.values())) if drafts else 0)
        most, num_waiting = self._limits.max_step_tokens - num_tokens, len(self._batch)
        if decodes or not num_waiting:
            budget = self._pace.beside(most, len(decodes), now_s, first)
        else:
            least = 0 if self._steps else AT_LAST  # nobody gets a token before some of a prompt is computed
            budget = self._pace.apart(most, num_waiting, now_s, max(1, self._queue.waiting_tokens), first, least)
        if first is not None and first.is_idle_work:
            budget = min(budget, self._pace.idle(most))
        return self._queue.plan(now_s, budget, self.spare_pages)

    def _decodes(self) -> list[Request]:
        """Return the requests that decode now: none when memory ran out and a step may still bring some back."""
        while not self._batch.make_room(due := self._turns.runnable(self._batch.due())):
            if self._steps:
                return []
            self._retract(self._batch.victim())
        return due

    def _drafts(self, decodes: Sequence[Request], drafter: Drafter) -> Drafts:
        """Ask for guesses; return what a step may have of them, each up to what is no token of the model."""
        proposed, vocab_size = drafter.propose(decodes), self._limits.vocab_size
        if not proposed:
            return proposed
        guesses = [(request, proposed[request.room]) for request in decodes if request.room in proposed]
        known = [(request, _known(guess, vocab_size)) for request, guess in guesses if guess]
        return self._batch.admit_drafts(known, self._limits.max_drafts)

    def _leave(self, request: Request) -> None:
        self._batch.remove(request)
        self._pace.leave(request)

    def _retract(self, request: Request) -> None:
        self._leave(request)
        self._turns.end(request.room)
        self._cache.retire(request)
        self._waiting.add_first(request)
        self._on_retracted(request)


def _begin_states(decodes: Sequence[Request]) -> list[Request]:
    """Their states will have seen all that is said; return those that begin with one from pages."""
    for request in decodes:
        request.late_len = 0
    return [request for request in decodes if request.state_from is not None]


def _known(guess: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return its beginning that is made of the model's tokens: prompts with pictures have keys in their place."""
    if min(guess) >= 0 and max(guess) < vocab_size:
        return guess
    return tuple(takewhile(lambda token_id: 0 <= token_id < vocab_size, guess))


def _plain_steps(request: Request, token_id: int) -> int:
    """Return how many steps of a request `append_plain` will take such a token of."""
    is_told_so = request.num_output_tokens > request.is_imported  # see `append_plain`
    is_plain = is_told_so and request.samples_plainly and token_id not in request.end_ids
    is_known = request.computed_len + 1 == request.num_tokens and not request.has_ended
    return max(0, request.max_len - 1 - request.num_tokens) if is_plain and is_known else 0
