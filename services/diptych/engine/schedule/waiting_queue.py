"""Requests that wait for admission, and which of them is next.

Retracted requests go first; then the tenant whose turn it is (`tenant_shares`), and of its requests the one that the
policy chooses. Work for idle time goes behind all other, whosever that is, as long as it gives way (`gives_way`).
Rule: the next request stays the next until it is taken or leaves, even if it does not fit yet: nobody is overtaken
forever for being large. Only who comes back from aside goes before it, if it ranks before it; and while its first token
is late, for a bounded time, those whose first tokens may still be in time (`gives_way`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.aside import Aside, Reason
from diptych.engine.schedule.lines.tenant_lines import Place, TenantLines
from diptych.engine.schedule.lines.tenant_shares import TenantShares
from diptych.engine.schedule.policies import POLICIES, InTime, Policy, gives_way
from diptych.engine.values.limits import Scheduling
from diptych.engine.values.request import Request

MAX_RESTORES: Final = 4  # for which a request lets others pass: they may take the memory again that it waits for


class WaitingQueue:
    """Waiting requests of all tenants."""

    def __init__(self, policy: Policy, shares: TenantShares) -> None:
        self._policy = policy
        self._shares = shares
        self._retracted: deque[Request] = deque()
        self._lines = TenantLines()
        self._idle = TenantLines()  # of work for idle time that gives way to all in `_lines`
        self._yielding: dict[int, int] = {}  # by room of such work: its order of arrival
        self._yielding_by_age: list[tuple[float, int, int]] = []  # a heap: when it came, its order, its room; some left
        self._places: dict[int, Place] = {}  # by room
        self._num_added = 0
        self._next: Request | None = None  # chosen, not taken yet
        self._aside = Aside()
        self.expected: dict[int, int] = {}  # tokens to be computed, by room
        self.num_tokens = 0  # of them, in all
        self.num_prompts = 0  # requests of which some are

    def __len__(self) -> int:
        return len(self.expected)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted
        for _, _, request in self._places.values():
            yield request
        yield from self._retracted_aside

    def add(self, request: Request) -> None:
        """Queue a request that never ran."""
        self._count(request)
        tenant = request.account.tenant
        if tenant not in self._lines and tenant not in self._idle and tenant not in _tenants(self.aside):
            self._shares.enter(tenant)
        place = (self._policy.rank(request), self._num_added, request)
        if request.is_idle_work:
            self._yielding[request.room] = self._num_added
            heappush(self._yielding_by_age, (request.life.arrival_s, self._num_added, request.room))
        self._num_added += 1
        self._places[request.room] = place
        self._lines_of(request).add(place)

    def add_first(self, request: Request) -> None:
        """Queue a retracted request ahead of all that never ran."""
        self._count(request)
        self._retracted.appendleft(request)
        self._next = None

    def expect(self, request: Request, given_len: int) -> None:
        """Note that so many tokens of a request, which may wait here, need not be computed."""
        request.given_len = given_len
        if request.room in self.expected:
            self._discount(request)
            self._count(request)

    def peek(self, now_s: float) -> Request:
        """Return the request to admit next; at least one waits."""
        if self._next is None or gives_way(self._next, now_s):
            self._next = self._retracted[0] if self._retracted else self._choose(now_s)
        return self._next

    @property
    def has_next(self) -> bool:
        """Whether one waits that is not set aside."""
        return bool(self._retracted or self._lines.by_tenant or self._idle.by_tenant)

    @property
    def has_aside(self) -> bool:
        """Whether some let others pass."""
        return bool(self._aside.waiters)

    @property
    def aside(self) -> Iterator[Request]:
        """Those that let others pass."""
        return iter(self._aside)

    @property
    def _retracted_aside(self) -> list[Request]:
        return [request for request in self.aside if request.room not in self._places]

    def set_aside(self, reason: Reason) -> bool:
        """Let others pass the next request until the reason is over. False: there are too many reasons."""
        request = self._next
        assert request is not None
        if not self._aside.has_place(reason):
            return False
        self._leave(request)
        self._aside.add(request, reason)
        return True

    def set_aside_for_restore(self) -> bool:
        """Let others pass the next request while its prefix is restored. False: it waits for memory, or goes first."""
        request = self._next
        assert request is not None
        if request.restore is None or request.num_restores >= MAX_RESTORES:
            return False
        if not self.set_aside(request.restore):
            return False
        request.num_restores += 1
        return True

    def next_s(self) -> float | None:
        """Return when one of those that were set aside comes back, if no event brings it back before."""
        return self._aside.next_s()

    def bring_back(self, now_s: float) -> Sequence[Request]:
        """Give those that were set aside their places again, as far as they need not wait any longer; return them."""
        over = self._aside.pop_over(now_s)
        for request in reversed(over):
            place = self._places.get(request.room)
            if place is None:
                self._retracted.appendleft(request)
            else:
                self._lines_of(request).add(place)
            self._next = None
        return over

    def on_admitted(self, request: Request) -> None:
        """Remove a request that has been admitted, and charge its tenant for what it has to compute."""
        if request.room in self._places:
            self._shares.charge(request.account.tenant, prompt_tokens=request.extend_len)
        self.remove(request)

    def charge_output(self, request: Request) -> None:
        """Charge the tenant of a request that ends for the output made."""
        self._shares.charge(request.account.tenant, output_tokens=request.num_output_tokens)

    def remove(self, request: Request) -> None:
        """Take out a request."""
        self._discount(request)
        if not (self._aside.waiters and self._aside.remove(request)):
            self._leave(request)
        self._places.pop(request.room, None)
        self._yielding.pop(request.room, None)

    def _leave(self, request: Request) -> None:
        """It is not among those of which one is the next."""
        if self._next is request:
            self._next = None
        place = self._places.get(request.room)
        if place is None:
            self._retracted.remove(request)
            return
        self._lines_of(request).remove(place)

    def _lines_of(self, request: Request) -> TenantLines:
        return self._idle if request.room in self._yielding else self._lines

    def _count(self, request: Request) -> None:
        expected = self.expected[request.room] = request.expected_len
        self.num_tokens += expected
        self.num_prompts += expected > 0

    def _discount(self, request: Request) -> None:
        expected = self.expected.pop(request.room)
        self.num_tokens -= expected
        self.num_prompts -= expected > 0

    def _choose(self, now_s: float) -> Request:
        if self._yielding_by_age:
            self._end_yielding(now_s)
        lines = self._lines if self._lines.by_tenant else self._idle
        return self._policy.choose(lines.first(self._shares.next(lines.by_tenant)), now_s)

    def _end_yielding(self, now_s: float) -> None:
        """Give work for idle time that gives way no longer its places among all others."""
        by_age = self._yielding_by_age
        while by_age:
            _, order, room = by_age[0]
            is_here = self._yielding.get(room) == order
            if is_here and gives_way(self._places[room][2], now_s):
                return
            heappop(by_age)
            if is_here:
                self._promote(self._places[room])

    def _promote(self, place: Place) -> None:
        request = place[2]
        is_in_line = request not in self._aside
        if is_in_line:
            self._idle.remove(place)
        del self._yielding[request.room]
        if is_in_line:
            self._lines.add(place)


def _tenants(requests: Iterable[Request]) -> Iterator[str]:
    return (request.account.tenant for request in requests)


def new_waiting_queue(cache: KvCache, scheduling: Scheduling) -> WaitingQueue:
    """Return an empty queue that is ordered as `scheduling` says."""
    policy = InTime(POLICIES[scheduling.policy](cache.cached_len))
    return WaitingQueue(policy, TenantShares(scheduling.tenant_weights))
