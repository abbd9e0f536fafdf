"""Which adapters are in the model's slots: there may be more adapters than slots, and requests wait for theirs.

A request takes its adapter's slot when it is admitted, or goes on here with KV that came, and gives it back when it
ends, is retracted, or has nothing more to compute. So who holds a slot is computed, and waits for nobody. A slot that
nobody holds keeps its adapter until another one needs it: the one that was used last the longest ago goes first.

Rule: nobody starves. Adapters without a slot get one in the order in which they were first wanted, and while any wait,
at most `PATIENCE` requests join those that are in use: then these run out.

Rule: who holds memory, or has memory held for it elsewhere, never waits for one that may lack it. So there is a line
for each `Rank`. When `PATIENCE` others have passed new requests, no more KV should be let in (`reason_for_import`) till
these have had a turn. Prompts for other workers are not held back for those that this one serves alone, or retracted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Final, Protocol

from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.schedule.aside import Reason
from diptych.engine.values.request import Request

PATIENCE: Final = 64  # requests
NEVER: Final = float("inf")


Place = Callable[[int, int], None]  # brings adapter `number` into `slot`, for the steps launched from now on


def nobody(number: int, slot: int) -> None:
    """Implements `Place` where there is no model."""


class Rank(IntEnum):
    """Whose line goes first."""

    HOLDS_MEMORY = 0  # KV that came
    PROMPT = 1  # for another worker, where pages are held for it
    RETRACTED = 2
    ALONE = 3  # new, and computed here from its first token to its last


def rank_of(request: Request) -> Rank:
    """Return the rank of a request that is not served alone, or has begun."""
    if request.row >= 0:
        return Rank.HOLDS_MEMORY
    return Rank.RETRACTED if request.num_output_tokens else Rank.PROMPT


class Turns(Protocol):
    """Who may be computed, as far as adapters go."""

    def may_take(self, request: Request, rank: Rank | None = None) -> bool:
        """Whether a request can have its adapter's slot now, or has it; False: it waits in line. None: `rank_of` it."""
        ...

    def take(self, request: Request) -> None:
        """Give a request its adapter's slot, which it may take, unless it has it."""
        ...

    def end(self, room: int) -> None:
        """Take back what a request has, or waits for. Idempotent."""
        ...

    def runnable(self, requests: list[Request]) -> list[Request]:
        """Return those that have their slot, or take it now."""
        ...

    def reason(self, request: Request, rank: Rank | None = None) -> Reason:
        """Return why a request waits that may not take its slot: the same object for all of an adapter."""
        ...

    def reason_for_import(self, request: Request) -> Reason | None:
        """Return why a request should not get memory for KV that is to come."""
        ...


class EnoughSlots:
    """Implements `Turns` where each adapter has a slot of its own: that of its number."""

    def may_take(self, request: Request, rank: Rank | None = None) -> bool:
        return True

    def take(self, request: Request) -> None:
        pass

    def end(self, room: int) -> None:
        pass

    def runnable(self, requests: list[Request]) -> list[Request]:
        return requests

    def reason(self, request: Request, rank: Rank | None = None) -> Reason:
        raise AssertionError("nobody waits")

    def reason_for_import(self, request: Request) -> Reason | None:
        return None


ENOUGH_SLOTS: Final = EnoughSlots()


@dataclass(frozen=True, slots=True)
class WaitForSlot:
    """Implements `aside.Reason`: there is no slot for the adapter of requests of one rank."""

    turns: AdapterTurns
    number: int
    rank: Rank
    until_s: float = NEVER

    def is_over(self, now_s: float) -> bool:
        return self.turns.has_slot_for(self.number, self.rank)


@dataclass(frozen=True, slots=True)
class WaitForNew:
    """Implements `aside.Reason`: it is the turn of requests that were passed by too many."""

    turns: AdapterTurns
    until_s: float = NEVER

    def is_over(self, now_s: float) -> bool:
        return not self.turns.is_overdue


class AdapterTurns:
    """Adapters by number, in slots. One thread uses it: the scheduler's."""

    def __init__(self, num_slots: int, place: Place = nobody) -> None:
        self._place = place
        self._numbers: list[int] = [NO_ADAPTER] * num_slots  # by slot
        self._last_use = [0] * num_slots  # by slot
        self._slots: dict[int, int] = {}  # by number
        self._users: dict[int, set[int]] = {}  # rooms, by number; never empty
        self._held: dict[int, int] = {}  # numbers, by room
        self._lines: tuple[dict[int, set[int]], ...] = ({}, {}, {}, {})  # by rank: rooms that wait, by number, in order
        self._reasons: dict[tuple[int, Rank], WaitForSlot] = {}
        self._for_new = WaitForNew(self)
        self._num_joined = 0  # requests that joined an adapter in use since somebody waits
        self._num_passed = 0  # requests, not new, that took slots since new ones wait
        self._clock = 0
        self.num_placed = 0  # in all

    def place_by(self, place: Place) -> None:
        """Have adapters brought into slots by `place`."""
        self._place = place

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(rooms) for line in self._lines for rooms in line.values())

    @property
    def is_overdue(self) -> bool:
        """Whether too many have passed new requests that wait."""
        return self._num_passed >= PATIENCE and any(number not in self._users for number in self._new)

    @property
    def _new(self) -> set[int]:
        """Adapters that new requests wait for."""
        return self._lines[Rank.PROMPT].keys() | self._lines[Rank.ALONE].keys()

    def may_take(self, request: Request, rank: Rank | None = None) -> bool:
        number, room = request.adapter, request.room
        rank = rank_of(request) if rank is None else rank
        if number == NO_ADAPTER or room in self._held or self.has_slot_for(number, rank):
            return True
        self._lines[rank].setdefault(number, set()).add(room)
        return False

    def has_slot_for(self, number: int, rank: Rank) -> bool:
        """Whether a request of this rank with this adapter would get a slot now."""
        if number in self._users:
            return self._num_joined < PATIENCE or not self._is_wanted(rank)
        ahead: set[int] = set()
        for other in chain(*self._lines[: rank + 1]):
            if other == number:
                break
            if other not in self._users:
                ahead.add(other)
        return len(self._numbers) - len(self._users) > len(ahead)

    def take(self, request: Request) -> None:
        number, room = request.adapter, request.room
        if number == NO_ADAPTER or room in self._held:
            return
        self._leave_lines(room)
        self._num_joined += self._is_wanted()
        if number not in self._users:
            for line in self._lines:
                line.pop(number, None)  # they can join
            self._num_joined = 0
        is_new = request.num_output_tokens == 0
        self._num_passed = self._num_passed + 1 if self._new and not is_new else 0
        request.adapter_slot = self._placed(number)
        self._users.setdefault(number, set()).add(room)
        self._held[room] = number

    def end(self, room: int) -> None:
        number = self._held.pop(room, None)
        if number is None:
            if self._users or any(self._lines):
                self._leave_lines(room)
            return
        self._users[number].discard(room)
        if not self._users[number]:
            del self._users[number]
            self._clock += 1
            self._last_use[self._slots[number]] = self._clock

    def reason(self, request: Request, rank: Rank | None = None) -> Reason:
        number, rank = request.adapter, rank_of(request) if rank is None else rank
        return self._reasons.setdefault((number, rank), WaitForSlot(self, number, rank))

    def reason_for_import(self, request: Request) -> Reason | None:
        return self._for_new if request.adapter != NO_ADAPTER and self.is_overdue else None

    def runnable(self, requests: list[Request]) -> list[Request]:
        if all(request.adapter == NO_ADAPTER or request.room in self._held for request in requests):
            return requests
        return [request for request in requests if self._takes(request)]

    def _takes(self, request: Request) -> bool:
        if not self.may_take(request):
            return False
        self.take(request)
        return True

    def offer(self, number: int) -> None:
        """The adapter is loaded: it gets a slot if one is empty, so that its first request has not to wait for it."""
        if NO_ADAPTER in self._numbers:
            self._placed(number)

    def forget(self, number: int) -> int | None:
        """The adapter is unloaded: nobody has it, and another may get its number. Return the slot that it was in."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._numbers[slot], self._last_use[slot] = NO_ADAPTER, 0
        return slot

    def place_again(self) -> None:
        """Bring all adapters that have a slot into it: the model is another one."""
        for number, slot in self._slots.items():
            self._place(number, slot)

    def check(self) -> None:
        """Assert what always holds."""
        assert {n: s for s, n in enumerate(self._numbers) if n != NO_ADAPTER} == self._slots
        assert self._users.keys() <= self._slots.keys()
        assert {room: n for n, rooms in self._users.items() for room in rooms} == self._held
        assert all(rooms for line in self._lines for rooms in line.values())
        assert not self._held.keys() & {room for line in self._lines for rooms in line.values() for room in rooms}

    def _placed(self, number: int) -> int:
        slot = self._slots.get(number)
        if slot is not None:
            return slot
        free = (slot for slot, other in enumerate(self._numbers) if other not in self._users)
        slot = min(free, key=lambda slot: (self._numbers[slot] != NO_ADAPTER, self._last_use[slot]))
        self._slots.pop(self._numbers[slot], None)
        self._numbers[slot], self._slots[number] = number, slot
        self._place(number, slot)
        self.num_placed += 1
        return slot

    def _is_wanted(self, rank: Rank = Rank.ALONE) -> bool:
        """Whether an adapter waits for a slot, in the lines up to that of `rank`."""
        return any(number not in self._users for number in chain(*self._lines[: rank + 1]))

    def _leave_lines(self, room: int) -> None:
        for line in filter(None, self._lines):
            for number in [number for number, rooms in line.items() if room in rooms]:
                line[number].discard(room)
                if not line[number]:
                    del line[number]
        if not self._is_wanted():
            self._num_joined = 0
