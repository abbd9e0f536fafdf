"""Which sessions wait for others that have begun, while those need the memory: admission of sessions. Pure.

Where the texts of more sessions than fit are kept by turns, each turn computes its whole text, and all take longer than
those that fit would one after the other (the working sets of Denning, "The working set model for program behavior",
1968). So whoever would take memory from texts that are kept for sessions which are away lets others pass. That is a new
session, or one whose own text is gone; one whose text is kept goes on.

It waits no longer than the harm that it would do: as many seconds of computing as what it takes would cost the others,
in each turn that its tenant's sessions have in the mean, for each request in line. At most `MAX_WAIT_S` times the share
of the tenant's requests that go on, so a tenant whose requests call no tools never waits. Half of what is left to an
SLO or a deadline bounds it, and each level of priority counts for some of it, as it does in a line. It ends at once
when there is room, when the tenant has less than an even share of what is kept, or nothing has been computed for
`IDLE_S`: then what is kept slows down nobody but those who wait.
"""

from __future__ import annotations

import math
from typing import Final

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.policies import AGING_S, due_s
from diptych.engine.values.request import Request

MAX_WAIT_S: Final = 300.0
IDLE_S: Final = 5.0
LOOK_S: Final = 1.0  # between two looks at those that wait
MAX_TURNS: Final = 100.0


class SessionLine:
    """Those of one queue that wait. Implements `Reason` for all of them."""

    def __init__(self, cache: KvCache) -> None:
        self.until_s = math.inf  # the next look
        self._cache = cache
        self._least = math.inf  # pages that some of those who wait need
        self._idle_since_s = self._seen_s = -math.inf

    def is_over(self, now_s: float) -> bool:
        """Whether some of those that wait may go on; then each is to be asked for anew."""
        is_over = now_s >= self.until_s or self._room() >= self._least
        if is_over:
            self.until_s = self._least = math.inf
        return is_over

    def reason(self, request: Request, now_s: float, num_waiting: int, *, is_busy: bool) -> SessionLine | None:
        """Return why a request that is next lets others pass: see `holds`."""
        return self if self.holds(request, now_s, num_waiting, is_busy=is_busy) else None

    def holds(self, request: Request, now_s: float, num_waiting: int, *, is_busy: bool) -> bool:
        """Whether a request that is next lets others pass. `is_busy`: prompts are computed, or come from a peer."""
        if not self._cache.tree.pins or not self._is_new(request):
            return False
        need = self._cache.pages_for(request.num_tokens) - self._cache.cached_len(request) // self._cache.page_size
        if self._room() >= need or self._has_less_than_its_share(request, need):
            return False
        self._look(now_s, is_busy)
        until_s = self._latest_s(request, need, num_waiting)
        if until_s <= now_s:
            return False
        if self._idle_since_s + IDLE_S <= now_s:
            self._idle_since_s = now_s  # one at a time
            return False
        self._cache.sessions.waits(request, now_s)
        self._least = min(self._least, need)
        self.until_s = min(self.until_s, until_s, now_s + LOOK_S)
        return True

    def _is_new(self, request: Request) -> bool:
        """Whether it begins a session, or one whose text is gone, and its tenant has any; it has not run elsewhere."""
        has_run = request.pinned is not None or request.num_output_tokens or request.num_prior_output_tokens
        return not has_run and self._cache.sessions.habits.share(request.account.tenant) > 0.0

    def _look(self, now_s: float, is_busy: bool) -> None:
        if is_busy or now_s - self._seen_s > 2 * LOOK_S:
            self._idle_since_s = now_s
        self._seen_s = now_s

    def _room(self) -> int:
        """Return the pages that a request could get without taking any from who is away."""
        return self._cache.num_available - self._cache.tree.pins.num_resting

    def _has_less_than_its_share(self, request: Request, need: int) -> bool:
        pins, tenant = self._cache.tree.pins, request.account.tenant
        by_tenant = pins.pages_by_tenant()
        own = by_tenant.setdefault(tenant, 0)
        return len(by_tenant) > 1 and own + need <= pins.most_pages / len(by_tenant)

    def _latest_s(self, request: Request, need: int, num_waiting: int) -> float:
        """Return until when a request waits at the latest."""
        arrival_s = request.life.arrival_s
        share = self._cache.sessions.habits.share(request.account.tenant)
        wait_s = min(MAX_WAIT_S * share, self._harm_s(need, share, num_waiting))
        wait_s -= AGING_S * max(0, request.account.priority)
        left_s = min(due_s(request), request.life.deadline_s) - arrival_s
        return arrival_s + min(wait_s, left_s / 2)

    def _harm_s(self, need: int, share: float, num_waiting: int) -> float:
        """Return what a request would cost others, if that is known."""
        pins, page_size = self._cache.tree.pins, self._cache.page_size
        mean = max(pins.num_pages / len(pins), 1.0)
        text_s = self._cache.compute_s(0, int(mean * page_size))
        turns = min(MAX_TURNS, 1.0 / max(1.0 - share, 1e-9))
        return math.inf if not text_s else text_s * need / mean * turns * (1 + num_waiting)
