"""The legs that are open on one worker, by room. Rule: a leg leaves when its last output came, or with the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.members.roles import LegKind
from diptych.generation.slo import NO_SLO, Slo
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1.worker_pb2 import LegOutput


class LegReceiver(Protocol):
    """Who started legs and wants to know what becomes of them."""

    def receive(self, kind: LegKind, output: LegOutput) -> None: ...

    def lose(self, kind: LegKind, reason: str) -> None:
        """The worker is gone; nothing more will come."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is for its workers, as the router knows it."""

    prompt_len: int
    cached_tokens: int = 0  # of the prompt, where it is computed: believed, and not to be computed again
    slo: Slo = NO_SLO

    def queued_tokens(self, kind: LegKind) -> int:
        """Prompt tokens that a leg of this kind computes."""
        return 0 if kind is LegKind.DECODE else self.prompt_len - self.cached_tokens


@dataclass(slots=True)
class Leg:
    """An open leg."""

    receiver: LegReceiver
    kind: LegKind
    work: Work
    peer_id: int = 0  # where its other leg is
    num_prior_tokens: int = 0  # of the output, that were made before it
    first_s: float | None = None  # when its first output came
    first_tokens: int = 0  # of the output, that were known then
    aborted: bool = False


class OpenLegs:
    """Delivers outputs to those who started the legs, and counts what is open."""

    def __init__(self) -> None:
        self._legs: dict[int, Leg] = {}
        self.queued_tokens = 0  # prompt tokens of legs that have not answered yet
        self._new_tokens = 0  # prompt tokens of legs that began since the worker told how much it has to do
        self._unheard_tokens = 0  # and of those that began just before: it may not have heard of them by then
        self.num_queued = 0  # legs that compute their prompts, and have not answered yet
        self.prompt_tokens = 0  # of all legs
        self.num_outputs = 0  # legs that make output
        self.joining_tokens = 0  # prompt tokens of those of which no output has come yet
        self._outputs: Counter[Slo] = Counter()  # legs that make outputs, and have answered
        self._shown: Sequence[tuple[Slo, int]] | None = ()  # the same as a value; None: it has changed
        self._load: tuple[WorkerLoad, WorkerLoad] | None = None  # what was reported, and so the load; None: it changed

    def __len__(self) -> int:
        return len(self._legs)

    def load(self, reported: WorkerLoad) -> WorkerLoad:
        """Return how busy the worker is, which has reported what it knew of itself."""
        if not self._legs:
            return reported
        if self._load is None or self._load[0] is not reported:
            self._load = reported, self._loaded(reported)
        return self._load[1]

    def _loaded(self, reported: WorkerLoad) -> WorkerLoad:
        return WorkerLoad(
            max(reported.num_requests, len(self._legs)),
            max(reported.queued_tokens, self.queued_tokens),
            reported.free_tokens,
            reported.has_credit,
            reported.queued_transfer_bytes,
            reported.link_speeds,
            max(reported.num_queued, self.num_queued),
            max(reported.context_tokens, self.prompt_tokens),
            reported.prompt_budget,
            reported.output_tokens + self.joining_tokens,
            self.num_outputs,
            reported.output_step_s,
            reported.context_token_s,
            reported.prompt_token_s,
            self._outputs_by_slo(),
            len(self._legs),
            min(self._left_tokens(reported), max(reported.queued_tokens, self.queued_tokens)),
            reported.tiers,
        )

    def _left_tokens(self, reported: WorkerLoad) -> int:
        return reported.left_tokens + self._unheard_tokens + self._new_tokens

    def told(self) -> None:
        """The worker has told how much it has to do."""
        self._new_tokens, self._unheard_tokens = 0, self._new_tokens
        self._load = None

    def add(self, room: int, leg: Leg) -> None:
        assert room not in self._legs, "a room is used once"
        self._new_tokens += leg.work.queued_tokens(leg.kind)
        self._legs[room] = leg
        self._count(leg, 1)
        self._count_queued(leg, 1)

    def mark_aborted(self, room: int) -> bool:
        """Return True if the worker has to be told: the leg is open and was not aborted before."""
        leg = self._legs.get(room)
        if leg is None or leg.aborted:
            return False
        leg.aborted = True
        return True

    def deliver(self, output: LegOutput, now_s: float) -> Leg | None:
        """Return the leg; None for a room that is not open."""
        leg = self._legs.get(output.room)
        if leg is None:
            return None
        if leg.first_s is None:
            self._answered(leg, output, now_s)
        if output.finish_reason or output.HasField("error"):
            del self._legs[output.room]
            self._count(leg, -1)
            self._count_output(leg, -1)
        try:
            leg.receiver.receive(leg.kind, output)
        except Exception:  # malformed: this costs the session, and so the leg, whose owner must hear of it
            self._legs.setdefault(output.room, leg)
            raise
        return leg

    def lose_all(self, reason: str) -> None:
        legs, self._legs = self._legs, {}
        self.queued_tokens = self.num_queued = self.prompt_tokens = self.num_outputs = self.joining_tokens = 0
        self._new_tokens = self._unheard_tokens = 0
        self._outputs, self._shown, self._load = Counter(), (), None
        for leg in legs.values():
            leg.receiver.lose(leg.kind, reason)

    def _answered(self, leg: Leg, output: LegOutput, now_s: float) -> None:
        leg.first_s, leg.first_tokens = now_s, output.first_index + len(output.token_ids)
        self._count_queued(leg, -1)
        self._count_output(leg, 1)

    def _count(self, leg: Leg, change: int) -> None:
        self._load = None
        self.prompt_tokens += change * leg.work.prompt_len
        if leg.kind.makes_output:
            self.num_outputs += change

    def _count_queued(self, leg: Leg, change: int) -> None:
        self._load = None
        self.queued_tokens += change * leg.work.queued_tokens(leg.kind)
        self.num_queued += change * (leg.kind is not LegKind.DECODE)
        self.joining_tokens += change * leg.work.prompt_len * (leg.kind.makes_output)

    def _count_output(self, leg: Leg, change: int) -> None:
        if leg.kind.makes_output:
            self._outputs[leg.work.slo.coarse] += change
            self._shown = None

    def _outputs_by_slo(self) -> Sequence[tuple[Slo, int]]:
        if self._shown is None:
            self._outputs = +self._outputs
            says_any = any(slo != NO_SLO for slo in self._outputs)
            self._shown = tuple(self._outputs.items()) if says_any else ()
        return self._shown
