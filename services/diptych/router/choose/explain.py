"""Why requests went where they did, and what came of it: the last few, kept for whoever asks.

Policies are pure, so a record keeps what the policy was told, and what all candidates would have cost is found when
somebody asks.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import TypedDict

from diptych.router.choose.policies import Plan
from diptych.router.choose.policies.beginning import computed_s
from diptych.router.choose.policies.cost import Cost, cost_of_pair, parts_of, prices_of, ttft_s
from diptych.router.choose.policies.policy import Candidates, Decision, HeldPrefix, RequestView, Worker
from diptych.router.values.failure import LegFailure
from diptych.router.workers.legs import Work
from diptych.router.workers.worker_view import Pair

MAX_PAIRS: Final = 64  # that are explained of a request
PAIRS_AT_ONCE: Final = 32  # of which the costs are made

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """A chosen pair, and all that the choice depended on."""

    plan: Plan
    candidates: Candidates
    request: RequestView
    pair: Pair

    @property
    def work(self) -> Work:
        request, prefill = self.request, self.candidates.workers[self.pair.prefill_id]
        return Work(request.prompt_len, prefill.cached_tokens, request.slo)

    @property
    def compute_s(self) -> float:
        """What computing the prompt was expected to take."""
        return computed_s(self.candidates.workers[self.pair.prefill_id], self.request.prompt_len)

    @property
    def ttft_s(self) -> float:
        """When the first token was to be expected."""
        return ttft_s(self.candidates, self.request, self.pair)

    @property
    def expected_ttft_s(self) -> float | None:
        """None: the policy did not care how much of the prompt is cached."""
        return self.ttft_s if self.plan.reads_prompt else None

    def decide_again(self) -> Decision:
        return self.plan.choose(self.candidates, self.request)


@dataclass(slots=True)
class AttemptRecord:
    """One attempt. Times on the monotonic clock."""

    selection: Selection
    room: int
    begun_s: float
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = "running"

    def end(self, outcome: str, now_s: float) -> None:
        """The first end counts."""
        if self.ended_s is None:
            self.outcome, self.ended_s = outcome, now_s


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    request_id: str
    arrival_s: float
    attempts: list[AttemptRecord] = field(default_factory=list)
    is_over: bool = False


class Attempt(TypedDict):
    """One choice of workers for a request, and what came of it. Times that did not come are null."""

    policy: str
    reason: str
    room: str
    prefill_instance: str
    decode_instance: str
    outcome: str
    dispatched_after_s: float
    predicted_ttft_s: float | None
    ttft_s: float | None
    duration_s: float | None
    prompt_tokens: int
    session: str
    workers: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    scores: dict[str, dict[str, float | None]]  # by leg and instance; JSON has null for infinity


class ExplainedRequest(TypedDict):
    """One request of a call."""

    attempts: list[Attempt]


class Explanation(TypedDict):
    """Why the requests of a call went where they did."""

    request_id: str
    requests: list[ExplainedRequest]


class Explanations:
    """The records of the last `size` requests."""

    def __init__(self, size: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=size)
        self.end = 0  # number of the next record: they are counted from 0

    def begin(self, request_id: str, arrival_s: float) -> RequestRecord:
        record = RequestRecord(request_id, arrival_s)
        self._records.append(record)
        self.end += 1
        return record

    def records(self, since: int = 0) -> Sequence[RequestRecord]:
        """Return those from a number on that are kept, the oldest first. They go on changing."""
        first = self.end - len(self._records)
        return tuple(itertools.islice(self._records, max(0, since - first), None))

    def find(self, request_id: str) -> Explanation | None:
        """Return what is known of a request, or of all that were made for one call; None if that is forgotten."""
        telling = self.told(request_id)
        while True:
            try:
                next(telling)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # what it tells

    def told(self, request_id: str) -> Generator[None, None, Explanation | None]:
        """Return what `find` does, and yield after each attempt: all pairs of a large fleet take a millisecond."""
        requests: list[ExplainedRequest] = []
        for record in [each for each in self._records if each.request_id == request_id]:
            attempts = []
            for attempt in tuple(record.attempts):
                attempts.append((yield from _attempt(attempt, record.arrival_s)))
                yield
            requests.append({"attempts": attempts})
        return {"request_id": request_id, "requests": requests} if requests else None


def failure_words(failure: LegFailure) -> str:
    return f"failed: {failure.leg.value} leg: {failure.code.name}: {failure.message}"


def _attempt(attempt: AttemptRecord, arrival_s: float) -> Generator[None, None, Attempt]:
    selection, decision = attempt.selection, attempt.selection.decide_again()
    yield
    pairs = yield from _costs(selection)
    workers = [_worker(worker) for worker in selection.candidates.workers.values()]
    yield
    return {
        "policy": selection.plan.name,
        "reason": decision.reason,
        "room": _hex(attempt.room),
        "prefill_instance": _hex(selection.pair.prefill_id),
        "decode_instance": _hex(selection.pair.decode_id),
        "outcome": attempt.outcome,
        "dispatched_after_s": attempt.begun_s - arrival_s,
        "predicted_ttft_s": selection.expected_ttft_s,
        "ttft_s": _since(attempt.begun_s, attempt.first_token_s),
        "duration_s": _since(attempt.begun_s, attempt.ended_s),
        "prompt_tokens": selection.request.prompt_len,
        "session": selection.request.session,
        "workers": workers,
        "pairs": pairs,
        "scores": {
            kind.value: {_hex(instance_id): score for instance_id, score in scores.items()}
            for kind, scores in decision.scores.items()
        },
    }


def _worker(worker: Worker) -> Json:
    load, learned = worker.load, worker.learned
    return {
        "instance": _hex(worker.instance_id),
        "cached_tokens": worker.cached_tokens,
        "loads": [load._asdict() for load in worker.loads],
        "held": None if worker.held is None else _held(worker.held),
        "queued_tokens": load.queued_tokens,
        "num_requests": load.num_requests,
        "free_tokens": load.free_tokens,
        "has_credit": load.has_credit,
        "prefill_s": learned.prefill._asdict(),
        "decode_s": learned.decode._asdict(),
    }


def _held(held: HeldPrefix) -> Json:
    return {"instance": _hex(held.instance_id), "num_tokens": held.num_tokens}


def _costs(selection: Selection) -> Generator[None, None, list[Json]]:
    """The cheapest first."""
    candidates, request = selection.candidates, selection.request
    prefills, decodes = parts_of(candidates, request)
    prices, found = prices_of(request, prefills.values(), decodes.values()), list[tuple[float, Pair, Cost]]()
    for number, pair in enumerate(candidates.pairs()):
        cost = cost_of_pair(candidates.workers[pair.prefill_id], pair, prefills, decodes, prices)
        found.append((cost.total_s, pair, cost))
        if number % PAIRS_AT_ONCE == 0:
            yield
    cheapest = heapq.nsmallest(MAX_PAIRS, found, key=operator.itemgetter(0))
    yield
    return [
        {**_pair(pair), **cost._asdict(), "ttft_s": cost.ttft_s, "total_s": total_s} for total_s, pair, cost in cheapest
    ]


def _pair(pair: Pair) -> Json:
    return {"prefill_instance": _hex(pair.prefill_id), "decode_instance": _hex(pair.decode_id)}


def _since(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - begin_s


def _hex(number: int) -> str:
    """64 bits do not fit into a JSON number."""
    return f"{number:016x}"
