"""The line of sessions before the KV pools: whose contexts fit together are let in, the others wait in order. Pure.

A session counts with the context that its client expects. Once a request of it has ended, it counts with the longest
that its last `NUM_CONTEXTS` had, and with room to grow up to what is expected, but for no more than `GROWTH` times as
much. Who waits is let in when there is room beside those that are in. Who comes later may pass where the first does not
fit, but nobody is passed by more than `MAX_PASSES`: then all behind wait until he fits, unless he is away. A context
that is larger than the pools counts as all of them, so it fits when nobody is in. Nobody who is in is sent away,
whatever becomes of the pools.

Keys have equal shares of the pools, all that have a session which is in or waits. A key that holds its share, or more,
waits behind those that do not; so it has what room they leave. That is its place in line, and no pass. As its sessions
end it comes to hold less, and has its turn again: nobody starves as long as sessions end.

A place is kept under the name of its session: a client that stops waiting, and asks again within `TICKET_S`, has the
place that it had. Who has been without a call for longer than that, less the time that his calls have waited since, is
away: he has his place, and holds nobody up. A session ends when it is closed, or when nobody has used it for as long as
it may be unused, which before its first request is `TICKET_S` at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.common.errors import Overloaded
from diptych.router.values.kept_sessions import MAX_OF_ALL, MAX_OF_OWNER
from diptych.router.workers.worker_view import Pair

GROWTH: Final = 1.5  # times its longest context of late, which a session is believed to come to
NUM_CONTEXTS: Final = 4  # requests that count: others ask for a title, or a summary, between two turns
MAX_PASSES: Final = 4  # later sessions that are let in before one that waits
MAX_WAITING: Final = 1024
TICKET_S: Final = 60.0  # that a place is kept for a client which does not ask


class Key(NamedTuple):
    """Whose session, and its name."""

    owner: str
    session_id: str


@dataclass(slots=True, eq=False)
class Member:
    """A session that is in, or waits. Another one of its name is another member."""

    expected_tokens: int
    used_s: float  # when a call last began or ended to wait for it, it was let in to one, or a request of it ran
    idle_s: float = TICKET_S
    is_claimed: bool = False
    has_begun: bool = False  # it has had a request
    num_open: int = 0  # calls that wait for it, and requests of it that run
    away_s: float = 0.0  # without a call while it waited, less what calls have waited since
    contexts: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_CONTEXTS))  # tokens, of its last requests
    num_passes: int = 0  # later ones that were let in before it

    @property
    def num_tokens(self) -> int:
        """What it counts with."""
        if not self.contexts:
            return self.expected_tokens
        longest = max(self.contexts)
        return min(max(self.expected_tokens, longest), int(GROWTH * longest))

    def is_over(self, now_s: float) -> bool:
        most = self.idle_s if self.has_begun else min(self.idle_s, TICKET_S)
        return not self.num_open and now_s - self.used_s > most

    def is_away(self, now_s: float) -> bool:
        """Whether the client of one that waits has shown up too little to hold up others."""
        return not self.num_open and self.away_s + now_s - self.used_s > TICKET_S


class SessionLine:
    """The sessions that are in, and those that wait. Times are on any one clock."""

    def __init__(self) -> None:
        self._in: dict[Key, Member] = {}
        self._waiting: dict[Key, Member] = {}  # in their order
        self.num_expired = 0  # sessions and places that nobody used for too long

    def ask(self, key: Key, expected_tokens: int, now_s: float) -> Member:
        """Join the line, or keep the place there; a client waits until `let_go`. Raises `Overloaded`.

        What is expected may change as long as the session waits. To ask for one that is in does not use it.
        """
        self.expire(now_s)
        member = self._in.get(key) or self._waiting.get(key)
        if member is None:
            self._check_room(key.owner)
            member = self._waiting[key] = Member(expected_tokens, now_s)
        if key in self._waiting:
            member.expected_tokens = expected_tokens
            if not member.num_open:
                member.away_s += now_s - member.used_s
                member.used_s = now_s
        member.num_open += 1
        return member

    def let_go(self, key: Key, member: Member, now_s: float) -> None:
        """A client waits no longer: the place is kept for a while."""
        member.num_open -= 1
        if self._waiting.get(key) is member and not member.num_open:
            member.away_s = max(0.0, member.away_s - (now_s - member.used_s))
            member.used_s = now_s

    def claim(self, key: Key, idle_s: float, now_s: float) -> None:
        """A session that is in begins: it ends when it is not used for so long. To claim it again changes nothing."""
        member = self._in.get(key)
        if member is not None and not member.is_claimed:
            member.is_claimed, member.idle_s, member.used_s = True, idle_s, now_s

    def begin(self, key: Key, now_s: float) -> Member | None:
        """A request of a session runs until `end`; None: that is not in, and the request has no part in this."""
        member = self._in.get(key)
        if member is not None:
            member.has_begun, member.used_s = True, now_s
            member.num_open += 1
        return member

    def end(self, member: Member, context_tokens: int, now_s: float) -> None:
        """A request of a session has ended with so much context; 0: nobody knows."""
        member.num_open -= 1
        member.used_s = now_s
        if context_tokens:
            member.contexts.append(context_tokens)

    def close(self, key: Key) -> bool:
        """Return whether the session was in, or waited."""
        return self._in.pop(key, None) is not None or self._waiting.pop(key, None) is not None

    def release(self, key: Key) -> bool:
        """Give back the room of a session that was let in, and did not begin. Return whether it had any."""
        member = self._in.get(key)
        return member is not None and not member.is_claimed and self.close(key)

    def admit(self, capacity_tokens: int, now_s: float) -> list[Key]:
        """Let in whom the pools have room for. Return these, in order."""
        self.expire(now_s)
        admitted = _Sweep(self._held(), capacity_tokens, now_s).over(self._waiting)
        for key in admitted:
            member = self._in[key] = self._waiting.pop(key)
            if member.num_open:
                member.used_s = now_s
        return admitted

    def expire(self, now_s: float) -> None:
        """End what nobody has used for too long."""
        for members in (self._in, self._waiting):
            over = [key for key, member in members.items() if member.is_over(now_s)]
            for key in over:
                del members[key]
            self.num_expired += len(over)

    def is_in(self, key: Key) -> bool:
        return key in self._in

    def place(self, key: Key) -> int:
        """Return how many are before a session that waits, and itself; 0: it does not wait."""
        return list(self._waiting).index(key) + 1 if key in self._waiting else 0

    @property
    def num_in(self) -> int:
        return len(self._in)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens of context that those who are in count with."""
        return sum(member.num_tokens for member in self._in.values())

    def _held(self) -> dict[str, int]:
        """Return the tokens that each key holds which has a session here; keys that only wait hold none."""
        held = dict.fromkeys((key.owner for key in self._waiting), 0)
        for key, member in self._in.items():
            held[key.owner] = held.get(key.owner, 0) + member.num_tokens
        return held

    def _check_room(self, owner: str) -> None:
        own = sum(key.owner == owner for members in (self._in, self._waiting) for key in members)
        most = MAX_OF_OWNER if owner else MAX_OF_ALL
        if own >= most or len(self._waiting) >= MAX_WAITING or len(self._in) >= MAX_OF_ALL:
            words = f"{own} sessions of yours are open or wait, of at most {most}; {len(self._waiting)} wait in all"
            raise Overloaded(f"{words}, of at most {MAX_WAITING}: close one, or come back")


class _Sweep:
    """One look at the line: whom there is room for, and whom these pass.

    While it lasts room becomes only less, and keys come only to hold more. So who does not fit will not, and each is
    looked at twice at most: before his key holds its share, and behind. One that was passed `MAX_PASSES` times is
    counted no further, so that the steps of a sweep grow with the line as fast as it does, whoever fits.
    """

    def __init__(self, held: dict[str, int], capacity_tokens: int, now_s: float) -> None:
        """`held`: the tokens of each key that is in or waits."""
        self._held = held
        self._capacity_tokens = capacity_tokens
        self._now_s = now_s
        self._room = capacity_tokens - sum(held.values())
        self._passed: list[tuple[Key, Member]] = []  # who did not fit, and is passed by all that come in from now on
        self._is_held_up = False  # by one that was passed often enough

    def over(self, waiting: Mapping[Key, Member]) -> list[Key]:
        """Return whom to let in, in order: those whose key holds its share come last."""
        admitted: dict[Key, None] = {}
        for is_last in (False, True):
            for key, member in waiting.items():
                if self._room <= 0 or self._is_held_up:
                    return list(admitted)
                if self._has_share(key.owner) is not is_last or key in admitted:
                    continue
                if min(member.num_tokens, self._capacity_tokens) <= self._room:
                    admitted[key] = None
                    self._let_in(key, member)
                else:
                    self._pass(key, member)
        return list(admitted)

    def _let_in(self, key: Key, member: Member) -> None:
        had_share = self._has_share(key.owner)
        self._held[key.owner] += member.num_tokens
        self._room -= member.num_tokens
        comes_last = self._has_share(key.owner) and not had_share
        passed, self._passed = self._passed, []
        for other, each in passed:
            each.num_passes += 1
            if not (comes_last and other.owner == key.owner):
                self._pass(other, each)

    def _pass(self, key: Key, member: Member) -> None:
        if member.num_passes < MAX_PASSES:
            self._passed.append((key, member))
        elif not member.is_away(self._now_s):
            self._is_held_up = True

    def _has_share(self, owner: str) -> bool:
        return self._held[owner] * len(self._held) >= self._capacity_tokens


def share_of(pairs: Iterable[Pair], pool_tokens: Mapping[int, int], routers: Collection[int], router_id: int) -> int:
    """Return the tokens of context that a router may fill the pools with; `routers`: the members.

    A context is in a pool of each side of the pairs, so the smaller side counts. Routers have equal shares: none has
    to know what the others have let in, and all together let in no more than fits. One that is no member yet has no
    share: those that are share the pools without it.
    """
    if routers and router_id not in routers:
        return 0
    sides = zip(*((pair.prefill_id, pair.decode_id) for pair in pairs), strict=True)
    held = [sum(pool_tokens.get(each, 0) for each in set(side)) for side in sides]
    return min(held, default=0) // max(1, len(routers))
