"""Requests whose prompt is not computed yet, and the choice of what the next step computes of them.

Who is admitted next is the waiting queue's choice; if that request does not fit the pool, nobody passes it, so none
starves. Prompts that have begun go on before others do; but one whose first token is late lets those pass that may be
in time, as the waiting queue does, and for no longer. A prompt longer than what is left of the token budget is chunked,
and its chunk ends the step; so does one for which the prompts that are completed before it would wait longer than it is
worth.

A request whose prefix another one is computing lets others pass until it can be reused, where that is faster; so does
one whose prefix a tier of the cache is bringing back or a peer sends, one whose adapter has no slot, and for a step one
whose images would have to be encoded beside many others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple, TypeAlias

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.aside import Reason
from diptych.engine.schedule.pace.prompts import NextPrompt
from diptych.engine.schedule.packing import Packing
from diptych.engine.schedule.policies import arrival, due_s, gives_way
from diptych.engine.schedule.prefixes_in_flight import PendingPrefix, PrefixesInFlight, common_len
from diptych.engine.schedule.waiting_queue import WaitingQueue
from diptych.engine.values.image_chunks import ImageCuts
from diptych.engine.values.limits import Limits
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.request import Request
from diptych.engine.values.step import Chunk


class ComingPrefix(NamedTuple):
    """What a peer sends of a request's prefix."""

    reason: Reason  # to wait for it
    num_tokens: int  # of the prompt that will be here


Coming: TypeAlias = Callable[[Request], ComingPrefix | None]


def nothing_comes(request: Request) -> None:
    """Peers send no prefixes."""


class _NextStep:
    """Implements `Reason`: the step has images enough, and text need not wait for more."""

    until_s = math.inf  # the step is about to run, and the next one is planned behind it

    def is_over(self, now_s: float) -> bool:
        return True


NEXT_STEP: Final = _NextStep()


class ExtendQueue:
    """Waiting requests and the ones part-way through their prompt."""

    def __init__(
        self,
        cache: KvCache,
        waiting: WaitingQueue,
        limits: Limits,
        turns: Turns = ENOUGH_SLOTS,
        coming: Coming = nothing_comes,
    ) -> None:
        self._cache = cache
        self._coming = coming
        self._turns = turns
        self._waiting = waiting
        self._max_batch_size = limits.max_requests
        self._cost = limits.prompt_cost
        are_whole = limits.vision is not None and limits.vision.is_whole
        self._cuts = ImageCuts.BESIDE if are_whole else ImageCuts.ANYWHERE
        self._extending: deque[Request] = deque()  # admitted, prompt not complete
        self._num_turns = 0
        self._in_flight = PrefixesInFlight(cache.page_size)  # of those, until what they computed is shared

    def __len__(self) -> int:
        return len(self._waiting.expected) + len(self._extending)

    def __bool__(self) -> bool:
        return bool(self._extending or self._waiting.expected)

    @property
    def admitted(self) -> Collection[Request]:
        return self._extending

    @property
    def waiting_tokens(self) -> int:
        num_tokens = self._waiting.num_tokens
        return num_tokens + sum([each.extend_len for each in self._extending]) if self._extending else num_tokens

    def add_admitted(self, request: Request) -> None:
        """Take a request that holds its pages already, in its turn: behind those that are part-way."""
        self.take_turn(request)
        place = len(self._extending)
        while place and self._extending[place - 1].turn > request.turn and not self._extending[place - 1].has_begun:
            place -= 1
        self._extending.insert(place, request)
        self._in_flight.add(request)

    def take_turn(self, request: Request) -> None:
        """Have a request keep its place before those that come here later, if it has none yet."""
        if not request.turn:
            self._num_turns += 1
            request.turn = self._num_turns

    def reason_to_wait(self, request: Request) -> Reason | None:
        """Return what brings some of its prefix, a peer or another request, if it should not be begun before."""
        coming = self._coming(request)
        return self._pending(request) if coming is None else coming.reason

    def given_len(self, request: Request) -> int:
        """Return how many tokens of a request need not be computed: cached, or coming from who has or computes them."""
        if (coming := self._coming(request)) is not None:
            return min(coming.num_tokens, request.num_tokens - 1)
        if (pending := self._pending(request)) is not None:
            return min(pending.num_pages * self._cache.page_size, request.num_tokens - 1)
        return self._cache.cached_len(request)

    def _pending(self, request: Request) -> PendingPrefix | None:
        pending = self._in_flight.longest(request)
        return pending if pending is not None and pays_to_wait(self._cache, self._cost, request, pending) else None

    def expect(self, request: Request) -> None:
        """Look again at what need not be computed of a request."""
        self._waiting.expect(request, self.given_len(request))

    def expect_from(self, producer: Request, requests: Iterable[Request]) -> None:
        """Note what requests, which wait here or are about to, will find of one that has just been admitted."""
        for request in requests:
            start, found = request.given_len, common_len(request, producer, self._cache.page_size)
            if found > start and self._cost.pays_to_wait(start, found - start):
                self._waiting.expect(request, min(found, request.num_tokens - 1))

    def remove(self, request: Request) -> None:
        """Take out a request that ends early. Its pages stay with the caller."""
        (self._extending if request.row >= 0 else self._waiting).remove(request)

    def expire(self, now_s: float) -> None:
        """Give requests that were set aside their places again, as far as they need not wait any longer."""
        if self._waiting.has_aside:
            for request in self._waiting.bring_back(now_s):
                self.expect(request)

    def next_s(self) -> float | None:
        """Return when `expire` has something to do, if no event comes before."""
        return self._waiting.next_s()

    def next_prompt(self, now_s: float) -> NextPrompt | None:
        """Return the prompt whose turn it is, if there is one."""
        timely, late = self._begun(now_s)
        line = [*timely[:1], *([self._waiting.peek(now_s)] if self._waiting.has_next else ()), *late[:1]]
        if not line:
            return None
        first = min(line, key=lambda request: gives_way(request, now_s))
        start = first.computed_len if first.row >= 0 else first.given_len
        cost, place = self._cost.of(start, first.num_tokens - start), (gives_way(first, now_s), arrival(first))
        waiting = self.waiting_tokens, len(self)
        return NextPrompt(first.room, due_s(first), cost, first.slo.weight, *waiting, place, first.is_idle_work)

    def _begun(self, now_s: float) -> tuple[list[Request], list[Request]]:
        """Return those that are part-way and can go on: in their turns, and those that let others pass."""
        begun = self._turns.runnable(list(self._extending))
        late = [request for request in begun if gives_way(request, now_s)]
        return ([request for request in begun if not gives_way(request, now_s)] if late else begun), late

    def plan(self, now_s: float, budget: int, spare_pages: Callable[[Request], int]) -> list[Chunk]:
        """Choose chunks that cost at most `budget`, admitting requests while budget and pages last.

        `spare_pages(request)` are to stay available when `request` is admitted.
        """
        chunks = self._choose(now_s, budget, spare_pages)
        if self._cache.pages_per_state:
            self._copy_states(chunks)
        return chunks

    def _choose(self, now_s: float, budget: int, spare_pages: Callable[[Request], int]) -> list[Chunk]:
        step = Packing(self._cost, budget, self._max_batch_size, len(self), self._cuts)
        timely, late = self._begun(now_s)
        if not self._go_on(step, timely):
            return step.chunks
        self.expire(now_s)
        while self._waiting.has_next and self._cache.has_row and step.has_room:
            request = self._waiting.peek(now_s)
            if (late and gives_way(request, now_s)) or (request.is_idle_work and _is_urgent(step)):
                break
            if reason := self.reason_to_wait(request):
                if not self._waiting.set_aside(reason):
                    break
                continue
            start = 0 if step.admits_any and not request.contents else self._cache.cached_len(request)
            if not step.may_encode(request, start):
                if not self._waiting.set_aside(NEXT_STEP):
                    break
                continue
            if not step.admits(request, start):
                break
            if not self._turns.may_take(request):
                if not self._waiting.set_aside(self._turns.reason(request)):
                    break
                continue
            if self._cache.admit(request, spare_pages=spare_pages):
                self._turns.take(request)  # who waits for memory holds no slot
                self._waiting.on_admitted(request)
                self.add_admitted(request)
                if not step.has_room_for(request, request.computed_len):  # less of it was cached than it seemed
                    break
                step.add(request)
                continue
            if not self._waiting.set_aside_for_restore():
                break
        self._go_on(step, [request for request in late if not (request.is_idle_work and _is_urgent(step))])
        return step.chunks

    def _go_on(self, step: Packing, begun: Iterable[Request]) -> bool:
        """Add the next chunks of prompts that are part-way; return whether each has one that may have one."""
        for request in begun:
            if not step.may_encode(request, request.computed_len):
                continue
            if not step.admits(request, request.computed_len):
                return False
            step.add(request)
            if not self._cache.windows.num_groups:
                continue
            if not self._cache.grow_windows(request, request.computed_len + step.chunks[-1].num_tokens):
                step.chunks.pop()
                return False
        return True

    def _copy_states(self, chunks: Iterable[Chunk]) -> None:
        """Let the step that computes `chunks` copy the states behind which others may begin."""
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            if end in chunk.request.cuts:
                self._cache.begin_snapshot(chunk.request, end)

    def launch(self, chunks: Iterable[Chunk]) -> list[Request]:
        """Note that a step computes the chunks; return the requests whose prompt is then complete, which leave."""
        complete = [chunk.request for chunk in chunks if chunk.is_last]
        for request in complete:
            self._extending.remove(request)
        return complete

    def recall(self, chunks: Iterable[Chunk]) -> None:
        """The step that was to compute the chunks did not: take back the requests that had left with it."""
        self._extending.extendleft(chunk.request for chunk in chunks if chunk.is_last)


def _is_urgent(step: Packing) -> bool:
    """Whether somebody waits for what the step has already: no work for idle time makes it longer."""
    return any(not chunk.request.is_idle_work for chunk in step.chunks)


def pays_to_wait(cache: KvCache, cost: PromptCost, request: Request, pending: PendingPrefix) -> bool:
    """Whether so much is coming that is not cached yet that the request should not be begun before."""
    start = cache.cached_len(request)
    return cost.pays_to_wait(start, pending.num_pages * cache.page_size - start)
