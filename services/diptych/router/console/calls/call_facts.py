"""What is known of one call, small enough to be kept: of a call that is followed, or only of how it was routed. Pure.

Facts hold nothing that grows with a prompt or a fleet, and no message of a worker, which would keep the one that it
came in. Times are on the monotonic clock, but for one on the wall's.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diptych.common.members.roles import LegKind
from diptych.router.choose.explain import AttemptRecord, RequestRecord
from diptych.router.errors import OK
from diptych.router.tracing.record import MAX_OUTPUTS, AttemptTrace, CallTrace, Mark, Stage
from diptych.router.values.output import Usage, total_usage
from diptych.v1.worker_pb2 import LegStats

MAX_ATTEMPTS: Final = 32  # of an output that are kept: the last ones. Handing back may go on for long
MAX_WORDS: Final = 256  # of the outcome of an attempt, in characters: workers write them
GRPC_STATUSES: Final = (  # by the number of google.rpc.Code
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
FINISHED: Final = frozenset({"stop", "length"})  # outcomes of an attempt that ended well
FIXED_BYTES: Final = 3_000  # of the facts of a call, beside what is counted
ATTEMPT_BYTES: Final = 1_000
MARK_BYTES: Final = 160


class LegTimes(NamedTuple):
    """How long each part of a leg took on its worker, in microseconds."""

    queue_us: int
    compute_us: int
    transfer_us: int
    verify_us: int
    join_us: int
    tokenize_us: int = 0
    chunk_us: tuple[int, ...] = ()  # from the first step of the prompt to each later one


class AttemptFacts(NamedTuple):
    """One attempt."""

    asked_s: float  # when a pair was asked for
    begun_s: float
    first_token_s: float | None
    ended_s: float | None  # None: it runs
    outcome: str
    prefill_id: int
    decode_id: int
    prompt_tokens: int
    prompt: LegTimes | None  # of the leg that computes the prompt, if it has told
    decode: LegTimes | None  # likewise

    @property
    def is_failure(self) -> bool:
        return self.outcome.startswith("failed")


class CallFacts(NamedTuple):
    """One call."""

    request_id: str
    path: str
    tenant: str
    model: str
    adapter: str
    begun_s: float
    begun_unix_s: float
    ended_s: float | None  # None: it runs
    answered_s: float | None  # when the answer began
    status: int | None
    outcome: str  # empty: it runs
    marks: Sequence[Mark]
    writes: Sequence[Stage]
    outputs: Sequence[Sequence[AttemptFacts]]  # those of them that were begun, `MAX_OUTPUTS` at most
    num_attempts: int  # of all outputs
    usage: Usage  # so far
    token_s: array[float]
    trace_id: str

    @property
    def nbytes(self) -> int:
        """About how much memory they take; not less."""
        num_attempts = sum(map(len, self.outputs))
        num_marks = len(self.marks) + len(self.writes)
        return FIXED_BYTES + ATTEMPT_BYTES * num_attempts + MARK_BYTES * num_marks + 10 * len(self.token_s)

    @property
    def last_attempt(self) -> AttemptFacts | None:
        """The attempt that counts, of the output that was begun last."""
        return next((attempts[-1] for attempts in reversed(self.outputs) if attempts), None)

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any output was here."""
        times = [attempt.first_token_s for attempts in self.outputs for attempt in attempts]
        return min((at_s for at_s in times if at_s is not None), default=None)


def facts_of(call: CallTrace) -> CallFacts:
    """Return what is known of a call that is followed. If it goes on, the facts are for now only."""
    entry, status, ended_s = call.entry_point, call.status, call.ended_s
    return CallFacts(
        call.request_id,
        entry.path,
        call.tenant,
        call.model,
        call.adapter,
        call.begun_s,
        call.begun_ns / 1e9,
        ended_s,
        call.answered_s,
        GRPC_STATUSES.index(status) if isinstance(status, str) else status,
        "" if ended_s is None else call.outcome,
        call.marks,
        call.writes,
        tuple([_attempts(output.attempts) for output in call.outputs[:MAX_OUTPUTS] if output.attempts]),
        sum([len(output.attempts) for output in call.outputs]),
        _usage(call),
        call.token_s,
        call.trace_id,
    )


def routing_facts_of(records: Sequence[RequestRecord], wall_s: float) -> CallFacts:
    """Return what is known of a call that nobody followed, by the records of its requests, of which there is at least
    one. `wall_s` is what the wall's clock is ahead of the monotonic one.
    """
    attempts = [attempt for record in records for attempt in record.attempts]
    arrival_s = records[0].arrival_s
    is_over = all(record.is_over for record in records)
    ends_s = [attempt.ended_s for attempt in attempts if attempt.ended_s is not None]
    prompt_tokens = attempts[0].selection.request.prompt_len if attempts else 0
    cached_tokens = attempts[0].selection.work.cached_tokens if attempts else 0
    return CallFacts(
        request_id=records[0].request_id,
        path="",
        tenant="",
        model="",
        adapter="",
        begun_s=arrival_s,
        begun_unix_s=arrival_s + wall_s,
        ended_s=max(ends_s, default=arrival_s) if is_over else None,
        answered_s=None,
        status=None,
        outcome=_routing_outcome(records) if is_over else "",
        marks=(),
        writes=(),
        outputs=tuple(_routed(record) for record in records[:MAX_OUTPUTS] if record.attempts),
        num_attempts=len(attempts),
        usage=Usage(prompt_tokens, 0, cached_tokens),
        token_s=array("d"),
        trace_id="",
    )


def _attempts(attempts: Sequence[AttemptTrace]) -> tuple[AttemptFacts, ...]:
    return tuple([_facts(each.record, each.asked_s, each.stats) for each in attempts[-MAX_ATTEMPTS:]])


def _routed(record: RequestRecord) -> tuple[AttemptFacts, ...]:
    return tuple(_facts(attempt, attempt.begun_s, {}) for attempt in record.attempts[-MAX_ATTEMPTS:])


def _facts(record: AttemptRecord, asked_s: float, stats: Mapping[LegKind, LegStats]) -> AttemptFacts:
    selection, prompt, decode = record.selection, None, None
    for kind, told in stats.items():
        times = _times(told)
        if kind is LegKind.DECODE:
            decode = times
        else:
            prompt = times
    return AttemptFacts(
        asked_s,
        record.begun_s,
        record.first_token_s,
        record.ended_s,
        record.outcome[:MAX_WORDS],
        selection.pair.prefill_id,
        selection.pair.decode_id,
        selection.request.prompt_len,
        prompt,
        decode,
    )


def _times(told: LegStats) -> LegTimes:
    return LegTimes(
        told.queue_us,
        told.compute_us,
        told.transfer_us,
        told.verify_us,
        told.join_us,
        told.tokenize_us,
        tuple(told.chunk_us),
    )


def _usage(call: CallTrace) -> Usage:
    """As the client gets it, once that is known."""
    if len(call.outputs) == 1 and (end := call.outputs[0].end):
        return end.usage
    usages = [output.end.usage for output in call.outputs if output.end]
    if usages and len(usages) == len(call.outputs):
        return total_usage(usages, call.num_made)
    first = next((output.attempts[0].record for output in call.outputs if output.attempts), None)
    if first is None:
        return Usage(0, call.num_tokens, 0)
    return Usage(first.selection.request.prompt_len, call.num_tokens, first.selection.work.cached_tokens)


def _routing_outcome(records: Sequence[RequestRecord]) -> str:
    """Whether the answer was written nobody knows."""
    last = [record.attempts[-1].outcome if record.attempts else "unavailable" for record in records]
    bad = next((outcome for outcome in last if outcome not in FINISHED), None)
    if bad is None:
        return OK
    return "error" if bad.startswith("failed") else bad
