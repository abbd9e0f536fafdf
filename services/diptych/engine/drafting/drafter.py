"""Asks the sources how requests go on, and drafts as much of it as pays: the `Drafter` of `schedule.running`. Pure.

What a guess was worth is seen in the tokens that came, whether or not it was verified: so a request whose guesses don't
pay is asked about still, at no cost but that of asking, and has drafts again as soon as they do. Asking costs time too:
where that has not been worth it of late, twice as many tokens pass as before until the next time, up to what makes
asking a small share of a step. Nobody is asked about while it isn't known what steps take without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

from diptych.engine.drafting.ahead import AheadSource, Wanted
from diptych.engine.drafting.asking import Asking
from diptych.engine.drafting.budget import NO_PASSES, Passes, Shares, share_out
from diptych.engine.drafting.late_costs import NO_PASS, LateCosts
from diptych.engine.drafting.record import Record, RequestRecords
from diptych.engine.drafting.source import NO_GUESS, DraftSource, Guess
from diptych.engine.drafting.step_timer import Launched, StepTimer
from diptych.engine.drafting.survival import RequestSurvival, Survival
from diptych.engine.values.core_report import DraftReport, SourceCounts
from diptych.engine.values.limits import MAX_ROW_DRAFTS
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts, Step
from diptych.generation.request_groups import DRAFT_SOURCES

NOBODY: Final = -1
OFF: Final = "off"


@dataclass(slots=True)
class _Drafted:
    """What is known of one request."""

    request: Request
    sources: Sequence[int]  # that may guess, in the order in which they are asked
    records: RequestRecords
    guess: Guess = NO_GUESS  # the newest
    source: int = NOBODY  # whose it is
    num_before: int = 0  # tokens of the request when it was made
    num_ahead: int = 0  # of its tokens that a running step computed already
    num_drafts: int = 0  # of those behind them that were verified
    token_s: float = 0.0  # what a token took then, without drafts
    price: float = 0.0  # of the drafts that it has or would have: what they take, in its tokens
    survival: RequestSurvival = field(default_factory=RequestSurvival)
    asking: Asking = field(default_factory=Asking)


class _Rows(NamedTuple):
    """How many rows a source has had, with no draft, one, two and so on."""

    verified: list[int]
    accepted: list[int]  # likewise, of drafts that came true

    def add(self, num_verified: int, num_accepted: int) -> None:
        self.verified[num_verified] += 1
        self.accepted[num_accepted] += 1

    def by_place(self, source: str) -> SourceCounts:
        """Return how often a draft stood in each place: in all rows with as many or more."""
        verified, accepted = (list(accumulate(reversed(rows[1:])))[::-1] for rows in self)
        return SourceCounts(source, verified, accepted)


class SourceDrafter:
    """Drafts by several sources, by name, of which the first that has a guess is believed."""

    def __init__(
        self,
        sources: Mapping[str, DraftSource],
        clock: Callable[[], float],
        most_drafts: int,
        max_drafts: int = MAX_ROW_DRAFTS,
        ahead: AheadSource | None = None,
        late: LateCosts = NO_PASS,
    ) -> None:
        """A step has at most `most_drafts`, each request `max_drafts`. `clock` says what asking takes, in seconds.

        Of `DRAFT_SOURCES` one is asked: the request's choice, or else the first. `ahead` is the draft model among them.
        `late`: of states that see what came true.
        """
        named: Mapping[str, DraftSource] = sources if ahead is None else {**sources, ahead.name: ahead}
        self._ahead = ahead
        self._names = tuple(named)
        self._of_model = NOBODY if ahead is None else self._names.index(ahead.name)
        self._default = ahead.name if ahead else next((name for name in named if name in DRAFT_SOURCES), "")
        self._sources = tuple(named.values())
        self._survival = [Survival() for _ in self._sources]
        self._records = [Record() for _ in self._sources]
        self._rows = [_Rows([0] * (max_drafts + 1), [0] * (max_drafts + 1)) for _ in self._names]
        self._clock = clock
        self._most_drafts = most_drafts
        self._max_drafts = max_drafts
        self._steps = StepTimer(late)
        self._costs = self._steps.costs
        self._drafted: dict[int, _Drafted] = {}  # by room
        self._newest_s = 0.0  # of the step that is planned
        self._passes_s = 0.0  # of that, for passes of a draft model
        self._num_late = 0  # tokens that came true of rows with drafts, since a step was launched
        self._is_slower = False  # than others without guesses: the draft model computes it, too
        self._total_s = 0.0
        self._saved_s = 0.0
        self._num_asked = 0

    # drafts

    def propose(self, requests: Sequence[Request]) -> Drafts:
        """See `Drafter.propose`."""
        began_s = self._clock()
        known = [self._settled(request) for request in requests]
        if len(self._drafted) > len(requests):
            self._forget()
        is_known = self._costs.is_known(len(requests))
        asked = [each for each in known if self._ask(each)] if is_known else []
        if not is_known and self._ahead is not None:
            self._ahead.rest()
        chances = [self._chances(drafted) for drafted in asked]
        passes = self._passes(asked)
        shares = self._shares(asked, chances, len(requests), passes)
        self._note_asked(asked, shares, len(requests))
        counts, self._passes_s = shares.counts, 0.0
        if self._ahead is not None and passes.before:
            counts = self._computed(self._ahead, asked, counts, len(requests), passes)
        self._note_time(asked, self._clock() - began_s)
        pairs = zip(asked, counts, strict=True)
        return {each.request.room: each.guess.token_ids[: each.num_ahead + count] for each, count in pairs if count}

    def _shares(
        self, asked: Sequence[_Drafted], chances: list[Sequence[float]], num_requests: int, passes: Passes
    ) -> Shares:
        """Share out drafts, but to those with a bad record; say of all what they take and what they would bring."""
        shares = share_out(chances, num_requests, self._costs, self._most_drafts, passes)
        if not shares.extra_s:
            return shares
        share_s = shares.extra_s / sum(shares.counts) / (self._costs.at(num_requests) / num_requests)
        losers = []
        for row, (drafted, count) in enumerate(zip(asked, shares.counts, strict=True)):
            if count:
                drafted.price = count * share_s
                if not drafted.records.of(drafted.source).is_good:
                    losers.append(row)
                    self._refuse(drafted, count)
        if not losers:
            return shares
        for row in losers:
            chances[row] = ()
        return share_out(chances, num_requests, self._costs, self._most_drafts, passes)

    def _refuse(self, drafted: _Drafted, count: int) -> None:
        """Note what a request does not have. Of the draft model it is not even guessed."""
        if drafted.source == self._of_model:
            drafted.records.forgive(drafted.source)
        else:
            token_ids = drafted.guess.token_ids[: drafted.num_ahead + count]
            drafted.records.refuse(drafted.source, token_ids, drafted.num_before, drafted.price)
        drafted.price = 0.0

    def _passes(self, asked: Sequence[_Drafted]) -> Passes:
        """Return what guesses of the draft model take."""
        if self._ahead is None:
            return NO_PASSES
        rows = {row: each.num_ahead for row, each in enumerate(asked) if each.source == self._of_model}
        return Passes(rows, self._ahead.pass_s)

    def _computed(
        self, ahead: AheadSource, asked: Sequence[_Drafted], counts: Sequence[int], num_requests: int, passes: Passes
    ) -> Sequence[int]:
        """Have the draft model guess what it has promised, as far as it is wanted; return how many drafts there are."""
        promised, counts, began_s = list(passes.before), list(counts), self._clock()
        num_tried = ahead.trial(any(counts[row] for row in promised))
        if num_tried:
            row = promised[self._num_asked % len(promised)]
            counts[row] = min(num_tried, len(asked[row].guess.token_ids) - asked[row].num_ahead)
            asked[row].price = self._price(passes.before[row], counts[row], num_requests, passes.seconds)
        wanted = [row for row in promised if counts[row]]
        for row in set(promised).difference(wanted):
            asked[row].guess, asked[row].source = NO_GUESS, NOBODY
        if wanted:
            guesses = [Wanted(asked[row].request, asked[row].num_ahead + counts[row]) for row in wanted]
            for row, token_ids in zip(wanted, ahead.fulfil(guesses, self._clock), strict=True):
                asked[row].guess = Guess(token_ids, asked[row].guess.chances[: len(token_ids)])
            self._passes_s = self._clock() - began_s
            self._saved_s -= self._passes_s
        return counts

    def _price(self, num_before: int, num_drafts: int, num_requests: int, pass_s: float) -> float:
        """Return what drafts of the draft model for one request take, in its tokens, where no other one has some."""
        plain_s = self._costs.at(num_requests)
        took_s = self._costs.with_drafts(num_requests, num_drafts, 1 + num_drafts) + (num_before + num_drafts) * pass_s
        return max(0.0, took_s - plain_s) * num_requests / plain_s

    def _settled(self, request: Request) -> _Drafted:
        """Return what is known of a request, with what came of its last guess."""
        drafted = self._drafted.get(request.room)
        if drafted is None or drafted.request is not request:
            if drafted is not None:
                self._take_leave(drafted)
            drafted = _Drafted(request, self._sources_for(request), RequestRecords(self._records))
            self._drafted[request.room] = drafted
        drafted.records.compare(request)
        if drafted.source != NOBODY:
            self._settle(drafted)
        return drafted

    def _ask(self, drafted: _Drafted) -> bool:
        """Take a new guess, of which there may be none; return whether the request was to be asked about."""
        request = drafted.request
        if request.num_tokens < drafted.asking.ask_at or not drafted.sources:
            return False
        num_ahead = request.computed_len + 1 - request.num_tokens
        at_most = min(self._max_drafts + num_ahead, request.max_len - request.num_tokens - 1)
        if at_most <= num_ahead:
            return False
        began_s = self._clock()
        for at in drafted.sources:
            guess = self._sources[at].guess(request, at_most)
            if guess.token_ids:
                drafted.guess, drafted.source = guess, at
                drafted.num_before, drafted.num_ahead = request.num_tokens, num_ahead
                break
        drafted.asking.guessing_s = self._clock() - began_s
        return True

    def _note_time(self, asked: Sequence[_Drafted], took_s: float) -> None:
        """Note what it took to ask about these, with all that is done for it."""
        self._newest_s = took_s
        self._total_s += took_s
        common_s = took_s - self._passes_s - sum(each.asking.guessing_s for each in asked)
        for drafted in asked:
            drafted.asking.note_time(common_s / len(asked))

    def _sources_for(self, request: Request) -> Sequence[int]:
        """Return which sources may guess for a request: all but the texts' that it did not choose."""
        chosen = request.hints.speculate
        if chosen == OFF:
            return ()
        if chosen not in self._names:
            chosen = self._default
        return [at for at, name in enumerate(self._names) if name == chosen or name not in DRAFT_SOURCES]

    def _chances(self, drafted: _Drafted) -> Sequence[float]:
        if drafted.source == NOBODY:
            return ()
        said = drafted.guess.chances
        return self._survival[drafted.source].of(said, drafted.survival.factor)[drafted.num_ahead :]

    def _note_asked(self, asked: Sequence[_Drafted], shares: Shares, num_requests: int) -> None:
        """Say when to ask again, by what this was worth."""
        self._num_asked += len(asked)
        gained, plain_s = sum(shares.gains), self._costs.at(num_requests)
        for drafted, gain in zip(asked, shares.gains, strict=True):
            saved_s = shares.saved_s * gain / gained if gained else 0.0
            drafted.token_s = plain_s / num_requests
            drafted.asking.note_worth(saved_s, drafted.request.num_tokens, drafted.token_s)

    # what came of them

    def _settle(self, drafted: _Drafted) -> None:
        """Compare the newest guess with the tokens that came: those that were verified, and the one behind them."""
        request, guess, before = drafted.request, drafted.guess, drafted.num_before
        num_ahead = drafted.num_ahead if drafted.num_drafts else 0
        num_compared = min(len(guess.token_ids), num_ahead + drafted.num_drafts + 1)
        if request.num_tokens <= before:  # nothing came: it was retracted, or its step was given up
            num_compared = 0
        came = request.tokens[before : min(before + num_compared, request.num_tokens)].tolist()
        if request.has_ended:
            num_compared = len(came)
        num_came = _num_equal(guess.token_ids, came)
        if num_compared:
            expected = self._survival[drafted.source].learn(guess.chances[:num_compared], num_came)
            drafted.survival.learn(expected, num_came)
            num_accepted = min(max(0, num_came - num_ahead), drafted.num_drafts)
            if drafted.num_drafts:
                self._num_late += 0 if request.has_ended else 1 + num_accepted
                drafted.records.learn(drafted.source, num_accepted - drafted.price)
            self._rows[drafted.source].add(drafted.num_drafts, num_accepted)
            self._saved_s += num_accepted * drafted.token_s
        drafted.guess, drafted.source, drafted.num_drafts = NO_GUESS, NOBODY, 0
        drafted.price = 0.0

    def _forget(self) -> None:
        """Take leave of requests that have ended."""
        for drafted in [each for each in self._drafted.values() if each.request.has_ended]:
            self._take_leave(drafted)
            del self._drafted[drafted.request.room]

    def _take_leave(self, drafted: _Drafted) -> None:
        """Settle the last guess; the request's own sources learn from its answer, and no others."""
        if drafted.source != NOBODY:
            self._settle(drafted)
        for at in drafted.sources:
            self._sources[at].end(drafted.request)
        if self._ahead is not None:  # it notes what it misses of all requests, whoever guesses for them
            self._ahead.end(drafted.request)

    # steps

    def follows(self, step: Step) -> bool:
        """See `Drafter.follows`."""
        follows = self._ahead is not None and self._ahead.follows(step)
        self._is_slower = follows and self._ahead is not None and not self._ahead.follows_all
        return follows

    def row_behind(self, request: Request) -> bytes:
        """See `Drafter.row_behind`."""
        return b"" if self._ahead is None else self._ahead.row_behind(request)

    def go_on_behind(self, request: Request, row: bytes) -> None:
        """See `Drafter.go_on_behind`."""
        if self._ahead is not None:
            self._ahead.go_on_behind(request, row)

    def launched(self, step: Step, now_s: float) -> None:
        """See `Drafter.launched`."""
        drafts, rooms = step.drafts or {}, {request.room for request in step.decodes}
        for room, token_ids in drafts.items():
            self._drafted[room].num_drafts = len(token_ids)
        num_drafts = sum(map(len, drafts.values()))
        is_other = bool(step.chunks) or (self._is_slower and not num_drafts)
        launched = Launched(rooms, num_drafts, is_other, now_s, self._newest_s, self._passes_s, self._num_late)
        self._num_late = 0
        self._steps.launched(launched)

    def committed(self, now_s: float) -> None:
        """See `Drafter.committed`."""
        self._saved_s -= self._steps.committed(now_s)

    def given_up(self) -> None:
        """See `Drafter.given_up`."""
        self._steps.given_up()

    def report(self) -> DraftReport:
        """Say what has come of drafts since the start."""
        self._forget()
        held = sum(source.nbytes for source in self._sources)
        counts = [rows.by_place(name) for name, rows in zip(self._names, self._rows, strict=True)]
        return DraftReport(counts, self._num_asked, self._total_s, self._saved_s, held)


def _num_equal(guessed: Sequence[int], came: Sequence[int]) -> int:
    """Return how many of the first tokens are the same."""
    for at, (one, other) in enumerate(zip(guessed, came, strict=False)):
        if one != other:
            return at
    return min(len(guessed), len(came))
