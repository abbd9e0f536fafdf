"""The smallest world that has the whole protocol: one prefill core, one decode core, and a link that is data.

The cores are the real ones. The link is modelled as a list of operations each way, so that everything that may happen
to it is one named action: pages land, a note arrives, a completion is heard, an end is lost, a note comes twice. A
world can be saved and loaded; what happens next depends on nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from diptych.engine.values.batch import Runner
from diptych.engine.values.events import (
    AbortRoom,
    CompileGrammar,
    DigestPages,
    Emit,
    EmitTokens,
    Event,
    NoteArrived,
    PagesDigested,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    SendNote,
    StreamPages,
    Transfer,
    UnpackPages,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import Output
from diptych.kvtransfer.digest import add_digests
from simulation.layered_runner import LayeredRunner
from simulation.pools import Shape, StatesOfRanks, all_parts
from simulation.requests import LAYERS, PAGE, Attempt, Leg, new_attempt
from simulation.rules import Rules, require
from simulation.sides import DECODE, PREFILL, Operation, Side, new_side
from simulation.worker import new_calculator

MAX_WAITS = 40  # as many times as time may pass

Action = tuple[str, Callable[[], bool]]  # what happens; False: nothing did


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each thing may go wrong."""

    aborts: int = 0  # of a room, by the client
    losses: int = 0  # of an end of the link; the other end notices some time later
    crashes: int = 0
    doubled: int = 0  # notes
    failures: int = 0  # of writes
    damages: int = 0  # of pages on their way
    hurries: int = 0  # time that passes while something is on its way

    @property
    def excuses(self) -> set[str]:
        """What rooms may fail by."""
        found = {"abort"}
        found |= {"link"} if self.losses or self.crashes else set()
        found |= {"operation failed"} if self.failures else set()
        return found | ({"corrupted"} if self.damages else set())


class TwoSides:
    """A world. `progress`, `choices` and `wait` are all that can happen next."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        budget: Budget,
        *,
        prefill_pages: int,
        decode_pages: int,
        num_state_cells: int = 0,
        windows: WindowPages = NO_WINDOWS,
        page_sizes: tuple[int, int] = (PAGE, PAGE),
        num_ranks: tuple[int, int] = (1, 1),
    ) -> None:
        self.budget = budget
        self.now_s = 0.0
        self.num_waits = 0
        shapes = [
            Shape(*each, num_state_cells)
            for each in zip((prefill_pages, decode_pages), page_sizes, num_ranks, strict=True)
        ]
        self.is_alike = shapes[0][1:] == shapes[1][1:]
        by_layers = self.is_alike and not windows.num_groups
        rules = TransferRules("always", num_windows=LAYERS if by_layers else 1)
        self.prefill = new_side("prefill", PREFILL, rules, shapes[0], windows)
        self.decode = new_side("decode", DECODE, rules, shapes[1], windows)
        self.decode.lands_in_parts = any(all_parts(*shapes))
        self.attempts = {
            room: new_attempt(
                room,
                prompt,
                2,
                prefill=PREFILL,
                decode=DECODE,
                num_state_cells=num_state_cells,
                windows=windows,
            )
            for room, prompt in enumerate(prompts, 1)
        }
        for attempt in self.attempts.values():
            attempt.excuses |= budget.excuses
        self.rules = Rules({PREFILL: self.prefill, DECODE: self.decode}, self.attempts)
        self._link_up()
        for side in self._sides():
            self._receive(side)

    def save(self) -> bytes:
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def load(saved: bytes) -> TwoSides:
        world = pickle.loads(saved)
        assert isinstance(world, TwoSides)
        return world

    def progress(self) -> Iterator[Action]:
        """What happens by itself, sooner or later."""
        for side, other in (self._sides(), self._sides()[::-1]):
            if side.is_alive:
                yield from self._transport(side, other)
                yield from self._process(side, other)
        if all(side.is_alive and not side.is_linked and not side.news for side in self._sides()):
            yield "the link comes up", self._link_up
        for attempt in self.attempts.values():
            for leg in attempt.legs:
                if leg.end is None and not leg.was_aborted and _is_given_up(attempt, leg):
                    what = f"the router aborts room {attempt.room} on {self._side(leg).role}"
                    yield what, partial(self._abort, attempt, leg)

    def choices(self) -> Iterator[Action]:
        """What may happen, or never: legs that start, and everything that goes wrong."""
        budget = self.budget
        for attempt in self.attempts.values():
            for leg in attempt.legs:
                if leg.end is None and not leg.was_started:
                    yield f"room {attempt.room} starts on {self._side(leg).role}", partial(self._start, attempt, leg)
            if budget.aborts and not attempt.is_given_up and not attempt.has_ended:
                yield f"the client of room {attempt.room} leaves", partial(self._leave, attempt)
        for side in self._sides():
            if budget.losses and side.is_linked:
                yield f"{side.role} loses its end of the link", partial(self._break, side)
            if budget.crashes and side.is_alive:
                yield f"{side.role} is killed", partial(self._crash, side)
        if budget.hurries:
            yield "time passes in a hurry", self._hurry

    def wait(self) -> bool:
        """Time passes, to when something is due. False if nothing is."""
        due = [at_s for side in self._living() if (at_s := side.core.next_deadline_s()) is not None]
        if not due:
            return False
        self.num_waits += 1
        require(self.num_waits <= MAX_WAITS, "rooms are stuck: time passes and nothing happens")
        self.now_s = max(self.now_s, min(due))
        for side in self._living():
            side.core.expire(self.now_s)
            self._perform(side)
        return True

    def has_come_to_rest(self) -> bool:
        """Everything has ended and nothing is held."""
        rooms_ended = all(attempt.has_ended for attempt in self.attempts.values())
        return rooms_ended and all(side.is_clean() for side in self._living())

    def check(self) -> None:
        """What must hold in every state."""
        for side in self._sides():
            self.rules.check_books(side)
        for operation in self.prefill.wire:
            if not isinstance(operation.effect, SendNote) and not operation.has_landed:
                for page in operation.effect.write.dst.tolist():
                    self.rules.check_write(PREFILL, DECODE, page)
        for effect in self.decode.reading:
            self.rules.check_foreign(DECODE, effect.pages, "is verified")

    # what can happen

    def _transport(self, side: Side, other: Side) -> Iterator[Action]:
        """What one side's operations can do next: those of a stream are done in order, streams are independent."""
        heads: dict[int, Operation] = {}
        for operation in side.wire:
            heads.setdefault(operation.stream, operation)
        for operation in heads.values():
            if isinstance(operation.effect, SendNote):
                if not other.news:  # what it has heard of its link comes first
                    yield from self._notes(side, other, operation, operation.effect)
            elif operation.has_landed:
                yield f"{operation} are complete", partial(self._end_write, side, operation)
            else:
                for rank in operation.parts:
                    yield from self._parts(side, operation, rank)

    def _parts(self, side: Side, operation: Operation, rank: int) -> Iterator[Action]:
        what = f"{operation} of rank {rank}" if side.pools.shape.num_ranks > 1 else f"{operation}"
        yield f"{what} land", partial(self._land, operation, rank, is_damaged=False)
        if self.budget.damages:
            yield f"{what} land damaged", partial(self._land, operation, rank, is_damaged=True)
        if self.budget.failures:
            yield f"{what} fail", partial(self._fail_write, side, operation, rank)

    def _notes(self, side: Side, other: Side, operation: Operation, effect: SendNote) -> Iterator[Action]:
        yield f"{operation} arrives", partial(self._arrive, side, other, operation, effect)
        if self.budget.doubled:
            what = f"{operation} arrives, and will again"
            yield what, partial(self._arrive_twice, side, other, operation, effect)

    def _process(self, side: Side, other: Side) -> Iterator[Action]:
        if side.news:
            yield f"{side.role} hears of its link", partial(self._receive, side)
        if side.completed:
            what = f"{side.role} hears that a write of room {side.completed[0].room} has ended"
            yield what, partial(self._complete, side)
        for effect in side.reading:
            yield f"{side.role} has read the pages of room {effect.room}", partial(self._read, side, effect)
        yield f"{side.role} steps", partial(self._step, side)
        if side.is_linked and not other.is_linked:
            yield f"{side.role} notices that its link is broken", partial(self._lose, side)
        if other.instance_id in side.core.suspects() and not other.is_linked:
            gone = WriterGone(other.instance_id)
            yield f"{side.role} is sure that its writer is gone", partial(self._handle, side, gone)

    # the link

    def _land(self, operation: Operation, rank: int, *, is_damaged: bool) -> bool:
        effect = operation.effect
        assert not isinstance(effect, SendNote)
        operation.parts.remove(rank)
        write, stream = effect.write, effect.flow.stream
        if self.is_alike:
            for src, dst in zip(write.src.tolist(), write.dst.tolist(), strict=True):
                self.rules.copied(PREFILL, DECODE, src, dst, range(LAYERS), stream)
        else:
            for dst in write.dst.tolist():
                self.rules.converted(PREFILL, DECODE, write.src.astype(np.int32), dst, stream)
        operation.digest = add_digests(operation.digest, self.prefill.pools.write(rank, self.decode.pools, write))
        if is_damaged:
            self.budget = replace(self.budget, damages=self.budget.damages - 1)
            self.decode.kv[write.dst[0], 0, 0] ^= np.uint64(1)
        return True

    def _fail_write(self, side: Side, operation: Operation, rank: int) -> bool:
        """A rank's part fails alone, as one that took too long; those of others may land yet."""
        self.budget = replace(self.budget, failures=self.budget.failures - 1)
        side.broken.add(operation.stream)
        operation.parts.remove(rank)
        operation.error = "failed"
        return self._end_write(side, operation) if operation.has_landed else True

    def _end_write(self, side: Side, operation: Operation) -> bool:
        effect, error = operation.effect, operation.error
        assert not isinstance(effect, SendNote)
        side.wire.remove(operation)
        digest = operation.digest if error is None else None
        if digest is not None:
            side.digests[operation.stream] = add_digests(side.digests.get(operation.stream, 0), digest)
        side.completed.append(WriteDone(effect.room, error, digest))
        return True

    def _arrive(self, side: Side, other: Side, operation: Operation, effect: SendNote) -> bool:
        side.wire.remove(operation)
        written = side.digests.pop(effect.stream, None)
        digest = written if effect.digest is None else effect.digest
        if other.is_linked and effect.stream not in side.broken:
            self._handle(other, NoteArrived(side.instance_id, effect.note, digest))
        return True

    def _arrive_twice(self, side: Side, other: Side, operation: Operation, effect: SendNote) -> bool:
        self.budget = replace(self.budget, doubled=self.budget.doubled - 1)
        again = replace(effect, digest=side.digests.get(effect.stream, effect.digest))
        side.wire.insert(side.wire.index(operation) + 1, Operation(again))
        return self._arrive(side, other, operation, effect)

    def _link_up(self) -> bool:
        for side, other in (self._sides(), self._sides()[::-1]):
            side.is_linked = True
            side.news.append(PeerUp(other.instance_id, side.lands_in_parts))
        return True

    def _break(self, side: Side) -> bool:
        self.budget = replace(self.budget, losses=self.budget.losses - 1)
        return self._lose(side)

    def _lose(self, side: Side) -> bool:
        """An end of the link is gone, with what it had not done; the core hears of it later."""
        side.lose_link(PeerDown(DECODE if side is self.prefill else PREFILL, "test"))
        return True

    def _crash(self, side: Side) -> bool:
        self.budget = replace(self.budget, crashes=self.budget.crashes - 1)
        side.die()
        for attempt in self.attempts.values():
            leg = attempt.leg_at(side.instance_id)
            if leg.end is None:
                self._end(attempt, leg, "its worker died")
        return True

    # the processes

    def _receive(self, side: Side) -> bool:
        news, side.news = side.news, []
        for event in news:
            side.core.handle(event, self.now_s)
        self._perform(side)
        return True

    def _complete(self, side: Side) -> bool:
        return self._handle(side, side.completed.pop(0))

    def _read(self, side: Side, effect: DigestPages | UnpackPages) -> bool:
        side.reading.remove(effect)
        if isinstance(effect, UnpackPages):
            side.pools.put_together(self.prefill.pools.shape, effect.pages)
            return self._handle(side, PagesUnpacked(effect.room, None))
        return self._handle(side, PagesDigested(effect.room, side.pools.digest(effect.pages)))

    def _handle(self, side: Side, event: Event) -> bool:
        side.core.handle(event, self.now_s)
        self._perform(side)
        return True

    def _step(self, side: Side) -> bool:
        batch = side.core.plan(self.now_s)
        moved = self._perform(side)
        if batch is None:
            return moved
        result = self._runner(side).execute(batch, side.core.sampling())
        following, side.following = side.following, []
        for effect in following:
            self._post(side, effect)
        side.core.commit(result, self.now_s)
        self._perform(side)
        return True

    def _runner(self, side: Side) -> Runner:
        plain = LayeredRunner(side.kv)
        if side.states.size and not self.is_alike:
            return StatesOfRanks(plain, side.pools, side.states)
        return new_calculator(plain, side.kv, side.states, side.cache.windows)

    def _hurry(self) -> bool:
        self.budget = replace(self.budget, hurries=self.budget.hurries - 1)
        return self.wait()

    def _perform(self, side: Side) -> bool:
        effects = side.core.pop_effects()
        for effect in effects:
            if isinstance(effect, Emit):
                self._answer(side, effect.output)
            elif isinstance(effect, EmitTokens):
                for output in effect.outputs():
                    self._answer(side, output)
            else:
                assert not isinstance(effect, CompileGrammar)
                self._transfer(side, effect)
        return bool(effects)

    def _transfer(self, side: Side, effect: Transfer) -> None:
        self.rules.wants(side, effect)
        match effect:
            case DigestPages() | UnpackPages():
                side.reading.append(effect)
            case StreamPages():
                side.following.append(effect)
            case WritePages() | SendNote():
                self._post(side, effect)

    def _post(self, side: Side, effect: WritePages | StreamPages | SendNote) -> None:
        if side.is_linked:
            ranks = () if isinstance(effect, SendNote) else range(side.pools.shape.num_ranks)
            side.wire.append(Operation(effect, list(ranks)))
        elif not isinstance(effect, SendNote):
            side.news.append(WriteDone(effect.room, "no link"))

    # the router

    def _start(self, attempt: Attempt, leg: Leg) -> bool:
        leg.was_started = True
        return self._handle(self._side(leg), attempt.start(leg))

    def _leave(self, attempt: Attempt) -> bool:
        self.budget = replace(self.budget, aborts=self.budget.aborts - 1)
        attempt.is_given_up = True
        return True

    def _abort(self, attempt: Attempt, leg: Leg) -> bool:
        leg.was_aborted = True
        if leg.was_started:
            return self._handle(self._side(leg), AbortRoom(attempt.room, "the router"))
        self._end(attempt, leg, "never started")
        return True

    def _answer(self, side: Side, output: Output) -> None:
        attempt = self.attempts[output.room]
        leg = attempt.leg_at(side.instance_id)
        self.rules.answered(attempt, leg, output)
        leg.outputs.append(output)
        if output.finish or output.failure:
            self._end(attempt, leg, output)

    def _end(self, attempt: Attempt, leg: Leg, end: Output | str) -> None:
        leg.end = end
        if attempt.has_ended:
            self.rules.ended(attempt)

    # helpers

    def _sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    def _living(self) -> list[Side]:
        return [side for side in self._sides() if side.is_alive]

    def _side(self, leg: Leg) -> Side:
        return self.prefill if leg.worker == PREFILL else self.decode


def _is_given_up(attempt: Attempt, leg: Leg) -> bool:
    failed = any(other.end is not None and not other.has_finished for other in attempt.legs)
    return attempt.is_given_up or failed
