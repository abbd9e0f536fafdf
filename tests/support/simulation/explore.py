"""Breadth first through every state that a small world can reach, so that a trace found is a shortest one."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.rules import RuleBroken, require
from simulation.two_sides import TwoSides

MAX_STATES = 200_000


@dataclass(slots=True)
class Graph:
    """States by number, in the order in which they were found."""

    came_from: list[tuple[int, str]] = field(default_factory=lambda: [(-1, "")])  # state and what happened in it
    before: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    at_rest: set[int] = field(default_factory=set)

    def trace(self, state: int) -> list[str]:
        told: list[str] = []
        while state > 0:
            state, name = self.came_from[state]
            told.append(name)
        return told[::-1]


def explore(world: TwoSides) -> Graph:
    """Visit every reachable state; raise `RuleBroken` with the shortest way to one that breaks a rule.

    From each state one must be reachable in which everything has ended and nothing is held.
    """
    graph = Graph()
    saved = world.save()
    numbers = {_key(saved): 0}
    frontier = deque([(0, saved)])
    while frontier:
        state, saved = frontier.popleft()
        _visit(graph, state, TwoSides.load(saved))
        for name, after in _successors(graph, state, saved):
            number = numbers.setdefault(_key(after), len(numbers))
            if number == len(graph.came_from):
                graph.came_from.append((state, name))
                frontier.append((number, after))
            graph.before[number].add(state)
        require(len(numbers) <= MAX_STATES, "the world is too large to be explored")
    _check_everything_can_end(graph)
    return graph


def _visit(graph: Graph, state: int, world: TwoSides) -> None:
    with _told(graph, state):
        world.check()
    if world.has_come_to_rest():
        graph.at_rest.add(state)


def _successors(graph: Graph, state: int, saved: bytes) -> Iterator[tuple[str, bytes]]:
    world = TwoSides.load(saved)
    moved = False
    for kind in (TwoSides.progress, TwoSides.choices):
        for index in range(len(list(kind(world)))):
            name, act = list(kind(world))[index]
            with _told(graph, state, name):
                happened = act()
            if happened:  # else the world is as it was
                moved |= kind is TwoSides.progress
                yield name, world.save()
                world = TwoSides.load(saved)
    with _told(graph, state, "time passes"):
        happened = not moved and world.wait()
    if happened:
        yield "time passes", world.save()


@contextmanager
def _told(graph: Graph, state: int, *more: str) -> Iterator[None]:
    """Add to what goes wrong how it came to that."""
    try:
        yield
    except Exception as error:
        raise RuleBroken(_story(repr(error), [*graph.trace(state), *more])) from error


def _check_everything_can_end(graph: Graph) -> None:
    reached = set(graph.at_rest)
    todo = list(reached)
    while todo:
        for earlier in graph.before[todo.pop()] - reached:
            reached.add(earlier)
            todo.append(earlier)
    stuck = [state for state in range(len(graph.came_from)) if state not in reached]
    if stuck:
        raise RuleBroken(_story("from here not everything can come to its end", graph.trace(stuck[0])))


def _story(problem: str, trace: list[str]) -> str:
    return "\n  ".join([problem, *trace])


def _key(saved: bytes) -> bytes:
    return hashlib.blake2b(saved, digest_size=16).digest()
