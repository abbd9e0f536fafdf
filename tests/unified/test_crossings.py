"""Which outputs say that a room has gone from one worker to another: what the bars of steps are marked with."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.common.members.roles import Role
from diptych.engine.values.events import Crossing, Emit

FleetClass = Any  # the fixture's class: test helpers can't be imported
PROMPT = list(range(20))
HANDED, JOINED = Crossing.HANDED, Crossing.JOINED

Crossings = list[tuple[int, Crossing, int, int]]  # worker, which way, room, index of the output


def crossings(fleet: Any) -> Crossings:
    """Return what will be seen while `fleet` runs."""
    seen: Crossings = []
    perform = fleet._perform

    def look(number: int, worker: Any, effect: object) -> None:
        if isinstance(effect, Emit) and effect.crossing is not None:
            seen.append((number, effect.crossing, effect.output.room, effect.output.first_index))
        perform(number, worker, effect)

    fleet._perform = look
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_a_room_is_handed_with_its_first_token_and_joins_with_its_second(
    fleet_class: FleetClass, overlap: bool
) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE, overlap=overlap)
    seen = crossings(fleet)
    fleet.start(7, PROMPT, 1, 2)
    fleet.run()
    fleet.close()
    assert seen == [(1, HANDED, 7, 0), (2, JOINED, 7, 1)]


def test_a_room_whose_second_token_is_its_last_joins_too(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    seen = crossings(fleet)
    fleet.start(7, PROMPT, 1, 2, max_tokens=2)
    fleet.run()
    assert seen == [(1, HANDED, 7, 0), (2, JOINED, 7, 1)]


def test_a_room_that_ends_with_its_first_token_never_joins(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE)
    seen = crossings(fleet)
    fleet.start(7, PROMPT, 1, 2, max_tokens=1)
    fleet.run()
    assert seen == [(1, HANDED, 7, 0)]


def test_a_request_that_is_served_alone_crosses_nothing(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    seen = crossings(fleet)
    fleet.start(7, PROMPT, 1, 1)
    fleet.start(8, PROMPT, 2, 1)
    fleet.run()
    assert seen == [(2, HANDED, 8, 0), (1, JOINED, 8, 1)]
