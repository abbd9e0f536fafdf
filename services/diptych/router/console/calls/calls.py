"""Calls of clients, live and recent, as the console shows them: in a list, and each with its story.

Calls are followed for some minutes after the last look, and always where traces are exported. Of those that nobody
followed only what the explanations of routing have is shown, and of many of those only as much is made as is listed.
Times of `want` are on the monotonic clock.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from diptych.router.choose.explain import Explanations, RequestRecord
from diptych.router.console.calls.call_facts import CallFacts, facts_of, routing_facts_of
from diptych.router.console.calls.request_rows import ALL, RowFilter, newest, row_of
from diptych.router.console.calls.waterfall import bars_of, unnamed_s
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import RequestList, RequestRow, RequestStory
from diptych.router.tracing.record import CallTrace

FOLLOWED_S: Final = 600.0  # after the last look
MAX_ENDED: Final = 2000  # calls that are kept after their end,
MAX_ENDED_BYTES: Final = 8 << 20  # in so much memory
ROWS_AT_ONCE: Final = 8  # that are made: each takes some 10 us
RECORDS_AT_ONCE: Final = 256  # that are looked at


class Followed(Protocol):
    """Who follows calls, as `Tracer` does."""

    def hand_to(self, taker: Calls) -> None: ...

    def follow_until(self, at_s: float) -> None: ...

    def calls(self) -> list[CallTrace]: ...


class Ended:
    """A call that has ended. Its row is made when somebody wants it."""

    __slots__ = ("_row", "call", "nbytes")

    def __init__(self, call: CallFacts) -> None:
        self.call = call
        self._row: RequestRow | None = None
        self.nbytes = call.nbytes  # with the row

    def row(self, router: str) -> RequestRow:
        if self._row is None:
            self._row = row_of(self.call, router, 0.0)
        return self._row


_BEGUN: Final[Callable[[Ended], float]] = operator.attrgetter("call.begun_s")


class _Known(NamedTuple):
    """What there is to list, at one moment."""

    counts: tuple[int, int]  # of records of routing, and of calls that were kept
    followed: Sequence[CallTrace]
    routed: Sequence[CallFacts]
    ended: Sequence[Ended]  # the oldest first


class Calls:
    """The calls of one router, or of one process of it."""

    def __init__(
        self,
        tracer: Followed,
        explanations: Explanations,
        router_id: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`clock` is the monotonic one; `wall_clock` counts from 1970."""
        self._tracer = tracer
        self._explanations = explanations
        self._router = f"{router_id:016x}"
        self._clock = clock
        self._wall_clock = wall_clock
        self._ended: deque[Ended] = deque()  # the oldest first
        self._by_id: dict[str, Ended] = {}  # of those; of several with an id, the last one
        self.ended_bytes = 0  # about how much memory they take
        self._num_kept = 0  # since the beginning
        self._listed: tuple[tuple[int, int], RequestList] | None = None  # by what there was; None: some run
        tracer.hand_to(self)

    def want(self, now_s: float) -> None:
        """Somebody looks: calls that come in the next minutes are followed."""
        self._tracer.follow_until(now_s + FOLLOWED_S)

    def add(self, call: CallTrace) -> None:
        """Keep a call that has ended."""
        self._keep(facts_of(call))

    def requests(self, rows: RowFilter = ALL) -> Pieces[RequestList]:
        """Return the calls that are asked for: those that run, and the last that ended."""
        known = yield from self._known(rows.limit if rows.accepts_all else MAX_ENDED)
        return (yield from self._listed_of(known, rows))

    def newest(self) -> Pieces[RequestList]:
        """Return the last calls of all: the same object as before while none comes, runs or ends."""
        begun = self._explanations.end, self._num_kept
        if self._listed is None or self._listed[0] != begun or self._tracer.calls():
            known = yield from self._known(ALL.limit)
            listed = yield from self._listed_of(known, ALL)
            is_over = all(row["phase"] == "ended" for row in listed["rows"].values())
            self._listed = (known.counts, listed) if is_over else None
            return listed
        return self._listed[1]

    def story(self, request_id: str) -> Pieces[RequestStory | None]:
        """Return all that is known of a call; None if that is nothing."""
        call = yield from self._find(request_id)
        if call is None:
            return None
        now_s = self._clock()
        bars = bars_of(call, now_s)
        explanation = yield from self._explanations.told(request_id)
        return {
            "row": row_of(call, self._router, now_s),
            "bars": bars,
            "unnamed_s": unnamed_s(call, now_s),
            "token_s": [at_s - call.begun_s for at_s in call.token_s],
            "explanation": explanation,
            "trace_id": call.trace_id,
        }

    def _known(self, wanted: int) -> Pieces[_Known]:
        num_records = self._explanations.end
        routed = yield from self._routed(wanted)
        ended = sorted(self._ended, key=_BEGUN)
        return _Known((num_records, self._num_kept), self._followed(), routed, ended)

    def _listed_of(self, known: _Known, rows: RowFilter) -> Pieces[RequestList]:
        chosen: dict[str, RequestRow] = {}
        for number, row in enumerate(self._rows(known)):
            is_asked_for = rows.accepts_all or rows.accepts(row)
            if is_asked_for and chosen.setdefault(row["id"], row) is row and len(chosen) == rows.limit:
                break
            if number % ROWS_AT_ONCE == 0:
                yield
        return newest(chosen.values(), rows.limit)

    def _rows(self, known: _Known) -> Iterator[RequestRow]:
        """Yield what runs, and then what has ended, the newest first. Of several with an id the first counts."""
        now_s = self._clock()
        for call in known.followed:
            yield row_of(facts_of(call), self._router, now_s)
        for facts in reversed(known.routed):
            yield row_of(facts, self._router, now_s)
        for ended in reversed(known.ended):
            yield ended.row(self._router)

    def _find(self, request_id: str) -> Pieces[CallFacts | None]:
        for call in self._followed():
            if call.request_id == request_id:
                return facts_of(call)
        if request_id in self._by_id:
            return self._by_id[request_id].call
        yield
        records = [record for record in self._explanations.records() if record.request_id == request_id]
        return routing_facts_of(records, self._wall_s()) if records else None

    def _followed(self) -> list[CallTrace]:
        """Return the calls that are followed now, the newest first; those without an id are not far enough."""
        return [call for call in reversed(self._tracer.calls()) if call.request_id]

    def _routed(self, wanted: int) -> Pieces[list[CallFacts]]:
        """Return what is known of calls that run and are not followed, and keep those that have ended: of calls that
        have ended only the newest are looked at, as many as are wanted.
        """
        groups = yield from self._unfollowed(wanted)
        running = []
        for number, records in enumerate(groups):
            facts = routing_facts_of(records, self._wall_s())
            if facts.ended_s is None:
                running.append(facts)
            elif facts.request_id not in self._by_id:  # another look may have kept it meanwhile
                self._keep(facts)
            if number % ROWS_AT_ONCE == 0:
                yield
        return running

    def _unfollowed(self, wanted: int) -> Pieces[Sequence[Sequence[RequestRecord]]]:
        """Return the records of routing of each call that is neither followed nor kept, and runs or is among the
        `wanted` newest.
        """
        records, shown = self._explanations.records(), set[str]()
        for record in reversed(records):
            if len(shown) == wanted:
                break
            shown.add(record.request_id)
        yield
        shown.update(record.request_id for record in records if not record.is_over)
        shown.difference_update(self._by_id, (call.request_id for call in self._followed()))
        yield
        groups: dict[str, list[RequestRecord]] = {}
        for number, record in enumerate(records):
            if record.request_id in shown:
                groups.setdefault(record.request_id, []).append(record)
            if number % RECORDS_AT_ONCE == 0:
                yield
        return [*groups.values()]

    def _wall_s(self) -> float:
        """Return what the wall's clock is ahead of the monotonic one."""
        return self._wall_clock() - self._clock()

    def _keep(self, call: CallFacts) -> None:
        self._num_kept += 1
        ended = Ended(call)
        self._ended.append(ended)
        self._by_id[call.request_id] = ended
        self.ended_bytes += ended.nbytes
        while len(self._ended) > MAX_ENDED or self.ended_bytes > MAX_ENDED_BYTES:
            self._drop(self._ended.popleft())

    def _drop(self, ended: Ended) -> None:
        self.ended_bytes -= ended.nbytes
        if self._by_id.get(ended.call.request_id) is ended:
            del self._by_id[ended.call.request_id]
