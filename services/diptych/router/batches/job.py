"""What a batch is, as its log tells: a fold over entries in the order of their numbers. Pure: it is told the time.

Rule: whoever appends entry N + 1 has read all up to N, as a name can be taken only once. So entries are in one order
for everybody, and the holder of a batch is whoever claimed it last: what another one wrote on a stale view is not in
the log. Clocks decide when a batch may be claimed, and nothing else. A line has the first result that the log names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import orjson

DONE: Final = 1
FAILED: Final = 2
MAX_LEASE_S: Final = 3600.0  # however long a process says that it holds a batch: its clock may jump


class Spec(NamedTuple):
    """What a client asked for; nothing of it ever changes."""

    batch_id: str
    tenant: str  # the name of the key that made it
    endpoint: str
    input_file_id: str
    created_s: float  # since 1970, as all times here
    window_s: float  # after that it expires
    completion_window: str  # in the client's words
    metadata: Mapping[str, str] | None

    @property
    def expires_s(self) -> float:
        return self.created_s + self.window_s


class Problem(NamedTuple):
    """Something that is wrong with the input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Ending(enum.StrEnum):
    """Why no line is run any more."""

    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"  # its input is lost


@dataclass(frozen=True, slots=True)
class Claimed:
    """Who wrote it works on the batch; by renewing it, still does."""

    until_s: float  # then another one may; by who leaves: at once


@dataclass(frozen=True, slots=True)
class Validated:
    """All lines can be read."""

    total: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Some can't: nothing will be run."""

    problems: Sequence[Problem]


@dataclass(frozen=True, slots=True)
class Results:
    """Lines have been run; their results are in an object that was written before."""

    part: str
    done: Sequence[int]
    failed: Sequence[int]
    until_s: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client wants no more of it. Anybody may write it."""


@dataclass(frozen=True, slots=True)
class Closed:
    """No line is run any more: what the files will say is settled, and what they are called."""

    ending: Ending
    output_file_id: str
    error_file_id: str
    problems: Sequence[Problem] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The files are there, unless they would be empty."""

    has_output: bool
    has_errors: bool


Body = Claimed | Validated | Refused | Results | Cancelled | Closed | Ended
_BODIES: Final[Mapping[str, type[Body]]] = {
    body.__name__: body for body in (Claimed, Validated, Refused, Results, Cancelled, Closed, Ended)
}


class Entry(NamedTuple):
    """An entry of a log."""

    by: str  # whose: a process while it runs
    at_s: float
    token: str  # by which its writer knows it again
    body: Body

    def encode(self) -> bytes:
        said = {"kind": type(self.body).__name__, "by": self.by, "at_s": self.at_s, "token": self.token}
        return orjson.dumps({**said, "body": self.body}, default=list)

    @classmethod
    def decode(cls, data: bytes) -> Entry:
        said = orjson.loads(data)
        return cls(said["by"], said["at_s"], said["token"], _body(said["kind"], said["body"]))


def _body(kind: str, fields: dict[str, Any]) -> Body:
    if kind == Refused.__name__:
        return Refused([Problem(*problem) for problem in fields["problems"]])
    if kind == Closed.__name__:
        problems = [Problem(*problem) for problem in fields.get("problems", ())]
        fields = {**fields, "ending": Ending(fields["ending"]), "problems": problems}
    return _BODIES[kind](**fields)


class Step(enum.Enum):
    """What is to be done next with a batch."""

    VALIDATE = "validate"
    RUN = "run"
    CLOSE = "close"
    FINISH = "finish"  # write the files
    NOTHING = "nothing"


@dataclass(slots=True)
class Job:
    """A batch, as far as its log was read."""

    spec: Spec
    num_entries: int = 0
    holder: str = ""
    until_s: float = 0.0
    total: int = 0  # lines that are requests
    num_done: int = 0
    num_failed: int = 0
    parts: list[str] = field(default_factory=list)  # that hold results, in order
    problems: Sequence[Problem] = ()
    closed: Closed | None = None
    ended: Ended | None = None
    validated_s: float | None = None
    refused_s: float | None = None
    cancelled_s: float | None = None
    closed_s: float | None = None
    ended_s: float | None = None
    _lines: bytearray = field(default_factory=bytearray)  # what became of each, by number

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self.refused_s is not None

    @property
    def lines_run(self) -> Sequence[int]:
        """The lines that have their results."""
        return [line for line, value in enumerate(self._lines) if value]

    @property
    def without_lines(self) -> Job:
        """What a client sees of it, and no more: a batch that is over is kept in memory so."""
        return replace(self, parts=[], _lines=bytearray())

    @property
    def status(self) -> str:
        """In OpenAI's words."""
        if self.refused_s is not None:
            return "failed"
        if self.ended is not None and self.closed is not None:
            return self.closed.ending.value
        if self.cancelled_s is not None and (self.closed is None or self.closed.ending is Ending.CANCELLED):
            return "cancelling"
        if self.closed is not None:
            return "finalizing"
        return "validating" if self.validated_s is None else "in_progress"

    def is_free(self, now_s: float) -> bool:
        """Whether somebody may claim it."""
        return not self.is_over and now_s >= self.until_s

    def is_run(self, line: int) -> bool:
        """Whether a line has its result."""
        return line < len(self._lines) and self._lines[line] != 0

    def next_step(self, now_s: float) -> Step:
        """Return what its holder is to do."""
        if self.is_over:
            return Step.NOTHING
        if self.closed is not None:
            return Step.FINISH
        if self.cancelled_s is not None:
            return Step.CLOSE
        if self.validated_s is None:
            return Step.VALIDATE
        is_run = self.num_done + self.num_failed >= self.total
        return Step.CLOSE if is_run or now_s >= self.spec.expires_s else Step.RUN

    def ending(self, now_s: float) -> Ending:
        """Return what closing it now would be."""
        if self.cancelled_s is not None:
            return Ending.CANCELLED
        is_run = self.num_done + self.num_failed >= self.total
        return Ending.COMPLETED if is_run else Ending.EXPIRED

    def apply(self, entry: Entry) -> None:
        """Take in the next entry. One that can't count changes nothing."""
        self.num_entries += 1
        body = entry.body
        if self.is_over:
            return
        if isinstance(body, Claimed):
            self._claim(entry, body)
        elif isinstance(body, Cancelled):
            self.cancelled_s = self.cancelled_s or entry.at_s
        elif entry.by == self.holder:
            self._advance(entry.at_s, body)

    def _claim(self, entry: Entry, claim: Claimed) -> None:
        if entry.by == self.holder or entry.at_s >= self.until_s:
            self.holder, self.until_s = entry.by, min(claim.until_s, entry.at_s + MAX_LEASE_S)

    def _advance(self, at_s: float, body: Body) -> None:
        if isinstance(body, Ended):
            self.ended, self.ended_s = (body, at_s) if self.closed is not None else (None, None)
        elif self.closed is not None:
            return
        elif isinstance(body, Validated):
            self.total, self.validated_s = body.total, at_s
        elif isinstance(body, Refused):
            self.problems, self.refused_s = body.problems, at_s
        elif isinstance(body, Results):
            self._on_results(at_s, body)
        elif isinstance(body, Closed):
            self.closed, self.closed_s, self.problems = body, at_s, body.problems

    def _on_results(self, at_s: float, results: Results) -> None:
        self.until_s = min(results.until_s, at_s + MAX_LEASE_S)
        self.parts.append(results.part)
        self.num_done += self._mark(results.done, DONE)
        self.num_failed += self._mark(results.failed, FAILED)

    def _mark(self, lines: Sequence[int], value: int) -> int:
        """Return how many of them had no result yet."""
        new = [line for line in dict.fromkeys(lines) if not self.is_run(line)]
        if new and max(new) >= len(self._lines):
            self._lines.extend(bytes(max(new) + 1 - len(self._lines)))
        for line in new:
            self._lines[line] = value
        return len(new)
