"""Sessions that clients open by name: the tokens of their turns, so that a turn sends only what is new. Pure.

A turn is kept under the id of its request once it has ended; another one goes on behind any of them, as in SGLang. What
is kept is tokens. KV is the prefix cache's, to which the router leads the turns of a session. Each owner has a few
sessions, each of a bounded length, and one that nobody uses for a while is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych.common.errors import InvalidRequest, Overloaded

TOKEN_TYPE: Final = "I"
MAX_OF_OWNER: Final = 64  # sessions
MAX_OF_ALL: Final = 4096
MAX_TURNS: Final = 256  # of a session
MAX_TOKENS: Final = 1 << 20  # of all turns of a session
IDLE_S: Final = 600.0
MAX_IDLE_S: Final = 3600.0
UNKNOWN: Final = "it was never opened here, was closed, or was not used for too long: open one"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A turn that has ended."""

    prompt: array[int]
    output: array[int]
    parent: str  # the turn that it followed; empty: none


@dataclass(slots=True, eq=False)
class _Session:
    max_tokens: int
    idle_s: float
    used_s: float
    turns: dict[str, _Kept] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.prompt) + len(each.output) for each in self.turns.values())

    def drop(self, name: str) -> None:
        """Forget a turn's followers, and theirs."""
        for child in [other for other, kept in self.turns.items() if kept.parent == name]:
            self.drop(child)
            del self.turns[child]


@dataclass(frozen=True, slots=True)
class Follow:
    """What a turn goes on behind, in SGLang's words."""

    session_id: str
    rid: str = ""  # the turn before it; empty: it begins anew
    offset: int = 0  # tokens of what was before that it goes on behind; 0: all
    replace: bool = False  # what had followed that turn is forgotten
    drop_previous_output: bool = False


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a session, while it runs."""

    before: array[int]  # tokens that its prompt begins with
    _session: _Session
    _name: str
    _parent: str
    _output: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))

    def take(self, token_ids: Sequence[int]) -> None:
        """Hear of more of its output."""
        self._output.extend(token_ids)

    def ended(self, prompt_ids: Sequence[int]) -> None:
        """Keep it, if the session has room: others may go on behind it."""
        session, length = self._session, len(prompt_ids) + len(self._output)
        if len(session.turns) < MAX_TURNS and session.num_tokens + length <= session.max_tokens:
            session.turns[self._name] = _Kept(array(TOKEN_TYPE, prompt_ids), self._output, self._parent)


class KeptSessions:
    """The sessions of one router process."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], _Session] = {}  # by owner and id

    def open(self, owner: str, session_id: str, max_tokens: int, idle_s: float, now_s: float) -> None:
        """Raises `InvalidRequest` if it is open, `Overloaded` if there are too many."""
        self._expire(now_s)
        if (owner, session_id) in self._sessions:
            raise InvalidRequest(f"the session {session_id!r} is open already: close it first", param="session_id")
        own = sum(each == owner for each, _ in self._sessions)
        if own >= MAX_OF_OWNER or len(self._sessions) >= MAX_OF_ALL:
            raise Overloaded(f"{own} sessions of yours are open, of at most {MAX_OF_OWNER}: close one, or come back")
        bounded = min(max_tokens, MAX_TOKENS)
        self._sessions[owner, session_id] = _Session(bounded, min(idle_s, MAX_IDLE_S), now_s)

    def close(self, owner: str, session_id: str) -> bool:
        """Return whether it was open. Turns that run go on."""
        return self._sessions.pop((owner, session_id), None) is not None

    def turn(self, owner: str, follow: Follow, name: str, now_s: float) -> Turn:
        """Return the turn `name` of a session. Raises `InvalidRequest`."""
        self._expire(now_s)
        session = self._sessions.get((owner, follow.session_id))
        if session is None:
            words = f"there is no session {follow.session_id!r}: {UNKNOWN}"
            raise InvalidRequest(words, param="session_params.id")
        session.used_s = now_s
        if follow.rid and follow.rid not in session.turns:
            words = f"the session has no turn {follow.rid!r} that has ended, and was kept: send the whole prompt"
            raise InvalidRequest(words, param="session_params.rid")
        if name in session.turns and not (follow.replace and not follow.rid):
            raise InvalidRequest(f"the session has a turn {name!r} already: give another rid", param="rid")
        if follow.replace:
            session.drop(follow.rid)
        return Turn(_before(session, follow), session, name, follow.rid)

    def _expire(self, now_s: float) -> None:
        gone = [key for key, each in self._sessions.items() if now_s - each.used_s > each.idle_s]
        for key in gone:
            del self._sessions[key]


def _before(session: _Session, follow: Follow) -> array[int]:
    if not follow.rid:
        return array(TOKEN_TYPE)
    kept = session.turns[follow.rid]
    whole = kept.prompt if follow.drop_previous_output else kept.prompt + kept.output
    return whole[: follow.offset] if follow.offset else whole
