"""What the processes of a router and their parent tell each other of sessions. Pure.

A process asks (`Open`, `Close`, `Begin`, `Keep`) and is answered, once each, unless it says before that nobody waits
for it (`Leave`). All else is told, and nobody waits: requests of sessions that come and go, and how much room the pools
have as this process sees them, when that has changed.

A word is its length in four bytes, a line of JSON, and tokens, if it has any, as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import orjson

from diptych.common.errors import Conflict, DiptychError, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.router.values.kept_sessions import MAX_TOKENS, TOKEN_BYTES

MAX_PROBLEM_LEN: Final = 2000  # characters: workers of a large fleet have many reasons
SIZE_BYTES: Final = 4
MAX_BYTES: Final = (1 << 20) + TOKEN_BYTES * MAX_TOKENS  # of a word


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
    """A turn of a session begins: the answer has the tokens that it goes on behind. It lasts until `Leave`."""

    call: int
    model: int
    owner: str
    session_id: str
    rid: str
    offset: int
    replace: bool
    drop_previous_output: bool
    name: str


class Keep(NamedTuple):
    """A turn has ended."""

    call: int
    turn: int  # the call with which it began
    prompt_len: int
    tokens: bytes  # of prompt and output


class Come(NamedTuple):
    """A request of a session waits, or runs, from now on."""

    request: int
    owner: str
    session_id: str
    model: int


class Go(NamedTuple):
    """It has ended, with so much context; 0: nobody knows."""

    request: int
    context_tokens: int


class Pools(NamedTuple):
    """The share of the pools that a process may fill with sessions of a model, and why that is none."""

    model: int
    capacity_tokens: int
    problem: str  # empty: none; at most `MAX_PROBLEM_LEN` of it


class Answer(NamedTuple):
    """What came of a call: whether a session was there to be closed, or tokens; or of one that failed, the error."""

    call: int
    was_there: bool
    error: str = ""  # its class; empty: none
    text: str = ""
    about: Any = None  # what the class takes beside: seconds, or the name of a field
    tokens: bytes = b""


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


Call: TypeAlias = Open | Close | Begin | Keep
Word: TypeAlias = Call | Leave | Come | Go | Pools | Answer | Uncounted | Counted
_KINDS: Final[tuple[type[Any], ...]] = (Open, Close, Begin, Keep, Leave, Come, Go, Pools, Answer, Uncounted, Counted)
_NUMBERS: Final[Mapping[type[Any], int]] = {kind: number for number, kind in enumerate(_KINDS)}


class Reader(Protocol):
    """Where words come from, as `asyncio.StreamReader` is."""

    async def readexactly(self, n: int) -> bytes: ...


def encoded(word: Word) -> bytes:
    """Raises `ValueError` for what nobody would read."""
    fields, tokens = (word[:-1], word.tokens) if isinstance(word, Answer | Keep) else (word, b"")
    line = orjson.dumps([_NUMBERS[type(word)], *fields]) + b"\n"
    size = _checked(len(line) + len(tokens))
    return b"".join((size.to_bytes(SIZE_BYTES, "little"), line, tokens))


async def read_word(reader: Reader) -> Word:
    """Raises `EOFError` at the end of all words, and `ValueError` for what is none."""
    size = _checked(int.from_bytes(await reader.readexactly(SIZE_BYTES), "little"))
    line, _, tokens = (await reader.readexactly(size)).partition(b"\n")
    number, *fields = orjson.loads(line)
    kind = _KINDS[number]
    word: Word = kind(*fields, tokens) if kind in (Answer, Keep) else kind(*fields)
    return word


def _checked(size: int) -> int:
    if size > MAX_BYTES:
        raise ValueError(f"a word of {size} bytes")
    return size


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
