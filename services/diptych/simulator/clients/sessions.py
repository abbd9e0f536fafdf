"""Clients that open a session before its first call, wait in the router's line for it, and close it behind its last.

They wait for as long as it takes: a client that gives up and asks again has its place still. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from diptych.router.admission.session_line import Key, Member, SessionLine
from diptych.simulator.clock import Clock
from diptych.simulator.served import Served
from diptych.simulator.setup import Expectation


@dataclass(slots=True, eq=False)
class _Client:
    """Who makes the calls of a session."""

    expected_tokens: int
    num_left: int  # calls that have not ended


class SessionClients:
    """All clients of a platform. `send` brings a call to the router."""

    def __init__(
        self,
        expectation: Expectation,
        context_len: int,
        clock: Clock,
        capacity: Callable[[], int],
        send: Callable[[Served], None],
    ) -> None:
        """`capacity`: tokens that the pools hold; `context_len` is the most that a call can have."""
        self._expectation = expectation
        self._context_len = context_len
        self._clock = clock
        self._capacity = capacity
        self._send = send
        self._line = SessionLine()
        self._clients: dict[Key, _Client] = {}
        self._waiting: dict[Key, Served] = {}
        self._running: dict[int, Member] = {}  # by the number of a call

    def offer(self, served: Sequence[Served]) -> None:
        """Have a client for each session of these calls, if clients open any."""
        if self._expectation is Expectation.NONE:
            return
        for each in (each for each in served if each.call.session):
            client = self._clients.setdefault(_key(each), _Client(0, 0))
            client.expected_tokens = max(client.expected_tokens, self._expected(each))
            client.num_left += 1
            each.follower = partial(self._ended, each, each.follower)

    def arrive(self, served: Served) -> None:
        """A call is due: the first of a session waits until that is in."""
        key = _key(served)
        if key not in self._clients or self._line.is_in(key):
            self._begin(served)
            return
        self._waiting[key] = served
        self._line.ask(key, self._clients[key].expected_tokens, self._clock.now_s)
        self._look()

    def _expected(self, served: Served) -> int:
        is_exact = self._expectation is Expectation.EXACT
        return served.call.prompt_len + served.call.output_len if is_exact else self._context_len

    def _begin(self, served: Served) -> None:
        member = self._line.begin(_key(served), self._clock.now_s)
        if member is not None:
            self._running[served.number] = member
        self._send(served)

    def _send_late(self, served: Served) -> None:
        """Send a call whose client has waited in line: no deadline of the router's counts that."""
        now_s = self._clock.now_s
        served.line_s = now_s - served.call.arrival_s
        served.call = replace(served.call, arrival_s=now_s)
        self._begin(served)

    def _ended(self, served: Served, follower: Callable[[], None] | None) -> None:
        key, call, now_s = _key(served), served.call, self._clock.now_s
        member = self._running.pop(served.number, None)
        if member is not None:
            self._line.end(member, call.prompt_len + call.output_len, now_s)
        self._clients[key].num_left -= 1
        if not self._clients[key].num_left:
            self._line.close(key)
        if follower is not None:
            follower()
        self._look()

    def _look(self) -> None:
        now_s = self._clock.now_s
        for key in self._line.admit(self._capacity(), now_s):
            self._line.claim(key, math.inf, now_s)
            self._send_late(self._waiting.pop(key))


def _key(served: Served) -> Key:
    return Key("", served.call.session)
