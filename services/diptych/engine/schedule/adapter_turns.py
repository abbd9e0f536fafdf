"""Which adapters are in the model's slots: there may be more adapters than slots, and requests wait for theirs.

A request takes its adapter's slot when it is admitted, or goes on here with KV that came, and gives it back when it
ends, is retracted, or has nothing more to compute. So who holds a slot is computed, and waits for nobody. A slot that
nobody holds keeps its adapter until another one needs it: the one that was used last the longest ago goes first.

Rule: nobody starves. Adapters without a slot get one in the order in which they were first wanted, and while any wait,
at most `PATIENCE` requests join those that are in use: then these run out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.values.request import Request

PATIENCE: Final = 64  # requests
NEVER: Final = float("inf")


Place = Callable[[int, int], None]  # brings adapter `number` into `slot`, for the steps launched from now on


def nobody(number: int, slot: int) -> None:
    """Implements `Place` where there is no model."""


class Turns(Protocol):
    """Who may be computed, as far as adapters go."""

    def take(self, request: Request) -> bool:
        """Give a request its adapter's slot, unless it has it; False: it waits."""
        ...

    def end(self, room: int) -> None:
        """Take back what a request has, or waits for. Idempotent."""
        ...

    def runnable(self, requests: list[Request]) -> list[Request]:
        """Return those that have their slot, or take it now."""
        ...

    def reason(self, request: Request) -> WaitForSlot:
        """Return why a request waits that could not take its slot."""
        ...


class EnoughSlots:
    """Implements `Turns` where each adapter has a slot of its own: that of its number."""

    def take(self, request: Request) -> bool:
        return True

    def end(self, room: int) -> None:
        pass

    def runnable(self, requests: list[Request]) -> list[Request]:
        return requests

    def reason(self, request: Request) -> WaitForSlot:
        raise AssertionError("nobody waits")


ENOUGH_SLOTS: Final = EnoughSlots()


@dataclass(frozen=True, slots=True)
class WaitForSlot:
    """Implements `waiting_queue.Reason`: there is no slot for the request's adapter."""

    turns: AdapterTurns
    number: int
    until_s: float = NEVER

    def is_over(self, now_s: float) -> bool:
        return self.turns.may_take(self.number)


class AdapterTurns:
    """Adapters by number, in slots. One thread uses it: the scheduler's."""

    def __init__(self, num_slots: int, place: Place = nobody) -> None:
        self._place = place
        self._numbers: list[int] = [NO_ADAPTER] * num_slots  # by slot
        self._last_use = [0] * num_slots  # by slot
        self._slots: dict[int, int] = {}  # by number
        self._users: dict[int, set[int]] = {}  # rooms, by number; never empty
        self._held: dict[int, int] = {}  # numbers, by room
        self._line: dict[int, set[int]] = {}  # rooms that wait, by number: in the order in which they were first wanted
        self._num_joined = 0  # requests that joined an adapter in use since somebody waits
        self._clock = 0
        self.num_placed = 0  # in all

    def place_by(self, place: Place) -> None:
        """Have adapters brought into slots by `place`."""
        self._place = place

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(map(len, self._line.values()))

    def take(self, request: Request) -> bool:
        number, room = request.adapter, request.room
        if number == NO_ADAPTER or room in self._held:
            return True
        if not self.may_take(number):
            self._line.setdefault(number, set()).add(room)
            return False
        self._leave_line(room, number)
        if number in self._users:
            self._num_joined += bool(self._line)
        else:
            self._line.pop(number, None)  # they can join
            self._num_joined = 0
        request.adapter_slot = self._placed(number)
        self._users.setdefault(number, set()).add(room)
        self._held[room] = number
        return True

    def may_take(self, number: int) -> bool:
        """Whether a request with this adapter would get a slot now."""
        if number in self._users:
            return not self._line or self._num_joined < PATIENCE
        num_free = len(self._numbers) - len(self._users)
        if not num_free:
            return False
        ahead = 0
        for other in self._line:
            if other == number:
                break
            ahead += other not in self._users
        return num_free > ahead

    def end(self, room: int) -> None:
        number = self._held.pop(room, None)
        if number is None:
            for other in [other for other, rooms in self._line.items() if room in rooms]:
                self._leave_line(room, other)
            return
        self._users[number].discard(room)
        if not self._users[number]:
            del self._users[number]
            self._clock += 1
            self._last_use[self._slots[number]] = self._clock

    def reason(self, request: Request) -> WaitForSlot:
        return WaitForSlot(self, request.adapter)

    def runnable(self, requests: list[Request]) -> list[Request]:
        if all(request.adapter == NO_ADAPTER or request.room in self._held for request in requests):
            return requests
        return [request for request in requests if self.take(request)]

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

    def check(self) -> None:
        """Assert what always holds."""
        assert {n: s for s, n in enumerate(self._numbers) if n != NO_ADAPTER} == self._slots
        assert self._users.keys() <= self._slots.keys()
        assert {room: n for n, rooms in self._users.items() for room in rooms} == self._held
        assert all(self._line.values())

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

    def _leave_line(self, room: int, number: int) -> None:
        rooms = self._line.get(number)
        if rooms is not None:
            rooms.discard(room)
            if not rooms:
                del self._line[number]
