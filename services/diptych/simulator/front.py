"""The router in virtual time: the real admission queue, policies, indexes, estimates, breakers, legs and retry rules.

What is left out is what reads and writes: text, tokens and connections. A call is admitted, gets a pair, and has its
legs followed until it is complete or nobody may try any more, as `serve.execution` does it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.engine.values.events import AbortRoom, PrefixHolder, ToolCalled
from diptych.engine.values.events import Move as AskToMove
from diptych.generation.page_hash import prompt_hash
from diptych.router.admission.queue import AdmissionQueue, Admitted, Claim, Outcome, Reason
from diptych.router.choose.breakers import Breakers
from diptych.router.choose.chooser import Asked, Chooser, FoundPrompt
from diptych.router.choose.explain import Selection
from diptych.router.choose.moves import LOOK_S, Moves, RunningOutput, departures
from diptych.router.choose.pairing import has_fresh, least_blamed
from diptych.router.choose.policies import plan_of
from diptych.router.choose.policies.outlook import Outlook, outlook_of
from diptych.router.serve.moving import MIN_MOVED, PATIENCE_S, Move
from diptych.router.values.failure import LegFailure
from diptych.router.workers.legs import Leg, Work
from diptych.router.workers.worker_view import Pair
from diptych.simulator.clock import Clock
from diptych.simulator.decisions import Decisions
from diptych.simulator.known import MODEL, KnownWorkers
from diptych.simulator.messages import Command, NewLeg
from diptych.simulator.prompts import SimPrompt
from diptych.simulator.served import Attempt, Served
from diptych.simulator.setup import Setup
from diptych.simulator.shedding import SimShedding

PREFIX_TOKENS: Final = 256  # of a prompt, that name its family


class Front:
    """One router. `send` brings commands to a worker; `given` says how many tokens of a room it has told of.

    `catch_up` brings what workers have said by now, where nobody had to hear of it before.
    """

    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        decisions: Decisions,
        send: Callable[[int, Command], None],
        given: Callable[[int, int], int],
        catch_up: Callable[[], None],
    ) -> None:
        self._setup = setup
        self._clock = clock
        self._decisions = decisions
        self._send = send
        self._given = given
        self._catch_up = catch_up
        self._rng = random.Random(setup.seed)
        self._plan = plan_of(setup.policy)
        self.workers = KnownWorkers(clock, self._on_change, MODEL if setup.transfer.pulls else "")
        self._breakers = Breakers(setup.router.breaker_failures)
        self._chooser = Chooser(self.workers.state, self.workers.estimates, self._rng, 0)
        self._queue = AdmissionQueue(setup.router.limits)
        self._shedding = SimShedding(setup, self._outlook, self._num_tokens, clock, self._rng)
        self._claims: dict[int, Served] = {}  # that are open, by number
        self._pairless: dict[int, Served] = {}  # that wait for a pair, in order
        self._looks_s = math.inf  # at claims that have waited for too long
        self.num_ended = 0  # calls
        self.num_moves = 0  # outputs that went on at another worker
        self._moves = Moves()
        self._is_looking = False

    # admission

    def arrive(self, served: Served) -> None:
        """A call is offered."""
        if self._shedding.sheds(served):
            self._decisions.admitted(served.number, Reason.SHED.value)
            served.failure = f"refused: {Reason.SHED.value}"
            served.end()
            self.num_ended += 1
            return
        weight = self._shedding.weight(served)
        claim = Claim(patience_s=self._setup.router.silence_s, tenant=served.call.tenant, weight=weight)
        served.claim, outcomes = self._queue.offer(claim, self._clock.now_s)
        self._claims[served.claim] = served
        self._on_outcomes(outcomes)

    def _on_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            served = self._claims[outcome.number]
            if isinstance(outcome, Admitted):
                self._decisions.admitted(served.number, "admitted")
                served.begin(self._setup.router, self._rng)
                self._shedding.began(served)
                self._dispatch(served)
            else:
                self._decisions.admitted(served.number, outcome.reason.value)
                self._close(served, f"refused: {outcome.reason.value}")
        due_s = self._queue.next_expiry_s if self._queue.num_waiting else None
        if due_s is not None and due_s < self._looks_s:
            self._looks_s = due_s
            self._clock.at(due_s, self._expire)

    def _expire(self) -> None:
        self._looks_s = math.inf
        self._on_outcomes(self._queue.expire(self._clock.now_s))

    def _close(self, served: Served, failure: str) -> None:
        served.failure = failure
        if served.move is not None:
            served.move.cancel()
        served.end()
        self.num_ended += 1
        self._shedding.ended(served)
        del self._claims[served.claim]

    def _outlook(self) -> Outlook | None:
        """Return what a request that came now would find; None: nobody knows yet."""
        self._catch_up()
        pairs = self._breakers.choose(self.workers.pairs, self._clock.now_s)
        is_known = bool(pairs) and self.workers.estimates.are_measured
        return outlook_of(self._chooser.candidates(pairs, {})) if is_known else None

    def _num_tokens(self, served: Served) -> int:
        """Return how many tokens of a call's output have come."""
        attempt = served.attempt
        if attempt is None:
            return len(served.progress.output_ids)
        return self._given(attempt.worker_of(attempt.kinds[-1]), attempt.room)

    def _leave(self, served: Served, failure: str = "") -> None:
        """A call that was admitted has ended."""
        self._close(served, failure)
        self._on_outcomes(self._queue.leave(served.claim, self._clock.now_s))

    def _complete(self, served: Served) -> None:
        """An output has ended. One that a small pool cut short was not served as it was asked for."""
        got, wanted = len(served.progress.output_ids), served.call.output_len
        if got < wanted:
            self._leave(
                served, f"cut: its workers' KV pools hold no request of {served.call.prompt_len + wanted} tokens"
            )
            return
        served.last_s = self._clock.now_s
        self._tell_of_tool(served)
        self._leave(served)

    def _tell_of_tool(self, served: Served) -> None:
        """Tell whoever has the text of a call that its session is likely to come back."""
        attempt = served.attempt
        if served.call.tool and attempt is not None:
            for worker_id in sorted({attempt.worker_of(kind) for kind in attempt.kinds}):
                self._send(worker_id, ToolCalled(attempt.room, served.call.tool))

    # pairs

    def _dispatch(self, served: Served) -> None:
        if self.workers.pairs:
            self._start(served, self._select(served))
            return
        wait_s = served.progress.pair_wait_s(self._clock.now_s, self.workers.missing_since_s)
        self._pairless[served.number] = served
        self._clock.after(wait_s, lambda: self._give_up_waiting(served))

    def _give_up_waiting(self, served: Served) -> None:
        if self._pairless.pop(served.number, None) is not None:
            self._leave(served, "no worker is available")

    def _on_change(self) -> None:
        """Others may serve together now; or somebody waits for outputs to end."""
        self._serve_pairless()
        if self._setup.router.moves and self.workers.vacating:
            self._look_later()

    def _serve_pairless(self) -> None:
        while self._pairless and self.workers.pairs:
            served = self._pairless.pop(next(iter(self._pairless)))
            self._start(served, self._select(served))

    def _select(self, served: Served) -> Selection:
        self._catch_up()
        progress, now_s = served.progress, self._clock.now_s
        pairs = self._breakers.choose(least_blamed(self.workers.pairs, progress.blamed), now_s)
        prompt, slo = self._find(served.prompt), self._setup.slo_of(served.call.tier)
        asked = Asked(progress.params.max_tokens, served.call.session, slo)
        selection = self._chooser.choose(self._plan, pairs, asked, prompt)
        self._chooser.note(selection, now_s)
        self._breakers.begin(selection.pair, now_s)
        prompt.sent(selection.pair)
        return selection

    def _find(self, prompt: SimPrompt) -> FoundPrompt:
        if not self._plan.reads_prompt:
            return FoundPrompt(len(prompt))
        prefixes = self.workers.prefixes
        chains = {size: prompt.names(size) for size in self.workers.page_sizes}

        def sent(pair: Pair) -> None:
            prefixes.sent({pair.prefill_id, pair.decode_id}, chains)

        key = prompt_hash(prompt.ids[:PREFIX_TOKENS])
        found = prefixes.find(chains)
        return FoundPrompt(len(prompt), key, found.num_tokens, sent, chains, found.lower)

    def _start(self, served: Served, selection: Selection) -> None:
        """Send the legs of the next attempt."""
        progress, pair = served.progress, selection.pair
        self._decisions.paired(served.number, pair.prefill_id, pair.decode_id)
        progress.begin(self._clock.now_s)
        served.pair = pair
        self._shedding.sent(served, selection)
        room = self._rng.getrandbits(64) or 1
        served.attempt = attempt = Attempt(self, served, room, pair)
        for kind in attempt.kinds:
            peer_id = 0 if pair.is_local else attempt.worker_of(_OTHER[kind])
            worker_id = attempt.worker_of(kind)
            leg = Leg(attempt, kind, selection.work, peer_id, len(progress.output_ids))
            self.workers[worker_id].legs.add(room, leg)
            holder = None if kind is LegKind.DECODE else _holder_of(selection)
            self._send(worker_id, self._leg(served, room, kind, peer_id)._replace(holder=holder))
        self._clock.at(progress.wait_budget.ends_s, lambda: self._end_if_it_is_time(attempt))
        if self._setup.router.moves and selection.request.slo.tpot_s > 0:
            self._look_later()

    def _leg(self, served: Served, room: int, kind: LegKind, peer_id: int) -> NewLeg:
        call, num_prior = served.call, len(served.progress.output_ids)
        slo = self._setup.slo_of(call.tier)
        return NewLeg(
            served.number, room, kind, peer_id, served.prompt, served.progress.params, call.tenant, slo, num_prior
        )

    # what legs say

    def heard(self, attempt: Attempt) -> None:
        """The legs of an attempt have said something."""
        served, legs = attempt.served, attempt.legs
        if served.move is not None:
            served.move.look()
        if served.attempt is not attempt:
            return
        token_ids, _ = legs.merger.pop()
        if token_ids:
            self._on_tokens(served, token_ids)
        if not attempt.is_proven and (served.progress.num_attempt_tokens > 1 or legs.is_complete):
            attempt.is_proven = True
            self._breakers.succeed(attempt.pair)
        if legs.is_complete:
            self._complete(served)
        elif legs.failure is not None and not self._goes_on_elsewhere(served):
            self._recover(attempt, legs.failure)

    def _on_tokens(self, served: Served, token_ids: Sequence[int]) -> None:
        now_s, attempt = self._clock.now_s, served.attempt
        assert attempt is not None
        if math.isnan(served.first_s):
            served.first_s = now_s
        stats = attempt.legs.stats.get(attempt.kinds[0])
        if not served.knows_cached and served.progress.is_first_attempt and stats is not None:
            served.cached_len, served.knows_cached = stats.cached_tokens, True
        served.progress.wait_budget.on_tokens(now_s)
        served.progress.add(token_ids)

    def _recover(self, attempt: Attempt, failure: LegFailure) -> None:
        """Try again elsewhere, if that may be."""
        served, now_s = attempt.served, self._clock.now_s
        self._breakers.fail(failure.suspects(attempt.pair), now_s)
        served.attempt = None
        progress = served.progress
        pause_s = progress.fail(failure, attempt.pair, now_s)
        if progress.finish is not None:
            self._complete(served)
        elif pause_s is None:
            self._leave(served, f"{failure.leg.value}: {failure.code.name}: {failure.message}")
        elif has_fresh(self.workers.pairs, progress.blamed):
            self._dispatch(served)
        else:
            self._clock.after(pause_s, lambda: self._dispatch(served))

    def _end_if_it_is_time(self, attempt: Attempt) -> None:
        """End an attempt of which nothing has come for too long."""
        served, now_s = attempt.served, self._clock.now_s
        if served.attempt is not attempt:
            return
        self._catch_up()
        if attempt.fill_up_to(self.given(attempt.worker_of(attempt.kinds[-1]), attempt.room)):
            self.heard(attempt)
        if now_s < served.progress.wait_budget.ends_s:
            self._clock.at(served.progress.wait_budget.ends_s, lambda: self._end_if_it_is_time(attempt))
            return
        attempt.end_by_deadline(served.progress.wait_budget.words(now_s))

    # moves, as `serve.mover` and `serve.execution` make them

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        """Begin the moves that are due; the next look comes as long as there are calls."""
        self._is_looking = False
        self._catch_up()
        running, pairs = list(self._claims.values()), self._breakers.choose(self.workers.pairs, self._clock.now_s)
        candidates = self._chooser.candidates(pairs, {}) if pairs else None
        usual = self.workers.estimates.output_len
        for choice in self._moves.due(candidates, lambda ids: self._outputs(running, ids), self._successors, usual):
            self._move(running[choice.place], choice.target_id)
        leaving = self.workers.vacating
        if candidates is not None and leaving:
            for departure in departures(candidates.workers, self._outputs(running, leaving), self._successors, usual):
                self._move(running[departure.place], departure.target_id)
        if running:
            self._look_later()

    def _outputs(self, running: Sequence[Served], worker_ids: Collection[int]) -> Mapping[int, RunningOutput]:
        found = ((place, self._output(each)) for place, each in enumerate(running))
        return {place: each for place, each in found if each is not None and each.worker_id in worker_ids}

    def _output(self, served: Served) -> RunningOutput | None:
        """Return an output as it is made now; None while it can't move."""
        attempt, is_moving = served.attempt, served.move is not None and not served.move.is_over
        if attempt is None or is_moving or attempt.has_ended or attempt.num_tokens < MIN_MOVED:
            return None
        num_output = len(served.progress.output_ids) + len(attempt.ready)
        return RunningOutput(
            worker_id=attempt.pair.decode_id,
            slo=self._setup.slo_of(served.call.tier),
            num_tokens=served.call.prompt_len + num_output,
            num_output_tokens=num_output,
            num_left_at_most=served.call.output_len - num_output,
            asked=frozenset(served.asked),
        )

    def _successors(self, worker_id: int, adapter: str) -> Collection[int]:
        pairs = self._breakers.choose(self.workers.successions, self._clock.now_s)
        return {pair.decode_id for pair in pairs if pair.prefill_id == worker_id}

    def _move(self, served: Served, target_id: int) -> None:
        """Ask the worker that makes an output to hand it to another one."""
        old, call, progress = served.attempt, served.call, served.progress
        assert old is not None
        pair, room, slo = (
            Pair(old.pair.decode_id, target_id),
            self._rng.getrandbits(64) or 1,
            self._setup.slo_of(call.tier),
        )
        new = Attempt(self, served, room, pair, begun=(LegKind.PREFILL,))
        served.asked.add(pair)
        num_tokens = call.prompt_len + len(progress.output_ids)
        work = Work(num_tokens, num_tokens, slo)

        def begin(unread: Sequence[int]) -> None:
            if target_id not in self.workers:
                move.cancel()
                return
            known = len(progress.output_ids) + len(unread) - 1
            new.legs.begin(LegKind.DECODE)
            self.workers[target_id].legs.add(room, Leg(new, LegKind.DECODE, work, pair.prefill_id, known))
            prompt, params = served.prompt_after(known), progress.params_after(known)
            leg = NewLeg(served.number, room, LegKind.DECODE, pair.prefill_id, prompt, params, call.tenant, slo, known)
            self._send(target_id, leg)

        self._breakers.begin(pair, self._clock.now_s)
        self.workers[pair.prefill_id].legs.add(room, Leg(new, LegKind.PREFILL, work, target_id))
        served.move = move = Move(old, new, begin)
        self._send(pair.prefill_id, AskToMove(room, old.room, target_id))
        self._clock.after(PATIENCE_S, move.give_up)

    def _goes_on_elsewhere(self, served: Served) -> bool:
        """An attempt has failed behind its last token; return whether another one has the call already."""
        move, served.move = served.move, None
        new = None if move is None else move.pop()
        if new is None:
            return False
        self.num_moves += 1
        self._decisions.paired(served.number, new.pair.prefill_id, new.pair.decode_id)
        served.attempt, served.pair = new, new.pair
        served.progress.moved(self._clock.now_s)
        self._clock.at(served.progress.wait_budget.ends_s, lambda: self._end_if_it_is_time(new))
        return True

    # of attempts

    def given(self, worker_id: int, room: int) -> int:
        return self._given(worker_id, room)

    def abort(self, worker_id: int, room: int) -> None:
        """Have a leg aborted, unless it has ended."""
        if worker_id in self.workers and self.workers[worker_id].legs.mark_aborted(room):
            self._send(worker_id, AbortRoom(room, "aborted by the router"))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._clock.after(seconds, act)


def _holder_of(selection: Selection) -> PrefixHolder | None:
    held = selection.candidates.workers[selection.pair.prefill_id].held
    return None if held is None else PrefixHolder(held.instance_id, held.num_tokens)


_OTHER: Final = {LegKind.PREFILL: LegKind.DECODE, LegKind.DECODE: LegKind.PREFILL}
