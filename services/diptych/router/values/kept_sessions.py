"""Sessions that clients open by name: the tokens of their turns, so that a turn sends only what is new. Pure.

A turn is kept under the id of its request once it has ended; another one goes on behind any of them, as in SGLang. What
is kept is tokens. KV is the prefix cache's, to which the router leads the turns of a session. Each owner has a few
sessions, each of a bounded length, and one that nobody uses for a while is forgotten. All of them together are bounded,
too: where a turn is beyond that, the sessions that were used longest ago go.

Invariant: the turn that a kept one followed is kept, and stands before it. So no turns follow each other in a circle.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from diptych.common.errors import InvalidRequest, Overloaded

TOKEN_TYPE: Final = "I"
TOKEN_BYTES: Final = array(TOKEN_TYPE).itemsize
MAX_OF_OWNER: Final = 64  # sessions, where owners are told apart
MAX_OF_ALL: Final = 4096
MAX_TURNS: Final = 256  # of a session
MAX_TOKENS: Final = 1 << 20  # of all turns of a session
MAX_TOKENS_OF_ALL: Final = 1 << 26  # of all sessions: 256 MiB
IDLE_S: Final = 600.0
MAX_IDLE_S: Final = 3600.0
Tokens: TypeAlias = "array[int]"  # of `TOKEN_TYPE`
UNKNOWN: Final = "it was never opened here, was closed, was not used for too long, or made room for others: open one"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A turn that has ended."""

    prompt: array[int]
    output: array[int]
    parent: str  # the turn that it followed; empty: none

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session is opened with."""

    max_tokens: int  # of all turns
    idle_s: float  # that it may be unused
    expected_tokens: int = 0  # of context, by who asked for room; 0: nobody did
    model: int = 0  # which of the router's models it is of


@dataclass(slots=True, eq=False)
class _Session:
    terms: Terms
    max_tokens: int
    idle_s: float
    used_s: float
    turns: dict[str, _Kept] = field(default_factory=dict)  # each behind the one that it followed
    num_tokens: int = 0
    num_running: int = 0  # turns that have begun, and hold it

    def followers(self, name: str) -> list[str]:
        """Return who follows a turn, and who follows those; of no turn, all."""
        found = {name: None}
        for other, kept in self.turns.items():
            if kept.parent in found:
                found[other] = None
        return list(found)[1:]

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.num_tokens -= self.turns.pop(name).num_tokens

    def keep(self, name: str, kept: _Kept) -> bool:
        """Return whether there is room, and still the turn that it followed, so that it is kept."""
        is_known = not kept.parent or kept.parent in self.turns
        has_room = len(self.turns) < MAX_TURNS and self.num_tokens + kept.num_tokens <= self.max_tokens
        if not (is_known and has_room) or name in self.turns:
            return False
        self.turns[name] = kept
        self.num_tokens += kept.num_tokens
        return True


@dataclass(frozen=True, slots=True)
class Follow:
    """What a turn goes on behind, in SGLang's words."""

    session_id: str
    rid: str = ""  # the turn before it; empty: it begins anew
    offset: int = 0  # tokens of what was before that it goes on behind; 0: all
    replace: bool = False  # what had followed that turn is forgotten, once this one has ended
    drop_previous_output: bool = False


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a session, while it runs: the session may be kept by another process."""

    before: Tokens  # that its prompt begins with
    _keep: Callable[[Tokens, Tokens], Awaitable[None]]  # prompt and output
    _output: Tokens = field(default_factory=lambda: array(TOKEN_TYPE))

    def on_output(self, token_ids: Sequence[int]) -> None:
        """Hear of more of its output."""
        self._output.extend(token_ids)

    async def ended(self, prompt_ids: Sequence[int]) -> None:
        """Have it kept before its client hears that it has ended: then others may go on behind it."""
        await self._keep(array(TOKEN_TYPE, prompt_ids), self._output)


@dataclass(slots=True, eq=False)
class Place:
    """Where a turn is kept once it has ended."""

    _sessions: KeptSessions
    _session: _Session
    _name: str
    _follow: Follow

    def keep(self, prompt: Tokens, output: Tokens) -> None:
        """Keep it, if the session is open and has room: others may go on behind it. Forget what it replaces.

        One whose turn before it was itself replaced meanwhile is not kept, nor is one whose name was given meanwhile.
        """
        kept = _Kept(prompt, output, self._follow.rid)
        if self._follow.replace:
            self._session.drop(self._session.followers(self._follow.rid))
        if self._session.keep(self._name, kept):
            self._sessions.make_room(self._session)

    def end(self, now_s: float) -> None:
        """The turn runs no longer, kept or not: call it once. Until then nobody takes the session for unused."""
        self._session.num_running -= 1
        self._session.used_s = now_s


class KeptSessions:
    """The sessions of one router."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], _Session] = {}  # by owner and id, who was used last at the end

    def check(self, owner: str, session_id: str, terms: Terms, now_s: float) -> None:
        """Raise what `open` would, now.

        `InvalidRequest` if a session is open already, unless these are its terms, and ask for room: so who asked for
        room may ask again, as the answer may have been lost. Any other is opened once, as in SGLang. `Overloaded` if
        there are too many.
        """
        self._expire(now_s)
        session = self._sessions.get((owner, session_id))
        if session is None:
            self._check_room(owner)
        elif terms != session.terms or not terms.expected_tokens:
            words = f"the session {session_id!r} is open already, on other terms or without wait_s: close it first"
            raise InvalidRequest(words, param="session_id")

    def open(self, owner: str, session_id: str, terms: Terms, now_s: float) -> None:
        """Open a session, or use the one that is. Raises as `check` does."""
        self.check(owner, session_id, terms, now_s)
        if (owner, session_id) in self._sessions:
            self._use(owner, session_id, now_s)
            return
        bounds = min(terms.max_tokens, MAX_TOKENS), min(terms.idle_s, MAX_IDLE_S)
        self._sessions[owner, session_id] = _Session(terms, *bounds, now_s)

    def close(self, owner: str, session_id: str) -> bool:
        """Return whether it was open. Turns that run go on."""
        return self._sessions.pop((owner, session_id), None) is not None

    def begin(self, owner: str, follow: Follow, name: str, model: int, now_s: float) -> tuple[Tokens, Place]:
        """Return what the prompt of a turn `name` begins with, and its place, to be ended. Raises `InvalidRequest`.

        It does so also if the session is of another model: its tokens mean something else there.
        """
        self._expire(now_s)
        session = self._sessions.get((owner, follow.session_id))
        if session is None:
            words = f"there is no session {follow.session_id!r}: {UNKNOWN}"
            raise InvalidRequest(words, param="session_params.id")
        if session.terms.model != model:
            words = f"the session {follow.session_id!r} was opened for another model"
            raise InvalidRequest(words, param="session_params.id")
        self._use(owner, follow.session_id, now_s)
        if follow.rid and follow.rid not in session.turns:
            words = f"the session has no turn {follow.rid!r} that has ended, and was kept: send the whole prompt"
            raise InvalidRequest(words, param="session_params.rid")
        replaced = session.followers(follow.rid) if follow.replace else ()
        if name in session.turns and name not in replaced:
            raise InvalidRequest(f"the session has a turn {name!r} already: give another rid", param="rid")
        session.num_running += 1
        return _before(session, follow), Place(self, session, name, follow)

    def make_room(self, latest: _Session) -> None:
        """Forget the sessions that were used longest ago, other than this one, until all are within their bound."""
        num_tokens = sum(each.num_tokens for each in self._sessions.values())
        for key, session in list(self._sessions.items()):
            if num_tokens <= MAX_TOKENS_OF_ALL:
                return
            if session is not latest:
                del self._sessions[key]
                num_tokens -= session.num_tokens

    def _check_room(self, owner: str) -> None:
        own = sum(each == owner for each, _ in self._sessions)
        most = MAX_OF_OWNER if owner else MAX_OF_ALL
        if own >= most or len(self._sessions) >= MAX_OF_ALL:
            raise Overloaded(f"{own} sessions of yours are open, of at most {most}: close one, or come back")

    def _use(self, owner: str, session_id: str, now_s: float) -> None:
        session = self._sessions[owner, session_id] = self._sessions.pop((owner, session_id))
        session.used_s = now_s

    def _expire(self, now_s: float) -> None:
        kept = self._sessions
        gone = [key for key, each in kept.items() if now_s - each.used_s > each.idle_s and not each.num_running]
        for key in gone:
            del self._sessions[key]


def _before(session: _Session, follow: Follow) -> Tokens:
    if not follow.rid:
        return array(TOKEN_TYPE)
    kept = session.turns[follow.rid]
    whole = kept.prompt if follow.drop_previous_output else kept.prompt + kept.output
    return whole[: follow.offset] if follow.offset else whole
