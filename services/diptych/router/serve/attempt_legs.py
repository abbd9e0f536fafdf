"""What the legs of an attempt say: merged into one run of tokens, and how the attempt ends. Pure.

The attempt ends when the leg that decodes ended and no token is missing, or with the first failure, which aborts the
other leg at once. A leg that its peer aborted is not believed for a moment: the peer's own words say more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.common.members.roles import LegKind
from diptych.generation import insight as insights
from diptych.generation.codec import FINISH_TO_WIRE, insight_from_wire, logprobs_from_wire
from diptych.generation.finish import Finish
from diptych.generation.insight import Insight
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.output import FailureCode
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import NOTHING_PREDICTED, Predicted
from diptych.v1.worker_pb2 import LegOutput, LegStats

REASON_GRACE_S: Final = 1.0  # a leg that its peer aborted waits this long for the peer's own words

_FINISH: Final[Mapping[int, Finish]] = {FINISH_TO_WIRE[each]: each for each in (Finish.STOP, Finish.LENGTH)}
_CODES: Final = {code.value: code for code in FailureCode}


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive output tokens of one leg."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None = None
    insight: Insight | None = None

    @property
    def end(self) -> int:
        return self.first_index + len(self.token_ids)

    def starting_at(self, index: int) -> Run:
        """Return the part from output `index` on."""
        count = index - self.first_index
        logprobs = None if self.logprobs is None else self.logprobs.span(count, len(self.token_ids))
        insight = None if self.insight is None else self.insight.span(count, len(self.token_ids))
        return Run(index, self.token_ids[count:], logprobs, insight)


class Merger:
    """Takes runs of tokens in any order and gives them back in theirs, each token once. Pure.

    Rule: prefill gives output token 0, decode the ones after it; a leg that is alone gives all. Two legs arrive over
    two connections, so decode may be first: its tokens are held until token 0 is here. A token that was taken already
    is dropped.

    Tokens are copied out of their runs: a run may be part of a message with those of many requests, which must not
    stay for a client that is slow to take its own.
    """

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # of those
        self._insight: list[Insight] = []  # likewise
        self._held: list[Run] = []
        self.num_tokens = 0  # ready so far, with those that were taken

    @property
    def has_gap(self) -> bool:
        """A token is missing before some that are held."""
        return bool(self._held)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def ready(self) -> Sequence[int]:
        """The tokens that are next."""
        return self._ready

    def accept(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None = None,
        insight: Insight | None = None,
    ) -> None:
        """Take a run, from output `first_index` on."""
        if first_index == self.num_tokens and not self._held:
            self._make_ready(token_ids, logprobs, insight)
        elif token_ids:
            self._sort_in(Run(first_index, list(token_ids), logprobs, insight))

    def pop(self) -> tuple[list[int], TokenLogprobs | None]:
        """Return the tokens that are next, and their log-probabilities if they have them."""
        ready, self._ready = self._ready, []
        if not self._logprobs:
            return ready, None
        logprobs, self._logprobs = self._logprobs, []
        return ready, join(logprobs)

    def pop_insight(self) -> Insight | None:
        """Return what is told of the tokens that `pop` gave last."""
        if not self._insight:
            return None
        told, self._insight = self._insight, []
        return insights.join(told)

    def _make_ready(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None, insight: Insight | None) -> None:
        self._ready.extend(token_ids)
        self.num_tokens += len(token_ids)
        if logprobs is not None and token_ids:
            self._logprobs.append(logprobs)
        if insight is not None and token_ids:
            self._insight.append(insight)

    def _sort_in(self, run: Run) -> None:
        self._held.append(run)
        if run.first_index > self.num_tokens:  # so are all that are held
            return
        waiting = []
        for held in sorted(self._held, key=lambda held: held.first_index):
            if held.first_index > self.num_tokens:
                waiting.append(held)
            elif held.end > self.num_tokens:
                rest = held.starting_at(self.num_tokens)
                self._make_ready(rest.token_ids, rest.logprobs, rest.insight)
        self._held = waiting


class _Row(NamedTuple):
    """Guesses that were verified in one row of a step."""

    first_index: int  # of the output: the first token that came of it
    num_drafts: int
    num_accepted: int

    def within(self, num_tokens: int) -> Predicted:
        """Return what of it is part of an output of so many tokens: rejected is what such a token came instead of."""
        num_shown = max(0, num_tokens - self.first_index)
        is_whole = num_shown > 0 and num_shown >= self.num_accepted
        rejected = self.num_drafts - self.num_accepted if is_whole else 0
        return Predicted(min(self.num_accepted, num_shown), rejected)


class GuessedRows:
    """What came of guesses in an output, of which the tokens that were taken last may be cut off yet. Pure."""

    def __init__(self) -> None:
        self._before = NOTHING_PREDICTED
        self._newest: list[_Row] = []

    def add(self, first_index: int, num_drafts: int, num_accepted: int) -> None:
        self._newest.append(_Row(first_index, num_drafts, num_accepted))

    def keep(self, num_tokens: int) -> None:
        """So many tokens are part of the output for good."""
        for row in self._newest:
            if row.first_index < num_tokens:
                self._before += row.within(num_tokens)
        self._newest = [row for row in self._newest if row.first_index >= num_tokens]

    def within(self, num_tokens: int) -> Predicted:
        """Return the counts of an output of so many tokens, no fewer than are to be kept."""
        return sum((row.within(num_tokens) for row in self._newest), self._before)


class AttemptLegs:
    """The legs of one attempt, as far as they are known.

    `abort` has a leg aborted that is open; it may do so again. It must not hold whoever holds the legs: each request
    would leave a cycle, which keeps its objects and the messages of its workers until Python searches for garbage.
    """

    def __init__(self, kinds: Iterable[LegKind], abort: Callable[[LegKind], None]) -> None:
        self.open = set(kinds)
        self.told: set[LegKind] = set()  # legs that ended well, and said all that they measured
        self.stats: dict[LegKind, LegStats] = {}
        self.merger = Merger()
        self.prompt_logprobs: TokenLogprobs | None = None
        self.vector = b""
        self.guessed = GuessedRows()
        self.finish: Finish | None = None
        self.failure: LegFailure | None = None
        self._abort = abort
        self._suspected: LegFailure | None = None  # the failure, unless the other leg knows better

    @property
    def is_complete(self) -> bool:
        return self.finish is not None and self.merger.num_tokens > 0 and not self.merger.has_gap

    @property
    def has_ended(self) -> bool:
        return self.is_complete or self.failure is not None

    def begin(self, kind: LegKind) -> None:
        """A further leg is started."""
        self.open.add(kind)

    def receive(self, kind: LegKind, output: LegOutput) -> LegFailure | None:
        """Take what a leg says. Return a failure to call `settle` with after `REASON_GRACE_S`, and not before."""
        if output.HasField("stats"):
            self.stats[kind] = output.stats
        if output.HasField("prompt_logprobs"):
            self.prompt_logprobs = logprobs_from_wire(output.prompt_logprobs)
        if output.vector:
            self.vector = output.vector
        if output.drafts:
            self.guessed.add(output.first_index, output.drafts, output.accepted_drafts)
        logprobs = logprobs_from_wire(output.logprobs) if output.HasField("logprobs") else None
        self.merger.accept(output.first_index, output.token_ids, logprobs, insight_from_wire(output))
        if output.finish_reason or output.HasField("error"):
            return self._end(kind, output)
        return None

    def pop(self) -> tuple[list[int], TokenLogprobs | None]:
        """Return the tokens that are next, as `Merger.pop`: those before them are part of the output."""
        self.guessed.keep(self.merger.num_tokens - len(self.merger.ready))
        return self.merger.pop()

    def lose(self, kind: LegKind, reason: str) -> None:
        """The worker is gone."""
        self.open.discard(kind)
        self._fail(LegFailure(kind, FailureCode.PEER_LOST, reason, session_lost=True))

    def settle(self, failure: LegFailure) -> None:
        """The first reason counts."""
        if self.failure is None and not self.is_complete:
            self.failure = failure
            self.close()

    def close(self) -> None:
        """Abort what is still open, unless the request is complete: then prefill is about to end by itself."""
        if self.is_complete and not self.failure:
            return
        for kind in self.open:
            self._abort(kind)

    def _end(self, kind: LegKind, output: LegOutput) -> LegFailure | None:
        """Return the failure that the other leg may know better, if any."""
        self.open.discard(kind)
        suspected = None
        if output.finish_reason not in _FINISH:
            code = _CODES.get(output.error.code, FailureCode.INTERNAL)
            suspected = self._fail(LegFailure(kind, code, output.error.message))
        else:
            self.told.add(kind)
            if kind is not LegKind.PREFILL:
                self.finish = _FINISH[output.finish_reason]
        if self._suspected and not self.open:
            self.settle(self._suspected)
        return suspected

    def _fail(self, failure: LegFailure) -> LegFailure | None:
        """Take a leg's failure: abort the other leg, and settle on the reason that says most, or return it."""
        if failure.leg is LegKind.PREFILL and not self._needs_prefill():
            return None
        if failure.code is FailureCode.ABORTED and self.open:
            self._suspected = failure
            for other in self.open:
                self._abort(other)
            return failure
        self.settle(failure)
        return None

    def _needs_prefill(self) -> bool:
        """Once decode has produced a token or has ended, and token 0 is here, prefill has done its part."""
        return self.merger.num_tokens < 1 or (self.merger.num_tokens < 2 and self.finish is None)
