"""The line of sessions before the KV pools: whose contexts fit together are let in, the others wait in order. Pure.

A session counts with the context that its client expects. Once a request of it has ended, it counts with what that had,
and with room to grow up to what is expected, but for no more than `GROWTH` times as much. Who waits is let in when
there is room beside those that are in. Who comes later may pass where the first does not fit, but nobody is passed by
more than `MAX_PASSES`: then all behind wait until he fits. A context that is larger than the pools counts as all of
them, so it fits when nobody is in. Nobody who is in is sent away, whatever becomes of the pools.

Keys have equal shares of the pools, all that have a session which is in or waits. A key that holds its share, or more,
waits behind those that do not; so it has what room they leave. That is its place in line, and no pass. As its sessions
end it comes to hold less, and has its turn again: nobody starves as long as sessions end.

A place is kept under the name of its session: a client that stops waiting, and asks again within `TICKET_S`, has the
place that it had. A session ends when it is closed, or when nobody has used it for as long as it may be unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.common.errors import Overloaded
from diptych.router.values.kept_sessions import MAX_OF_ALL, MAX_OF_OWNER
from diptych.router.workers.worker_view import Pair

GROWTH: Final = 1.5  # times its last context, which a session is believed to come to
MAX_PASSES: Final = 4  # later sessions that are let in before one that waits
MAX_WAITING: Final = 1024
TICKET_S: Final = 60.0  # that a place is kept for a client which does not ask


class Key(NamedTuple):
    """Whose session, and its name."""

    owner: str
    session_id: str


@dataclass(slots=True, eq=False)
class _Member:
    """A session that is in, or waits."""

    expected_tokens: int
    used_s: float  # when a call last waited for it, or a request of it ran, if none does now
    idle_s: float = TICKET_S
    num_open: int = 0  # calls that wait for it, and requests of it that run
    context_tokens: int = 0  # of its last request; 0: it has had none
    num_passes: int = 0  # later ones that were let in before it

    @property
    def num_tokens(self) -> int:
        """What it counts with."""
        if not self.context_tokens:
            return self.expected_tokens
        return min(max(self.expected_tokens, self.context_tokens), int(GROWTH * self.context_tokens))

    def is_over(self, now_s: float) -> bool:
        return not self.num_open and now_s - self.used_s > self.idle_s


class SessionLine:
    """The sessions that are in, and those that wait. Times are on any one clock."""

    def __init__(self) -> None:
        self._in: dict[Key, _Member] = {}
        self._waiting: dict[Key, _Member] = {}  # in their order
        self.num_expired = 0  # sessions and places that nobody used for too long

    def ask(self, key: Key, expected_tokens: int, now_s: float) -> None:
        """Join the line, or keep the place there; a client waits until `let_go`. Raises `Overloaded`.

        What is expected may change as long as the session waits.
        """
        self._expire(now_s)
        if self._find(key) is None:
            self._check_room(key.owner)
            self._waiting[key] = _Member(expected_tokens, now_s)
        if key in self._waiting:
            self._waiting[key].expected_tokens = expected_tokens
        self._use(key, now_s, 1)

    def let_go(self, key: Key, now_s: float) -> None:
        """A client waits no longer: the place is kept for a while."""
        self._use(key, now_s, -1)

    def claim(self, key: Key, idle_s: float, now_s: float) -> None:
        """A session that is in begins: it ends when it is not used for so long."""
        member = self._in.get(key)
        if member is not None:
            member.idle_s, member.used_s = idle_s, now_s

    def begin(self, key: Key, now_s: float) -> None:
        """A request of a session runs until `end`."""
        self._use(key, now_s, 1)

    def end(self, key: Key, context_tokens: int, now_s: float) -> None:
        """It has ended with so much context; 0: nobody knows."""
        self._use(key, now_s, -1)
        if key in self._in and context_tokens:
            self._in[key].context_tokens = context_tokens

    def close(self, key: Key) -> bool:
        """Return whether the session was in, or waited."""
        return self._in.pop(key, None) is not None or self._waiting.pop(key, None) is not None

    def admit(self, capacity_tokens: int, now_s: float) -> list[Key]:
        """Let in whom the pools have room for. Return these, in order."""
        self._expire(now_s)
        held = self._held()
        admitted: list[Key] = []
        while (key := self._next(capacity_tokens, held)) is not None:
            member = self._in[key] = self._waiting.pop(key)
            held[key.owner] += member.num_tokens
            admitted.append(key)
        return admitted

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

    def _next(self, capacity_tokens: int, held: Mapping[str, int]) -> Key | None:
        """Return whom to let in now, and count whom he passes; None: nobody."""
        room = capacity_tokens - sum(held.values())
        if room <= 0:
            return None
        passed: list[_Member] = []
        for key, member in self._in_turn(capacity_tokens, held):
            if min(member.num_tokens, capacity_tokens) <= room:
                for each in passed:
                    each.num_passes += 1
                return key
            if member.num_passes >= MAX_PASSES:
                return None
            passed.append(member)
        return None

    def _in_turn(self, capacity_tokens: int, held: Mapping[str, int]) -> Iterator[tuple[Key, _Member]]:
        """Go through those that wait: in order, but whose key holds its share last."""
        for is_last in (False, True):
            for key, member in self._waiting.items():
                if (held[key.owner] * len(held) >= capacity_tokens) is is_last:
                    yield key, member

    def _find(self, key: Key) -> _Member | None:
        return self._in.get(key) or self._waiting.get(key)

    def _use(self, key: Key, now_s: float, more: int) -> None:
        member = self._find(key)
        if member is not None:
            member.used_s = now_s
            member.num_open = max(0, member.num_open + more)

    def _check_room(self, owner: str) -> None:
        own = sum(key.owner == owner for members in (self._in, self._waiting) for key in members)
        most = MAX_OF_OWNER if owner else MAX_OF_ALL
        if own >= most or len(self._waiting) >= MAX_WAITING or len(self._in) >= MAX_OF_ALL:
            words = f"{own} sessions of yours are open or wait, of at most {most}; {len(self._waiting)} wait in all"
            raise Overloaded(f"{words}, of at most {MAX_WAITING}: close one, or come back")

    def _expire(self, now_s: float) -> None:
        for members in (self._in, self._waiting):
            over = [key for key, member in members.items() if member.is_over(now_s)]
            for key in over:
                del members[key]
            self.num_expired += len(over)


def share_of(pairs: Iterable[Pair], pool_tokens: Mapping[int, int], num_routers: int) -> int:
    """Return the tokens of context that one of these routers may fill the pools with.

    A context is in a pool of each side of the pairs, so the smaller side counts. Routers have equal shares: none has
    to know what the others have let in, and all together let in no more than fits.
    """
    sides = zip(*((pair.prefill_id, pair.decode_id) for pair in pairs), strict=True)
    held = [sum(pool_tokens.get(each, 0) for each in set(side)) for side in sides]
    return min(held, default=0) // max(1, num_routers)
