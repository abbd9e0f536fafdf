"""What the processes of a router and their parent tell each other of sessions: a line of JSON each. Pure.

A process asks (`Open`, `Close`) and is answered, once each, unless it says before that nobody waits for it (`Leave`).
All else is told, and nobody waits: requests of sessions that begin and end, and how much room the pools have as this
process sees them, whenever the parent wants to know (`Tell`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from diptych.common.errors import Conflict, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable

MAX_PROBLEM_LEN: Final = 2000  # characters: a line is read up to 64 KiB, and workers of a large fleet have many reasons


class Open(NamedTuple):
    """A client opens a session."""

    call: int
    owner: str
    session_id: str
    max_tokens: int
    idle_s: float
    expected_tokens: int
    model: int
    wait_s: float


class Leave(NamedTuple):
    """Nobody waits for this any more."""

    call: int


class Close(NamedTuple):
    """A client closes a session."""

    call: int
    owner: str
    session_id: str


class Begin(NamedTuple):
    """A request of a session runs from now on."""

    request: int
    owner: str
    session_id: str
    model: int


class End(NamedTuple):
    """It has ended, with so much context; 0: nobody knows."""

    request: int
    context_tokens: int


class Pools(NamedTuple):
    """The share of the pools that a process may fill with sessions of a model, and why that is none."""

    model: int
    capacity_tokens: int
    problem: str  # empty: none; at most `MAX_PROBLEM_LEN` of it


class Answer(NamedTuple):
    """What came of a call: whether a session was there to be closed; or of one that failed, the error."""

    call: int
    was_there: bool
    error: str = ""  # its class; empty: none
    text: str = ""
    about: Any = None  # what the class takes beside: seconds, or the name of a field


class Tell(NamedTuple):
    """The parent wants to know of the pools."""


class Uncounted(NamedTuple):
    """Another process shows from now on what the parent counts."""


class Counted(NamedTuple):
    """What the parent has counted, for the metrics of one of the processes: the fields of `LineUsage`."""

    num_waiting: int
    num_in: int
    num_tokens: int
    capacity_tokens: int
    num_admitted: int
    num_given_up: int
    num_expired: int
    waited_s: float


Word: TypeAlias = Open | Leave | Close | Begin | End | Pools | Answer | Tell | Uncounted | Counted
_KINDS: Final[tuple[type[Any], ...]] = (Open, Leave, Close, Begin, End, Pools, Answer, Tell, Uncounted, Counted)
_NUMBERS: Final[Mapping[type[Any], int]] = {kind: number for number, kind in enumerate(_KINDS)}


def encoded(word: Word) -> bytes:
    return orjson.dumps([_NUMBERS[type(word)], *word]) + b"\n"


def decoded(line: bytes) -> Word:
    number, *fields = orjson.loads(line)
    word: Word = _KINDS[number](*fields)
    return word


def failed(call: int, error: DiptychError) -> Answer:
    """Return the answer to a call that ended with this."""
    match error:
        case Unavailable() | Overloaded():
            return Answer(call, False, type(error).__name__, str(error), error.retry_after_s)
        case InvalidRequest():
            return Answer(call, False, "InvalidRequest", str(error), error.param)
        case Conflict():
            return Answer(call, False, "Conflict", str(error))
    return Answer(call, False, "InternalError", str(error))


def failure_in(answer: Answer) -> DiptychError | None:
    """Return the error that an answer tells of."""
    match answer.error:
        case "":
            return None
        case "Unavailable":
            return Unavailable(answer.text, retry_after_s=answer.about)
        case "Overloaded":
            return Overloaded(answer.text, retry_after_s=answer.about)
        case "InvalidRequest":
            return InvalidRequest(answer.text, param=answer.about)
        case "Conflict":
            return Conflict(answer.text)
    return InternalError(answer.text)
