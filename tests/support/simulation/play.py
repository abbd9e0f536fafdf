"""Random moves from a seed: the same seed plays the same game."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diptych.engine.values.transfer_rules import Integrity, TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.kvtransfer.inproc import FaultPlan
from diptych.kvtransfer.inproc.network import NO_FAULTS
from simulation.cluster import Cluster, Shape
from simulation.requests import LAYERS, PAGE
from simulation.rules import RuleBroken
from simulation.worker import Worker

CHECK_EVERY = 25  # moves
SETTLE_EVERY = 700
NUM_TOLD = 40
DAMAGE = 0.06  # of a page that is copied, where few are pulled and some shall arrive damaged
NUM_STATES = 3  # beside the longest requests


@dataclass(frozen=True, slots=True)
class Mood:
    """How rough a game is: how often, of a thousand moves, each fault strikes."""

    name: str
    faults: FaultPlan = NO_FAULTS
    aborts: float = 2.0
    deadlines: float = 0.0  # share of requests
    cuts: float = 0.0
    half_cuts: float = 0.0
    freezes: float = 0.0
    restarts: float = 0.0
    flaps: float = 0.0  # of membership
    late_legs: float = 0.05  # share of requests
    moves: float = 40.0  # of running requests, where workers are unified
    slow: bool = False  # writes and answers may take longer than they are allowed
    is_lossy: bool = False


LOSSY = FaultPlan(drop_note=0.03, duplicate_note=0.1, delay_note=0.1)
MOODS: Sequence[Mood] = (
    Mood("calm", aborts=0.0),
    Mood("aborted", aborts=10.0, deadlines=0.2, late_legs=0.2),
    Mood("cut", cuts=0.7, half_cuts=0.7, flaps=0.3),
    Mood("dying", restarts=1.0, cuts=0.5),
    Mood("stopped", freezes=4.0, half_cuts=3.0, restarts=0.5),
    Mood("failing", faults=FaultPlan(fail_op=0.02, corrupt_page=0.01), cuts=0.5),
    Mood("slow", freezes=1.0, aborts=5.0, moves=0.0, slow=True),
    Mood("lossy", faults=LOSSY, deadlines=1.0, is_lossy=True),
    Mood(
        "everything",
        FaultPlan(0.01, 0.05, 0.05, 0.005, 0.005),
        aborts=5.0,
        deadlines=1.0,
        cuts=0.4,
        half_cuts=0.4,
        freezes=1.0,
        restarts=0.3,
        flaps=0.2,
        slow=True,
        is_lossy=True,
    ),
)


def seeded(
    seed: int,
    pages_per_state: int = 0,
    windows: WindowPages = NO_WINDOWS,
    num_host_slots: int = 0,
    *,
    pulls: bool = False,
    page_sizes: tuple[int, int] = (PAGE, PAGE),
) -> Game:
    """Return the game of a seed, which also chooses the mood and the kind of workers: unified ones where they pull."""
    number, mood = divmod(seed, len(MOODS))
    is_unified, rng = pulls or number % 2 == 1, random.Random(seed)
    beside: dict[str, Any] = {"pages_per_state": pages_per_state, "windows": windows, "num_host_slots": num_host_slots}
    beside |= {"pulls": pulls, "page_sizes": page_sizes}
    return Game(rng, MOODS[mood], f"seed {seed}", is_unified=is_unified, **beside)


class Game:
    """One cluster in one mood. `name` says how to play it again."""

    def __init__(
        self,
        rng: random.Random,
        mood: Mood,
        name: str,
        *,
        is_unified: bool = False,
        pages_per_state: int = 0,
        windows: WindowPages = NO_WINDOWS,
        num_host_slots: int = 0,
        pulls: bool = False,
        page_sizes: tuple[int, int] = (PAGE, PAGE),
    ) -> None:
        self.rng = rng
        self.pulls = pulls  # prefixes, from whoever is said to have them
        damage = DAMAGE if pulls and mood.faults.corrupt_page else mood.faults.corrupt_page
        self.mood = replace(mood, faults=replace(mood.faults, corrupt_page=damage))
        self.name = name
        sizes = (12, 14, 16) if num_host_slots and not pulls else (16, 24, 40)  # what does not fit goes down
        self.shape = Shape(
            roles=self._roles(is_unified),
            is_unified=is_unified,
            prefill_pages=rng.choice(sizes) * (1 + windows.num_groups) + NUM_STATES * pages_per_state,
            decode_pages=rng.choice(sizes) * (1 + windows.num_groups) + NUM_STATES * pages_per_state,
            max_step_tokens=rng.choice([4, 8, 64]),
            step_cost=rng.choice([0, 12, 1000]),
            overlap=rng.random() < 0.5,
            max_ops=rng.choice([2, 4096]),
            is_lossy=mood.is_lossy,
            pages_per_state=pages_per_state,
            windows=windows,
            num_host_slots=num_host_slots,
            page_sizes=page_sizes,
            rules=self._rules(most_windows=1 if windows.num_groups else LAYERS),
        )
        self.cluster = Cluster(self.shape, rng)
        self.num_moves = 0
        self._told: list[str] = []
        self._moves, self._weights = self._all_moves()

    def run(self, num_moves: int) -> None:
        """Play; raise `RuleBroken` with the story."""
        try:
            while self.num_moves < num_moves:
                self._round(min(SETTLE_EVERY, num_moves - self.num_moves))
        except Exception as error:
            story = "\n  ".join(self._told[-NUM_TOLD:])
            raise RuleBroken(
                f"{error!r}\n{self.name}: {self.mood.name}, {self.shape}, move {self.num_moves}:\n  {story}"
            ) from error

    def _roles(self, is_unified: bool) -> tuple[str, ...]:
        if is_unified:
            return self.rng.choice([("unified",) * 2, ("unified",) * 3, ("prefill", "decode", "decode")])
        return ("prefill",) * self.rng.choice([1, 2]) + ("decode",) * self.rng.choice([1, 2])

    def _rules(self, most_windows: int) -> TransferRules:
        """`most_windows`: ranges of layers that are sent one after the other."""
        modes: list[Integrity] = ["always"] if self.mood.faults.corrupt_page else ["always", "always", "sampled", "off"]
        timeout_s = self.rng.choice([0.5, 30.0]) if self.mood.slow else 30.0
        num_windows = self.rng.choice([1, most_windows])
        return TransferRules(self.rng.choice(modes), timeout_s, num_windows, self.pulls)

    def _round(self, num_moves: int) -> None:
        """Moves until the next rest."""
        self.cluster.set_faults(self.mood.faults)
        end = self.num_moves + num_moves
        while self.num_moves < end:
            self._move()
            if self.num_moves % CHECK_EVERY == 0:
                self.cluster.rules.check_books(self.rng.choice(list(self.cluster.living())))
        self._told.append("settle")
        self.cluster.settle()
        if not self.mood.faults.corrupt_page:
            self.cluster.rules.check_pulls()

    def _move(self) -> None:
        self.cluster.pass_time(0.001)
        (name,) = self.rng.choices(self._moves, self._weights)
        worker = self.cluster.workers[self.rng.choice(self.cluster.places)]
        self._told.append(f"{name} {worker.role} {worker.instance_id}" if name in _OF_WORKERS else name)
        del self._told[:-NUM_TOLD]
        if self._play(name, worker):
            self.num_moves += 1
        else:
            self._told.pop()

    def _all_moves(self) -> tuple[list[str], list[float]]:
        mood = self.mood
        weights = {
            "network": 400.0,
            "receive": 250.0,
            "step": 200.0,
            "route": 100.0,
            "copy": 60.0 * (self.shape.num_host_slots > 0),
            "start": 30.0,
            "move": mood.moves * self.shape.is_unified * (not self.shape.pages_per_state),
            "vacate": mood.moves / 20 * self.shape.is_unified * (not self.shape.pages_per_state),
            "leave": 1.0 * self.pulls,
            "call": 20.0 * self.pulls,
            "start_late": 10.0 * mood.late_legs,
            "wait": 2.0,
            "abort": mood.aborts,
            "cut": mood.cuts,
            "lose_one_end": mood.half_cuts,
            "freeze": mood.freezes,
            "thaw": 5.0 * mood.freezes,
            "restart": mood.restarts,
            "forget_member": mood.flaps,
            "change_role": 2.0 * self.shape.is_unified,
        }
        names = [name for name, weight in weights.items() if weight]
        return names, [weights[name] for name in names]

    def _play(self, name: str, worker: Worker) -> bool:
        cluster, rng = self.cluster, self.rng
        match name:
            case "network":
                return cluster.network.step()
            case "receive":
                return cluster.receive(worker)
            case "step":
                return cluster.step(worker)
            case "route":
                return cluster.route(worker)
            case "copy":
                return cluster.copy(worker)
            case "start":
                deadline_s = rng.choice([0.05, 1.0, 3.0]) if rng.random() < self.mood.deadlines else None
                return cluster.start(deadline_s, hold_back=rng.random() < self.mood.late_legs)
            case "wait":
                cluster.pass_time(rng.choice([0.1, 0.5, 1.0]))
                return True
            case _:
                move: Callable[[], bool] = getattr(cluster, name)
                return move()


_OF_WORKERS = frozenset({"receive", "step", "route", "copy"})
