"""What is noted of a call while it is served, for the spans that are made of it afterwards.

Notes are a few assignments; nothing here knows OpenTelemetry. Times are on the monotonic clock, but for one on the
wall's that the others are counted from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from diptych.common.members.roles import LegKind
from diptych.router.choose.explain import AttemptRecord
from diptych.router.output import End
from diptych.v1.worker_pb2 import LegStats

PARENT_FIELDS: Final = ("traceparent", "tracestate")  # of W3C's trace context, in headers and metadata
MAX_PARENT_LEN: Final = 512  # of each, by W3C's advice: it is sent with every span
REQUEST_ID: Final = "diptych.request_id"  # an attribute

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, Attribute]


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a call came in."""

    span_name: str
    attributes: Attributes
    status_attribute: str  # what the status of the answer is called there


@dataclass(frozen=True, slots=True)
class Stage:
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

    def note_stage(self, stage: Stage) -> None:
        """A part of the call is over."""

    def note_choices(self, num_made: int) -> None:
        """Note how many outputs are made of each prompt."""

    def note_outcome(self, outcome: str, status: str | int | None = None) -> None:
        """Note how the call ended; without `status`, that stays as it is."""

    def begin_output(self) -> OutputTrace:
        return OutputTrace()


NO_TRACE: Final = Trace()  # of a call that nobody follows


@dataclass(slots=True, eq=False)
class CallTrace(Trace):
    """One call of a client that is followed."""

    edge: Edge
    begun_s: float
    begun_ns: int  # the same moment on the wall's clock, since 1970
    parent: Mapping[str, str]  # what the client said of its own span
    attributes: dict[str, Attribute] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    outputs: list[OutputTrace] = field(default_factory=list)
    num_made: int = 1  # outputs of each prompt
    status: str | int | None = None  # None: there was no answer
    outcome: str = "error"  # as the metrics name it, once it is known
    ended_s: float = 0.0

    def note(self, found: Mapping[str, Attribute | None]) -> None:
        self.attributes |= known(found)

    def note_stage(self, stage: Stage) -> None:
        self.stages.append(stage)

    def note_choices(self, num_made: int) -> None:
        self.num_made = num_made

    def note_outcome(self, outcome: str, status: str | int | None = None) -> None:
        self.outcome = outcome
        self.status = self.status if status is None else status

    def begin_output(self) -> OutputTrace:
        self.outputs.append(OutputTrace())
        return self.outputs[-1]


def parent_of(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Return what headers or metadata say of the client's span."""
    return {name: value for name in PARENT_FIELDS if 0 < len(value := fields.get(name, "")) <= MAX_PARENT_LEN}


def known(found: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value."""
    return {name: value for name, value in found.items() if value is not None}
