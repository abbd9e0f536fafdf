"""A cluster of prefill and decode workers, a router, and the faults that befall them, a small step at a time.

Every method that does something says whether anything happened. The router does what the real one does: it starts both
legs, and a leg that fails or is lost has the other one aborted. It never gives up by itself: stuck rooms show.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.engine.values.events import AbortRoom, GiveCache, Move, PrefixHolder, ServeRole, ToolCalled
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import FailureCode, Output
from diptych.kvtransfer.inproc import FaultPlan
from diptych.unified.reserve import max_tokens
from simulation.network import WatchedNetwork
from simulation.requests import LAYERS, PAGE, Attempt, Leg, new_attempt, random_prompt
from simulation.rules import Rules
from simulation.worker import CONTEXT, Members, Worker

PAIRED = 0.9  # share of attempts; the others are local
RULES = TransferRules(integrity="always")
REPEATED = 0.3  # share of prompts
COMING_BACK, NUM_KNOWN = 0.6, 24
LONGEST = 24  # prompt, as `random_prompt` makes them: those of moved requests are longer
FORGETTING = 0.6  # share of them for which who asks has nothing of it
NAMED = 0.8  # share of prompts of which somebody is said to have a prefix, and of those who may
SETTLE_S = 5.0  # after the last fault a room may stay open that long
EXPLAINED_S = 3.0  # after a link broke and came back, rooms may still fail by it


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of."""

    roles: tuple[str, ...] = ("prefill", "prefill", "decode", "decode")
    is_unified: bool = False  # every worker has both cores, and its role may change
    prefill_pages: int = 24
    decode_pages: int = 24
    max_step_tokens: int = 8
    step_cost: int = 0  # how much of its prefix another one must be about to bring for a prompt to wait
    overlap: bool = False
    max_ops: int = 4096  # of a transport
    rules: TransferRules = RULES
    pages_per_state: int = 0  # 0: no layer is recurrent
    windows: WindowPages = NO_WINDOWS  # of layers that have pages of their own
    num_host_slots: int = 0  # of a host tier, which takes its time; 0: there is none
    page_sizes: tuple[int, int] = (PAGE, PAGE)  # of prefill workers, and of all others; unified ones take turns
    is_lossy: bool = False  # notes may be lost, doubled and late while their link is up


class Cluster:
    """Workers by place: a restarted one has a new instance id at the same place."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape = shape
        self.rng = rng
        self.now_s = 0.0
        self.workers: dict[int, Worker] = {}  # all that ever lived, by instance id
        self.attempts: dict[int, Attempt] = {}
        self.open_rooms: list[int] = []
        self.places: list[int] = []  # instance ids that live
        self.rules = Rules(self.workers, self.attempts, is_lossy=shape.is_lossy)
        self.network = WatchedNetwork(rng, self.rules)
        self.late_starts: list[Leg] = []  # still with the router
        self.moving: dict[int, tuple[Attempt, int]] = {}  # asked to go to a worker, by new room, until that is answered
        self.num_moved = 0
        self._num_rooms = 0
        self._disturbed_s: dict[frozenset[int], float] = {}
        for role in shape.roles:
            self.places.append(self._new_worker(role))
        self._announce_members()
        self._disturb_everybody()

    # requests

    def start(self, deadline_s: float | None, hold_back: bool) -> bool:
        """Start an attempt on a random pair, or all of it on one worker; with `hold_back` a leg comes later."""
        alone = self._alone() if self.rng.random() >= PAIRED else []
        prefill, decode = self.rng.choice(alone or self._pairs())
        attempt = new_attempt(
            self._new_room(),
            self._prompt(),
            self.rng.choice([1, 2, 3, 8, 20]),
            prefill=prefill,
            decode=decode,
            deadline_s=deadline_s and self.now_s + deadline_s,
            priority=self.rng.choice([0, 0, 1, -1]),
            num_state_cells=self.shape.pages_per_state * LAYERS * PAGE,
            windows=self.shape.windows,
        )
        self._open(attempt)
        self._name_holder(attempt)
        legs = list(attempt.legs)
        self.rng.shuffle(legs)
        if hold_back:
            self.late_starts.append(legs.pop())
            attempt.excuses.add("abort")  # a grant that waits too long
        for leg in legs:
            self._send_start(leg)
        return True

    def _name_holder(self, attempt: Attempt) -> None:
        """Say that somebody has the prompt's prefix: as a rule who has most of it; or who has nothing, or is gone."""
        if not self.shape.rules.pulls or self.rng.random() > NAMED:
            return
        tokens, asking = np.array(attempt.prompt), self.workers[attempt.legs[0].worker]
        if self.rng.random() < FORGETTING:
            asking.cache.clear()  # as if others had taken the place
        holders = [worker for worker in self.workers.values() if worker is not asking]
        if self.rng.random() < NAMED:
            holders = [max(holders, key=lambda worker: worker.cache.tree.peek(tokens))]
        num_tokens = len(tokens) + self.rng.choice([0, 0, 9, -PAGE])
        attempt.legs[0].holder = PrefixHolder(self.rng.choice(holders).instance_id, num_tokens)

    def _new_room(self) -> int:
        self._num_rooms += 1
        return self._num_rooms

    def _open(self, attempt: Attempt) -> None:
        self.attempts[attempt.room] = attempt
        self.open_rooms.append(attempt.room)
        workers = [leg.worker for leg in attempt.legs]
        attempt.excuses |= {"deadline"} if attempt.decode.request.life.deadline_s < math.inf else set()
        attempt.excuses |= {"operation failed"} if self.network.faults.fail_op else set()
        attempt.excuses |= {"slow"} if self.shape.rules.timeout_s < 1.0 else set()
        attempt.excuses |= {"corrupted"} if self.network.faults.corrupt_page else set()
        attempt.excuses |= {"link"} if len(workers) == 2 and self._is_disturbed(*workers) else set()

    def move(self) -> bool:
        """The router asks a worker to give a request that runs to another one."""
        choices = [(each, new) for each, targets in self._may_move().items() for new in targets]
        if choices:
            self._ask_to_move(*self.rng.choice(choices))
        return bool(choices)

    def vacate(self) -> bool:
        """The router asks a worker to give all of its requests that run to others."""
        place = self.rng.choice(self.places)
        leaving = [(each, targets) for each, targets in self._may_move().items() if each.decode.worker == place]
        for attempt, targets in leaving:
            self._ask_to_move(attempt, self.rng.choice(targets))
        return bool(leaving)

    def leave(self) -> bool:
        """A worker leaves, and lets its peers have what it has cached; or it runs out of time for that."""
        worker = self.workers[self.rng.choice(self.places)]
        worker.commands.append(GiveCache(self.rng.choice([0.0, 0.05, 1.0, 1.0])))
        return True

    def call(self) -> bool:
        """A router says that an output has called a tool; it may be long over, or not yet."""
        if not self.attempts:
            return False
        room = self.rng.choice(list(self.attempts)[-NUM_KNOWN:])
        for leg in self.attempts[room].legs:
            self.workers[leg.worker].commands.append(ToolCalled(room, "a tool"))
        return True

    def _may_move(self) -> dict[Attempt, list[int]]:
        """Return the requests that run, and where each may go."""
        asked = [attempt for attempt, _ in self.moving.values()]
        running = [self.attempts[room] for room in self.open_rooms]
        may = [each for each in running if each.heard and each.decode.end is None and each not in asked]
        roles = {worker.instance_id: Role(worker.role) for worker in self.living()}
        targets = {
            old: [new for new, theirs in roles.items() if new != old and ours.hands_on_to(theirs)]
            for old, ours in roles.items()
        }
        return {each: found for each in may if (found := targets.get(each.decode.worker))}

    def _ask_to_move(self, attempt: Attempt, new: int) -> None:
        room, old = self._new_room(), attempt.decode.worker
        self.moving[room] = attempt, new
        self.workers[old].commands.append(Move(room, attempt.room, new))

    def _on_move(self, room: int, output: Output) -> None:
        """A request that was asked to move stands still, and goes on at its new worker; or it does not move."""
        attempt, new = self.moving.pop(room)
        if output.failure is not None:
            return
        self.rules.stands_still(attempt, output)
        known, request = attempt.heard[:-1], attempt.decode.request
        has_deadline = request.life.deadline_s < math.inf
        moved = new_attempt(
            room,
            [*attempt.prompt, *known],
            len(attempt.output) - len(known),
            prefill=attempt.decode.worker,
            decode=new,
            deadline_s=request.life.deadline_s if has_deadline else None,
            priority=request.account.priority,
            windows=self.shape.windows,
        )
        self._open(moved)
        moved.excuses |= attempt.excuses | {"no pages"}
        target = self.workers[new]
        if len(moved.prompt) >= max_tokens(Role(target.role), CONTEXT, target.cache):
            moved.excuses.add("too long")  # where prompts of others have half of the memory
        attempt.moved_to = moved
        assert moved.prefill is not None
        moved.prefill.outputs.append(output)
        self._send_start(moved.decode)
        if attempt.decode.end is not None or attempt.decode.was_aborted:
            for leg in moved.legs:
                self._abort(moved, leg)

    def _keep_one(self, attempt: Attempt, leg: Leg, output: Output) -> None:
        """A request is at two workers: whoever gives the next token first keeps it."""
        if not output.token_ids or leg is not attempt.decode:
            return
        former = [each for each in self.attempts.values() if each.moved_to is attempt and each.decode.end is None]
        other = attempt.moved_to if attempt.moved_to in [self.attempts[room] for room in self.open_rooms] else None
        for loser in [*former, *([other] if other is not None else [])]:
            for each in loser.legs:
                self._abort(loser, each)

    def _prompt(self) -> Sequence[int]:
        """Some are asked twice at once; with a host tier many come back when others have taken their pages."""
        comes_back = self.shape.num_host_slots or self.shape.rules.pulls
        if comes_back and self.attempts and self.rng.random() < COMING_BACK:
            return self.attempts[self.rng.choice(list(self.attempts)[-NUM_KNOWN:])].prompt[:LONGEST]
        recent = self.open_rooms[-3:]
        if recent and self.rng.random() < REPEATED:
            return self.attempts[self.rng.choice(recent)].prompt[:LONGEST]
        return random_prompt(self.rng)

    def start_late(self) -> bool:
        """The router gets round to a leg that it held back."""
        if not self.late_starts:
            return False
        leg = self.late_starts.pop(self.rng.randrange(len(self.late_starts)))
        if leg.was_aborted:
            leg.end = "never started"
            self._settle(self.attempts[leg.request.room])
        else:
            self._send_start(leg)
        return True

    def abort(self) -> bool:
        """A client leaves."""
        if not self.open_rooms:
            return False
        attempt = self.attempts[self.rng.choice(self.open_rooms)]
        for leg in self.rng.sample(attempt.legs, len(attempt.legs)):
            self._abort(attempt, leg)
        return True

    def route(self, worker: Worker) -> bool:
        """The router hears one output of a worker."""
        if not worker.outputs:
            return False
        output = worker.outputs.popleft()
        if output.room in self.moving:
            self._on_move(output.room, output)
            return True
        if output.room not in self.attempts:
            return True  # of a move whose asker has forgotten it
        attempt = self.attempts[output.room]
        leg = attempt.leg_at(worker.instance_id)
        self.rules.answered(attempt, leg, output)
        leg.outputs.append(output)
        self._keep_one(attempt, leg, output)
        if output.failure is not None and output.failure.code is FailureCode.HANDED_BACK:
            self.rules.let_go(attempt)
            self.num_moved += 1
        if output.finish or output.failure:
            leg.end = output
            self._settle(attempt)
        return True

    # workers

    def receive(self, worker: Worker) -> bool:
        return not worker.is_frozen and worker.receive(self.rng.randrange(4))

    def step(self, worker: Worker) -> bool:
        return not worker.is_frozen and worker.step()

    def copy(self, worker: Worker) -> bool:
        """A device ends one of its copies."""
        return worker.copier.advance()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.network.now_s = self.now_s

    def living(self) -> Iterator[Worker]:
        return (self.workers[instance] for instance in self.places)

    # faults

    def cut(self) -> bool:
        """Both ends lose the link, at once."""
        prefill, decode = self._any_pair()
        self._disturb(prefill, decode)
        self.network.cut(prefill, decode)
        return True

    def lose_one_end(self) -> bool:
        pair = self._any_pair()
        self._disturb(*pair)
        return self.network.lose_one_end(*self.rng.sample(pair, 2))

    def freeze(self) -> bool:
        """Stop a worker: its loop and its transport."""
        worker = self.workers[self.rng.choice(self.places)]
        worker.is_frozen = True
        self.network.frozen.add(worker.instance_id)
        self._disturb_all(worker.instance_id)
        return True

    def thaw(self) -> bool:
        """Everybody goes on."""
        frozen = [worker for worker in self.living() if worker.is_frozen]
        for worker in frozen:
            worker.is_frozen = False
            self._disturb_all(worker.instance_id)
        self.network.frozen.clear()
        return bool(frozen)

    def restart(self) -> bool:
        """Kill a worker and start another at its place; what it said last may or may not be heard."""
        place = self.rng.randrange(len(self.places))
        instance = self.places[place]
        victim = self.workers[instance]
        self._disturb_all(instance)
        self.network.kill(instance)
        self.network.frozen.discard(instance)
        victim.outputs = deque(list(victim.outputs)[: self.rng.randrange(len(victim.outputs) + 1)])
        while self.route(victim):
            pass
        self.places[place] = self._new_worker(victim.role)
        self._announce_members()
        self._disturb_everybody()
        self._lose_legs(instance)
        return True

    def change_role(self) -> bool:
        """A worker without requests serves another role from now on, and may serve requests of it at once."""
        worker = self.workers[self.rng.choice(self.places)]
        legs = [leg for room in self.open_rooms for leg in self.attempts[room].legs]
        targets = [target for _, target in self.moving.values()]
        if worker.instance_id in targets or any(leg.worker == worker.instance_id for leg in legs):
            return False
        former, worker.role = worker.role, self.rng.choice([role.value for role in WORKER_ROLES.values()])
        if worker.role == former or not self._pairs():
            worker.role = former
            return False
        worker.commands.append(ServeRole(Role(worker.role)))
        self._disturb_all(worker.instance_id)
        self._announce_members()
        return True

    def forget_member(self) -> bool:
        """Membership loses a worker at one place only, for a moment: its links there are closed and come back."""
        worker = self.workers[self.rng.choice(self.places)]
        if not self._peers_of(worker):
            return False
        peer = self.rng.choice(self._peers_of(worker))
        self._disturb(worker.instance_id, peer)
        metadata = self._metadata(self._peers_of(worker))
        worker.commands += [Members({key: metadata[key] for key in metadata if key != peer}), Members(metadata)]
        return True

    def set_faults(self, faults: FaultPlan) -> None:
        self.network.faults = faults

    # rest

    def settle(self) -> None:
        """Let everything come to its end without further faults; every room must, and every page must come back."""
        self.set_faults(FaultPlan())
        self.thaw()
        for worker in self.living():
            worker.stay()
        while self.start_late():
            pass
        until_s = self.now_s + SETTLE_S
        while self._advance_all() or self._pass_time(until_s):
            pass
        self.rules.check_all_ended([self.attempts[room] for room in self.open_rooms])
        for worker in self.living():
            self.rules.check_clean(worker)

    # private

    def _advance_all(self) -> bool:
        moved = False
        for worker in self.living():
            moved |= worker.receive(len(worker.commands))
            moved |= worker.step()
            moved |= self.copy(worker)
            while self.route(worker):
                moved = True
        while self.network.step():
            moved = True
        return moved

    def _pass_time(self, until_s: float) -> bool:
        times = [at_s for worker in self.living() if (at_s := worker.next_due_s()) is not None]
        times += [self.now_s + 0.2] if any(worker.core.suspects() for worker in self.living()) else []
        if not times or self.now_s >= until_s:
            return False
        self.pass_time(min(max(self.now_s, *times), until_s) - self.now_s)
        return True

    def _settle(self, attempt: Attempt) -> None:
        """What the router does when a leg has ended."""
        if attempt.has_ended:
            self.open_rooms.remove(attempt.room)
            self.rules.ended(attempt)
        elif any(leg.end is not None and not leg.has_finished for leg in attempt.legs):
            for leg in attempt.legs:
                self._abort(attempt, leg)

    def _abort(self, attempt: Attempt, leg: Leg) -> None:
        attempt.excuses.add("abort")
        if leg.end is None and not leg.was_aborted:
            leg.was_aborted = True
            if leg not in self.late_starts:
                self.workers[leg.worker].commands.append(AbortRoom(attempt.room, "the router"))

    def _send_start(self, leg: Leg) -> None:
        if leg.worker in self.places:
            self.workers[leg.worker].commands.append(self.attempts[leg.request.room].start(leg))
        else:
            leg.end = "its worker died"
            self._settle(self.attempts[leg.request.room])

    def _lose_legs(self, instance: int) -> None:
        self.moving = {room: move for room, move in self.moving.items() if move[0].decode.worker != instance}
        for attempt in [self.attempts[room] for room in self.open_rooms]:
            for leg in attempt.legs:
                if leg.worker == instance and leg.end is None and leg not in self.late_starts:
                    leg.end = "its worker died"
                    self._settle(attempt)

    def _new_worker(self, role: str) -> int:
        instance = len(self.workers) + 1
        shape = self.shape
        num_pages = (shape.prefill_pages, shape.decode_pages)[role != "prefill"]
        size = shape.page_sizes[instance % 2 if shape.is_unified else role != "prefill"]
        self.workers[instance] = Worker(
            role,
            instance,
            self.network,
            self.rules,
            lambda: self.now_s,
            meanwhile=self._meanwhile,
            num_pages=num_pages if size == PAGE else _as_many_tokens(num_pages, size, shape.windows.num_groups),
            page_size=size,
            is_unified=shape.is_unified,
            max_step_tokens=shape.max_step_tokens,
            step_cost=shape.step_cost,
            overlap=shape.overlap,
            max_ops=shape.max_ops,
            rules=shape.rules,
            pages_per_state=shape.pages_per_state,
            windows=shape.windows,
            num_host_slots=shape.num_host_slots,
            rng=self.rng,
        )
        return instance

    def _meanwhile(self) -> None:
        """Transports work while a step runs."""
        for _ in range(self.rng.randrange(3)):
            self.network.step()

    def _announce_members(self) -> None:
        for worker in self.living():
            worker.commands.append(Members(self._metadata(self._peers_of(worker))))

    def _metadata(self, instances: list[int]) -> dict[int, bytes]:
        return {instance: self.workers[instance].transport.metadata() for instance in instances}

    def _pairs(self) -> list[tuple[int, int]]:
        """Return who may prefill and decode for each other."""
        workers = [(worker.instance_id, Role(worker.role)) for worker in self.living()]
        return [(one, two) for one, ours in workers for two, theirs in workers if one != two and ours.sends_to(theirs)]

    def _alone(self) -> list[tuple[None, int]]:
        """Return who may serve a whole request. A decode core can, where no other core shares its memory."""
        role = "unified" if self.shape.is_unified else "decode"
        return [(None, worker.instance_id) for worker in self.living() if worker.role == role]

    def _peers_of(self, worker: Worker) -> list[int]:
        ours = Role(worker.role)
        others = [other for other in self.living() if other is not worker]
        return [other.instance_id for other in others if ours.links_with(Role(other.role))]

    def _any_pair(self) -> tuple[int, int]:
        return self.rng.choice(self._pairs())

    def _disturb(self, one: int, other: int) -> None:
        """Remember that rooms of this pair may fail now."""
        self._disturbed_s[frozenset((one, other))] = self.now_s
        for attempt in [self.attempts[room] for room in self.open_rooms]:
            if {one, other} == {leg.worker for leg in attempt.legs}:
                attempt.excuses.add("link")

    def _disturb_everybody(self) -> None:
        for worker in self.living():
            self._disturb_all(worker.instance_id)

    def _disturb_all(self, instance: int) -> None:
        for peer in self.workers:
            self._disturb(instance, peer)

    def _is_disturbed(self, prefill: int, decode: int) -> bool:
        at_s = self._disturbed_s.get(frozenset((prefill, decode)))
        is_frozen = any(self.workers[instance].is_frozen for instance in (prefill, decode))
        is_up = self.rules.is_up(prefill, decode)
        return is_frozen or not is_up or (at_s is not None and self.now_s < at_s + EXPLAINED_S)


def _as_many_tokens(num_pages: int, page_size: int, num_groups: int) -> int:
    """Return how many pages of a size have room for as many tokens as so many have that are as large as usual."""
    return num_pages * PAGE // page_size + 6 * (1 + num_groups)
