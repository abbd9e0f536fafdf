"""How much of prompts a step computes beside requests that decode: the one number that makes a worker's role. Pure.

Without such requests nothing bounds a step: the worker prefills. With some, prompts get the time that is left until
the first of their next tokens is due (`TokenDeadlines`), less what the tokens themselves take (`StepLine`). What
requests are ahead of their deadlines may be spent at once; no deadline is missed for it. Where too little is left,
prompts wait; but not for more than `PATIENCE` steps with tokens: then they get `AT_LAST` tokens all the same, so a
prompt of `n` tokens is computed within `PATIENCE * n / AT_LAST` such steps from its turn on. Where no output can have a
step, as when a prompt has the adapter slot that it waits for, there are no such steps, and prompts get them at once:
else nobody would ever go on. Sarathi-Serve (OSDI 2024) bounds steps by a fixed number of tokens, and DuetServe (2025)
predicts when a time per token would not be kept; here both are one rule.

A prompt whose first token would be late by that, and would not if outputs waited, *goes first* where fewer outputs than
it weighs are lost by it (`TokenDeadlines.lost`): a choice between two delays weighs the slack of those whom it delays.

No step that requests wait for is to take longer than `longest_s`: who comes meanwhile, or asks for pages, is heard
when it is over. Where nobody has a time per token, or steps without any prompt don't keep it, that is the only bound;
prompts then always have `MIN_CHUNK` tokens, and as many as there are requests that decode, of which each costs no less.
As long as no prompt was measured, a step of the largest size is taken to last as long as it was chosen for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from diptych.engine.schedule.kv_forecast import OutputLengths
from diptych.engine.schedule.pace.mixed_floor import MixedFloor, are_few
from diptych.engine.schedule.pace.prompts import ORIGIN, NextPrompt, Prompts, PromptShare
from diptych.engine.schedule.pace.step_sizes import STEP_S
from diptych.engine.schedule.pace.step_times import NEAR, ContextCount, StepLine
from diptych.engine.schedule.pace.token_deadlines import TokenDeadlines
from diptych.engine.values.prompt_cost import MIN_CHUNK, STEP_COST
from diptych.engine.values.request import Request

UNBOUNDED: Final = -1
IDLE_STEP_S: Final = 0.02  # that a step of work for idle time takes, about
HEADROOM: Final = 0.92  # of the time that is left is planned: what is spared comes back, as slack, in the next step
WORTH: Final = 8  # times what a step costs that has nothing else: prompts wait until there is time for so much
AT_LAST: Final = 2 * STEP_COST  # for who has waited: fewer would be hardly cheaper than the step that they are in
SHARED: Final = 0.5  # of it is for prompts beside tokens while others wait to have a step of their own
STEP_CONTEXT: Final = 100_000  # tokens of context that an H200 reads while it reads weights: for a step's first guess
ROW_CONTEXT: Final = 64  # and while it does the rest for one request
LEAST_LEFT: Final = 0.01  # of it, for outputs
SHOWN_BITS: Final = 2  # of a budget that is told to others, who need not hear of each small change
CONTEXT_BITS: Final = 7  # and of contexts
TOLD_EVERY: Final = 16  # steps, as to how long their parts take
TOGETHER: Final = 8  # steps without prompts are learned from at once, unless it matters before: they are alike


class _Launched(NamedTuple):
    """A step that runs, or is about to."""

    cost: int  # of its prompts
    num_rows: int  # requests that get a token
    work: int  # of these tokens
    began_s: float
    expected_s: float
    joining: Collection[Request]  # who has its first token by it


class StepPace:
    """Tell it who decodes, and when steps begin and end, in their order."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: of a step that computes prompts and that others wait for; infinite: no bound."""
        self._longest_s = longest_s
        self._deadlines = TokenDeadlines()
        self._contexts = ContextCount()
        self._running: deque[_Launched] = deque()
        self._ended_s = -math.inf  # the last step
        self._free_s = -math.inf  # when all that is launched will be over
        self._tokens = StepLine()  # by context
        self._beside = Prompts(MIN_CHUNK)
        self._floor = MixedFloor()
        self._apart = Prompts(WORTH * STEP_COST)
        self._favoured = 0  # room of a prompt for which outputs wait until it is complete, or late; 0: none yet
        self._share = PromptShare()
        self._together = 1  # steps without prompts that are learned from at once: fewer while little is known
        self._num_plain = self._plain_work = 0  # of those that nothing has been learned from
        self._plain_s = 0.0
        self._num_learned = self._parts_due = 0  # steps, and as of which `step_parts_s` is made anew
        self.step_parts_s = (0.0, 0.0, 0.0)  # roughly, of a step, a token of context, a token of a prompt; 0: not known

    # who decodes

    def join(self, request: Request, first_s: float) -> None:
        """A request decodes from the next step on; its first token came at `first_s`."""
        self._deadlines.add(request, first_s)
        self._contexts.add(request)

    def leave(self, request: Request) -> None:
        """It does not any more."""
        self._deadlines.remove(request)
        self._contexts.remove(request)

    def ahead(self, request: Request, num_tokens: int) -> None:
        """A step brought a request so many tokens beside the first."""
        if num_tokens:
            self._deadlines.ahead(request, num_tokens)
            self._contexts.ahead(request, num_tokens)

    def expect(self, lengths: OutputLengths) -> None:
        """Outputs have become so long."""
        self._deadlines.expect(lengths)

    # what prompts may cost

    def beside(self, most: int, num_rows: int, now_s: float, first: NextPrompt | None = None) -> int:
        """Return what prompts may cost in a step that also brings tokens to so many requests; `most` at most."""
        if not num_rows:
            return most
        self._learn_tokens()
        tokens_s, spare_s = self._left(num_rows, now_s)
        share = SHARED if self._apart.num_refused else 1.0
        if first is not None and self._goes_first(first, self._beside, tokens_s, share * spare_s, now_s):
            spare_s = math.inf
        return self._budget(most, most, self._beside, num_rows, share * spare_s, self._longest_s - tokens_s)

    def apart(
        self, most: int, num_rows: int, now_s: float, wanted: int, first: NextPrompt | None = None, least: int = 0
    ) -> int:
        """Return what prompts may cost in a step of their own, for which so many requests wait; `most` at most.

        All that wait to be computed have `wanted` tokens: where those are few, few are worth a step. They get `least`
        however late outputs are, as far as a step may last so long: `AT_LAST` where no step can bring any a token.
        """
        if not num_rows:
            return most
        self._learn_tokens()
        tokens_s, spare_s = self._left(num_rows, now_s)
        if first is not None and self._goes_first(first, self._apart, tokens_s, spare_s, now_s):
            spare_s = math.inf
        return self._budget(most, wanted, self._apart, num_rows, spare_s, self._longest_s, least)

    def idle(self, most: int) -> int:
        """Return what prompts may cost in a step that nobody waits for: who comes meanwhile is to be heard soon."""
        known = self._known(self._apart)
        fitting = known.cost_in(IDLE_STEP_S) if known.line.is_known else 0
        return min(most, max(MIN_CHUNK, fitting))

    def shown(self, num_rows: int) -> int:
        """Return what prompts may cost in the step behind those that are launched, roughly, for others to hear of."""
        if not num_rows or (self._longest_s == math.inf and not self._deadlines.has_due):
            return UNBOUNDED
        tokens_s, spare_s = self._left(num_rows, self._ended_s)
        if self._deadlines.num_free or spare_s == math.inf:
            spare_s = min(spare_s, self._longest_s - tokens_s)
        return UNBOUNDED if spare_s == math.inf else coarse(self._known(self._beside).cost_in(spare_s), SHOWN_BITS)

    @property
    def output_tokens(self) -> int:
        """Return the contexts of those who decode, roughly."""
        return coarse(self._contexts.num_tokens, CONTEXT_BITS)

    def _budget(
        self, most: int, wanted: int, prompts: Prompts, num_rows: int, spare_s: float, longest_s: float, least: int = 0
    ) -> int:
        """Return what prompts may cost: deadlines leave them `spare_s` or `least`, and the longest step `longest_s`."""
        known = self._known(prompts)
        left = most if spare_s == math.inf else self._patient(prompts, known, wanted, spare_s)
        budget = min(most, max(least, left))
        if longest_s == math.inf:
            return budget
        if not known.line.is_known:
            fitting = int(most * min(1.0, longest_s / STEP_S))
        else:  # a step with a few takes the floor, too
            fitting = max(known.cost_in(longest_s), known.at_floor)
        return min(budget, max(MIN_CHUNK, num_rows, fitting))

    @staticmethod
    def _patient(prompts: Prompts, known: Prompts, wanted: int, spare_s: float) -> int:
        return prompts.patient(known.cost_in(spare_s), known.enough(wanted), max(AT_LAST, known.at_floor))

    def _goes_first(self, first: NextPrompt, prompts: Prompts, tokens_s: float, spare_s: float, now_s: float) -> bool:
        """Whether more is lost when a prompt waits for the time that outputs leave than when they wait for it."""
        known = self._known(prompts)
        work_s = known.seconds_of(first.cost)
        if work_s <= spare_s or not now_s + work_s <= first.due_s < math.inf:
            return False
        if first.room == self._favoured:
            return True
        share = 1 - tokens_s / self._deadlines.tightest_s
        queued_s = known.seconds_of(max(first.cost, first.queued))
        if share > 0 and now_s + (queued_s - spare_s) / share <= first.due_s:
            return False
        most = min(first.num_waiting, int((first.due_s - now_s) / work_s)) if work_s > 0 else 1
        if not any(self._pays(first.weight * num, work_s * num, tokens_s, now_s) for num in {1, max(1, most)}):
            return False
        self._favoured = first.room
        return True

    def _pays(self, gained: float, work_s: float, tokens_s: float, now_s: float) -> bool:
        """Whether fewer outputs are lost than prompts are won that take so long."""
        pace_s = tokens_s / max(LEAST_LEFT, 1 - self._share.now)
        return self._deadlines.lost(now_s + tokens_s, work_s, tokens_s, pace_s) < gained

    def _known(self, prompts: Prompts) -> Prompts:
        """Return these prompts, by what those of the other kind take as long as nothing is known of these."""
        if prompts.line.is_known:
            return prompts
        other = self._apart if prompts is self._beside else self._beside
        return Prompts(prompts.least, other.line, prompts.read_s, prompts.floor_s)

    @property
    def _widest(self) -> StepLine:
        """What knows of the largest prompts, and so best what their products take."""
        beside, apart = self._beside.line, self._apart.line
        return apart if apart.reach > NEAR * beside.reach else beside

    def _left(self, num_rows: int, now_s: float) -> tuple[float, float]:
        """Return what the next step with tokens takes without prompts, and how much time is left before it."""
        work = _work(num_rows, self._contexts.num_tokens)
        usual_s = self._tokens.usual(work)
        tokens_s = self._tokens.pace * usual_s
        self._beside.floor_s = self._floor.beyond(work, tokens_s)
        begin_s = max(now_s, self._free_s) if self._running else now_s
        due_s = self._deadlines.next_due_s(begin_s, usual_s)
        return tokens_s, (due_s - begin_s) * HEADROOM - tokens_s

    # steps

    def begin(self, cost: int, now_s: float, num_rows: int = 0, joining: Collection[Request] = ()) -> None:
        """A step is launched whose prompts cost so much, and which brings so many requests a token.

        Prompts of `joining` are complete with it: they decode from the next step on.
        """
        work = _work(num_rows, self._contexts.num_tokens)
        expected_s = self._expected_s(cost, num_rows, work)
        self._free_s = (max(now_s, self._free_s) if self._running else now_s) + expected_s
        self._running.append(_Launched(cost, num_rows, work, now_s, expected_s, joining))
        if num_rows:
            self._deadlines.stepped(1)
            self._contexts.stepped(1)
        for prompts, own in ((self._beside, cost if num_rows else 0), (self._apart, 0 if num_rows else cost)):
            if prompts.is_refused or prompts.num_refused:
                prompts.stepped(num_rows > 0, own)
        for request in joining:
            self.join(request, self._free_s)

    def end(self, now_s: float) -> None:
        """The oldest step that runs is complete."""
        step = self._running.popleft()
        took_s = now_s - max(step.began_s, self._ended_s)
        self._ended_s = self._free_s = now_s
        for later in self._running:
            self._free_s += later.expected_s
        if self._deadlines.has_any:
            if step.cost:
                self._note_prompts(step, took_s)
            else:
                self._share.note_plain(took_s)
        self._learn(step, took_s)
        for request in step.joining:
            self._deadlines.correct(request, now_s, sum(later.num_rows > 0 for later in self._running))

    def pass_steps(self, num_rows: int, began_s: float, ends_s: Sequence[float]) -> None:
        """Be behind steps that brought tokens to so many requests, one after the other from `began_s` on.

        The same as to `begin` and `end` each. No step is launched.
        """
        work, num_steps = _work(num_rows, self._contexts.num_tokens), len(ends_s)
        first_s = began_s = max(began_s, self._ended_s)
        num_noted = 0
        while num_noted < num_steps:
            count = self._together - self._num_plain
            if count > num_steps - num_noted:
                count = num_steps - num_noted
            seconds = self._plain_s
            for end_s in ends_s[num_noted : num_noted + count]:
                seconds += end_s - began_s
                began_s = end_s
            self._plain_s = seconds
            grown = count * num_noted + count * (count - 1) // 2  # tokens of each: one more with each step
            self._note_tokens(count, count * work + num_rows * grown)
            num_noted += count
        self._share.note_plain(began_s - first_s)
        self._ended_s = self._free_s = began_s
        self._contexts.stepped(num_steps)
        self._deadlines.stepped(num_steps)
        for prompts in (self._beside, self._apart):
            if prompts.is_refused or prompts.num_refused:
                prompts.stepped(True, 0)

    def give_up(self) -> None:
        """The only step that runs will never be complete: its time says nothing."""
        if self._running.popleft().num_rows:
            self._deadlines.stepped(-1)
            self._contexts.stepped(-1)

    def prompt_s(self, cost: int) -> float:
        """Return how long prompts of such a cost take in a step of their own; infinite: nothing has been measured."""
        line = self._known(self._apart).line
        return line.at(cost) if line.is_known else math.inf

    def _note_prompts(self, step: _Launched, took_s: float) -> None:
        tokens_s = self._tokens.at(step.work) if step.num_rows else 0.0
        self._share.note(took_s, took_s - tokens_s)

    def _learn(self, step: _Launched, took_s: float) -> None:
        if not step.cost:
            self._plain_s += took_s
            self._note_tokens(1, step.work)
            return
        self._learn_tokens()
        if step.num_rows:
            self._learn_beside(step, took_s)
        else:
            self._apart.learn(step.cost, took_s, self._apart.line.reach)
        self._note_learned(1)

    def _learn_beside(self, step: _Launched, took_s: float) -> None:
        tokens_s, beside, known = self._tokens.at(step.work), self._beside, self._known(self._beside)
        floor_s = self._floor.beyond(step.work, tokens_s)
        if self._tokens.is_known and are_few(step.cost, self._widest, beside.read_s, floor_s):
            self._floor.learn(step.work, took_s)
        else:
            beside.learn(step.cost, max(0.0, took_s - tokens_s + beside.read_s), known.line.reach)

    def _note_learned(self, count: int) -> None:
        """So many more steps have been learned from: now and then others are to hear of it."""
        self._num_learned += count
        if self._num_learned >= self._parts_due:
            self._parts_due = self._num_learned + min(self._num_learned + 1, TOLD_EVERY)
            line = self._tokens
            seconds = line.usual(STEP_CONTEXT), line.slope_s, self._widest.slope_s
            self.step_parts_s = _rounded(seconds[0]), _rounded(seconds[1]), _rounded(seconds[2])

    def _note_tokens(self, num_steps: int, work: int) -> None:
        """Steps without prompts are over, whose seconds have been counted; all their work is told."""
        self._num_plain += num_steps
        self._plain_work += work
        if self._num_plain >= self._together:
            if self._together < TOGETHER:
                self._together += 1
            self._learn_tokens()

    def _learn_tokens(self) -> None:
        """Learn from the steps without prompts since the last time, by their mean: what they took is nearly a line."""
        count = self._num_plain
        if not count:
            return
        if not self._tokens.is_known:
            self._beside.line = StepLine(ORIGIN)  # what it has is of whole steps
        self._tokens.learn(self._plain_work / count, self._plain_s / count, count)
        self._beside.read_s = self._tokens.at(STEP_CONTEXT)
        self._num_plain = self._plain_work = 0
        self._plain_s = 0.0
        self._note_learned(count)

    def _expected_s(self, cost: int, num_rows: int, work: int) -> float:
        if not num_rows:
            return self._apart.line.at(cost)
        tokens_s = self._tokens.at(work)
        return tokens_s + self._known(self._beside).seconds_of(cost) if cost else tokens_s


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def coarse(number: int, num_bits: int) -> int:
    """Return a number that does not change with each step: no more than it, and the same in its first bits."""
    shift = max(0, number.bit_length() - num_bits)
    return number >> shift << shift


def _work(num_rows: int, context_tokens: int) -> int:
    """Return what it takes to bring so many requests a token."""
    return STEP_CONTEXT + ROW_CONTEXT * num_rows + context_tokens
