"""Games of workers that do both, whatever their models keep of a request: each returns the prompts by room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.common.members.roles import LegKind, Role
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.values.events import AbortRoom

Fleet = Any  # of a fixture's class: `tests/unified/conftest.py`
Prompts = dict[int, list[int]]


def grant_to_each_other(fleet: Fleet) -> Prompts:
    """Two workers grant all that they can before any prompt comes, to prompts of which two are as long as can be.

    Each output has two tokens.
    """
    longest = fleet.workers[1].core.max_tokens - 2
    prompts = {room: [room] * (longest if room <= 2 else 4) for room in range(1, 15)}
    pairs = {room: (1, 2) if room % 2 else (2, 1) for room in prompts}
    for room, (prefill, decode) in pairs.items():
        fleet.start_leg(decode, room, prompts[room], LegKind.DECODE, prefill, 2)
    for number in (1, 2):
        fleet.deliver(number)
    for room, (prefill, decode) in pairs.items():
        fleet.start_leg(prefill, room, prompts[room], LegKind.PREFILL, decode, 2)
    fleet.run()
    return prompts


def change_roles(fleet: Fleet, prompt: list[int], order: tuple[Role, Role], num_moves: int) -> Prompts:
    """Two workers get other roles while they serve, and serve on when they do both again."""
    prompts = {room: [*prompt, room] for room in range(1, 6)}
    for room in (1, 2, 3, 4):
        fleet.start(room, prompts[room], 1 + room % 2, 2 - room // 2 % 2)
    for _ in range(num_moves):
        fleet.advance(1)
        fleet.advance(2)
    for number, role in zip((1, 2), order, strict=True):
        fleet.serve(number, role)
    fleet.run()
    for number in (1, 2):
        fleet.serve(number, Role.UNIFIED)
    fleet.start(5, prompts[5], 2, 1)
    fleet.run()
    return prompts


def give_up_a_step(
    fleet: Fleet, prompt: list[int], pair: tuple[int, int], num_moves: int, half_of: Callable[[Any], Any]
) -> Prompts:
    """A step of the first worker is run to its half by `half_of` it, and its requests leave; others begin alike."""
    parting = [*prompt[:13], 5, 5, 5]
    fleet.start(7, parting, *pair)  # so that something is cached
    fleet.run()
    fleet.start(1, prompt, *pair)
    for _ in range(num_moves):
        fleet.advance(1)
        fleet.advance(2)
    worker = fleet.workers[1]
    half = half_of(worker)
    stepping, worker.stepping = worker.stepping, SynchronousStepping(worker.core, half, lambda: 0.0)
    fleet.advance(1)
    worker.stepping = stepping
    for room in half.rooms:
        worker.core.handle(AbortRoom(room, "the client left"), 0.0)
    fleet.run()
    prompts = {2: prompt, 3: [*prompt, 6], 4: [*parting, 1]}
    for room, other in prompts.items():
        fleet.start(room, other, *pair)
        fleet.run()
    return prompts
