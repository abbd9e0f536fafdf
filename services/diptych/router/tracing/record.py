"""What is noted of a call while it is served, and the spans that are made of it afterwards. Pure.

Notes are a few assignments; nothing here knows OpenTelemetry. Times are on the monotonic clock, but for one on the
wall's that the others are counted from. A mark says what a call has done since the one before it, so that nothing lies
between two of them.

Spans are made of the notes after the call's end: the exporter gives them ids, and the wall's clock. What happened on
workers is placed by the durations that they report, from the moment their leg was sent: workers need no exporter, and
no clock that agrees with another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from diptych.common.members.roles import LegKind
from diptych.router.values.output import End, total_usage

if TYPE_CHECKING:
    from diptych.router.choose.explain import AttemptRecord
    from diptych.v1.worker_pb2 import LegStats

PARENT_FIELDS: Final = ("traceparent", "tracestate")  # of W3C's trace context, in headers and metadata
MAX_PARENT_LEN: Final = 512  # of each, by W3C's advice: it is sent with every span
REQUEST_ID: Final = "diptych.request_id"  # an attribute
FAILURES: Final = frozenset({"deadline", "error", "unavailable"})  # outcomes that are not the client's doing
MAX_OUTPUTS: Final = 16  # of a call that get spans: a call for a thousand would hold up others
MAX_MARKS: Final = 64  # of a call; then the last one grows: there are as many prompts in a call as its client likes
MAX_TOKEN_TIMES: Final = 512  # of a call: its first tokens
MAX_WRITES: Final = 64  # of a call, of those that wait for the client
STAGES: Final[Mapping[LegKind, Sequence[str]]] = {  # of a leg, one after the other, as `LegStats` names them
    LegKind.PREFILL: ("tokenize", "queue", "compute", "transfer"),
    LegKind.DECODE: ("queue", "transfer", "verify", "join"),
    LegKind.LOCAL: ("tokenize", "queue", "compute"),
    LegKind.POOL: ("tokenize", "queue", "compute"),
    LegKind.ENCODE: ("queue", "compute"),
}

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, Attribute]
Mark: TypeAlias = tuple[str, float]  # a part of a call, and when it ended


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """Where a call came in."""

    span_name: str
    attributes: Attributes
    status_attribute: str  # what the status of the answer is called there
    path: str  # of the API, or the name of the method


class Stage(NamedTuple):
    """A part of a call that the router's metrics time, too."""

    name: str
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class AttemptTrace:
    """One attempt, with what its legs measure; they may say their last words after the request has ended."""

    asked_s: float  # when a pair was asked for
    record: AttemptRecord
    stats: Mapping[LegKind, LegStats]


@dataclass(slots=True)
class OutputTrace:
    """One of the outputs that a call makes."""

    attempts: list[AttemptTrace] = field(default_factory=list)
    end: End | None = None  # None: it did not get so far


class Trace:
    """Takes notes of a call, and keeps none of them."""

    __slots__ = ()

    def note(self, found: Mapping[str, Attribute | None]) -> None:
        """Note those attributes that have a value."""

    def note_origin(self, request_id: str, tenant: str) -> None:
        """Note what is known before the body is."""

    def note_parsed(self, is_stream: bool) -> None:
        """The request is understood."""

    def note_asked(self, *, tenant: str, model: str, adapter: str, num_made: int) -> None:
        """Note for whom it is, what it asks for, and how many outputs are made of each prompt."""

    def note_stage(self, name: str, begun_s: float, ended_s: float) -> None:
        """A part of the call is over that the metrics time, too."""

    def mark(self, name: str) -> None:
        """What came since the last mark is a part of the call, and over."""

    def note_outcome(self, outcome: str, status: str | int | None = None) -> None:
        """Note how the call ended; without `status`, that stays as it is."""

    def begin_output(self) -> OutputTrace:
        return OutputTrace()


NO_TRACE: Final = Trace()  # of a call that nobody follows


@dataclass(slots=True, eq=False)
class CallTrace(Trace):
    """One call of a client that is followed."""

    entry_point: EntryPoint
    begun_s: float
    begun_ns: int  # the same moment on the wall's clock, since 1970
    parent: Mapping[str, str]  # what the client said of its own span
    clock: Callable[[], float]  # the monotonic one
    attributes: dict[str, Attribute] = field(default_factory=dict)
    request_id: str = ""  # empty: it is not known yet
    tenant: str = ""  # never exported
    model: str = ""
    adapter: str = ""
    stages: list[Stage] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    outputs: list[OutputTrace] = field(default_factory=list)
    writes: list[Stage] = field(default_factory=list)  # of a stream, that waited for the client; the first ones
    token_s: array[float] = field(default_factory=lambda: array("d"))  # when tokens went out; the first ones
    num_tokens: int = 0  # that went out
    num_made: int = 1  # outputs of each prompt
    status: str | int | None = None  # None: there was no answer
    answered_s: float | None = None  # when the answer began
    outcome: str = "error"  # as the metrics name it, once it is known
    ended_s: float | None = None  # None: it runs
    is_exported: bool = False  # else nobody reads the attributes that only an export has
    trace_id: str = ""  # once it is exported

    def note(self, found: Mapping[str, Attribute | None]) -> None:
        self.attributes |= known(found)

    def note_origin(self, request_id: str, tenant: str) -> None:
        self.request_id = self.attributes[REQUEST_ID] = request_id
        self.tenant = tenant

    def note_parsed(self, is_stream: bool) -> None:
        self.attributes["gen_ai.request.stream"] = is_stream
        self.mark("parse")

    def note_asked(self, *, tenant: str, model: str, adapter: str, num_made: int) -> None:
        self.tenant, self.model, self.adapter, self.num_made = tenant, model, adapter, num_made
        self.mark("check")

    def note_stage(self, name: str, begun_s: float, ended_s: float) -> None:
        if self.is_exported:  # marks say the same
            self.stages.append(Stage(name, begun_s, ended_s))
        self._mark(name, ended_s)

    def mark(self, name: str) -> None:
        self._mark(name, self.clock())

    def _mark(self, name: str, at_s: float) -> None:
        marks = self.marks
        if marks and (marks[-1][0] == name or len(marks) == MAX_MARKS):
            marks.pop()
        marks.append((name, at_s))

    def note_tokens(self, count: int, at_s: float) -> None:
        """So many tokens have come, and go out."""
        self.num_tokens += count
        if count and (room := MAX_TOKEN_TIMES - len(self.token_s)) > 0:
            self.token_s.extend((at_s,) * min(count, room))

    def note_write(self, begun_s: float, duration_s: float) -> None:
        """What came at `begun_s` took its time to be written."""
        if len(self.writes) < MAX_WRITES:
            self.writes.append(Stage("write", begun_s, begun_s + duration_s))

    def note_status(self, status: int) -> None:
        """The answer begins."""
        self.status, self.answered_s = status, self.clock()

    def note_outcome(self, outcome: str, status: str | int | None = None) -> None:
        self.outcome = outcome
        self.status = self.status if status is None else status

    def begin_output(self) -> OutputTrace:
        self.outputs.append(OutputTrace())
        return self.outputs[-1]

    @property
    def end_s(self) -> float:
        """When it ended; when it runs: now."""
        return self.clock() if self.ended_s is None else self.ended_s


def parent_of(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Return what headers or metadata say of the client's span."""
    return {name: value for name in PARENT_FIELDS if 0 < len(value := fields.get(name, "")) <= MAX_PARENT_LEN}


def known(found: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value."""
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a span."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a call, and its own parts. Times on the monotonic clock."""

    name: str
    begun_s: float
    ended_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    children: Sequence[Span] = ()
    events: Sequence[Event] = ()
    is_failure: bool = False


def span_of(call: CallTrace) -> Span:
    """Return the span of the whole call, without its parts: not every call is sampled."""
    found = {
        **call.entry_point.attributes,
        **call.attributes,
        call.entry_point.status_attribute: call.status,
        **_usage(call),
        "gen_ai.response.finish_reasons": [output.end.finish.value for output in call.outputs if output.end] or None,
        "diptych.attempts": sum(len(output.attempts) for output in call.outputs),
        "diptych.outcome": call.outcome,
        "error.type": None if call.outcome == "ok" else call.outcome,
    }
    is_failure = call.outcome in FAILURES
    return Span(call.entry_point.span_name, call.begun_s, call.end_s, known(found), is_failure=is_failure)


def parts_of(call: CallTrace) -> list[Span]:
    """Return the spans below that of the call."""
    stages = [Span(stage.name, stage.begun_s, stage.ended_s) for stage in call.stages]
    outputs = [output for output in call.outputs if output.attempts]
    return [*stages, *(_output(output, call.end_s) for output in outputs[:MAX_OUTPUTS])]


def _usage(call: CallTrace) -> dict[str, Attribute]:
    """The counts that the client gets: a prompt counts once, however many outputs were made of it."""
    usages = [output.end.usage for output in call.outputs if output.end]
    if not usages:
        return {}
    total = total_usage(usages, call.num_made)
    return {
        "gen_ai.usage.input_tokens": total.prompt_tokens,
        "gen_ai.usage.output_tokens": total.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": total.cached_tokens,
    }


def _output(output: OutputTrace, end_s: float) -> Span:
    attempts = [part for attempt in output.attempts for part in _attempt(attempt, end_s)]
    found: dict[str, Attribute] = {"diptych.attempts": len(output.attempts)}
    if output.end is not None:
        found["gen_ai.usage.output_tokens"] = output.end.usage.completion_tokens
    return Span("generate", attempts[0].begun_s, max(part.ended_s for part in attempts), found, attempts)


def _attempt(attempt: AttemptTrace, end_s: float) -> tuple[Span, Span]:
    """Return the choice of a pair, and what came of it."""
    record = attempt.record
    ended_s = end_s if record.ended_s is None else record.ended_s
    pair, plan = record.selection.pair, record.selection.plan
    found = {
        "diptych.prefill_instance": _hex(pair.prefill_id),
        "diptych.decode_instance": _hex(pair.decode_id),
        "diptych.room": _hex(record.room),
        "diptych.policy": plan.name,
        "diptych.expected_ttft_s": record.selection.expected_ttft_s,
        "diptych.outcome": record.outcome,
    }
    events = () if record.first_token_s is None else (Event("first_token", record.first_token_s),)
    failed = record.outcome.startswith("failed")
    legs = tuple(_legs(attempt, ended_s))
    choice = Span("select", attempt.asked_s, record.begun_s, {"diptych.policy": plan.name})
    return choice, Span("attempt", record.begun_s, ended_s, known(found), legs, events, failed)


def _legs(attempt: AttemptTrace, ended_s: float) -> Iterator[Span]:
    pair = attempt.record.selection.pair
    both = {LegKind.PREFILL: pair.prefill_id, LegKind.DECODE: pair.decode_id}
    alone = LegKind.POOL if LegKind.POOL in attempt.stats else LegKind.LOCAL
    for kind, instance_id in ({alone: pair.prefill_id} if pair.is_local else both).items():
        yield _leg(kind, instance_id, attempt.stats.get(kind), attempt.record.begun_s, ended_s)


def _leg(kind: LegKind, instance_id: int, stats: LegStats | None, begun_s: float, ended_s: float) -> Span:
    """Without `stats` nothing is known of it: it was cut off, or its worker is gone."""
    attributes: dict[str, Attribute] = {"diptych.instance": _hex(instance_id)}
    if stats is None:
        return Span(kind.value, begun_s, ended_s, attributes)
    attributes |= {"diptych.cached_tokens": stats.cached_tokens, "diptych.bytes_moved": stats.bytes_moved}
    stages = list(_stages(kind, stats, begun_s))
    if kind is LegKind.PREFILL and stages:
        ended_s = stages[-1].ended_s  # long before the attempt
    return Span(kind.value, begun_s, ended_s, attributes, stages)


def _stages(kind: LegKind, stats: LegStats, begun_s: float) -> Iterator[Span]:
    """Those that took any time, under the names that they have in the metrics."""
    role = "decode" if kind is LegKind.DECODE else "prefill"
    for stage in STAGES[kind]:
        duration_us = getattr(stats, f"{stage}_us")
        if duration_us:
            yield Span(f"{role}_{stage}", begun_s, begun_s + duration_us / 1e6)
            begun_s += duration_us / 1e6


def _hex(number: int) -> str:
    return f"{number:016x}"
