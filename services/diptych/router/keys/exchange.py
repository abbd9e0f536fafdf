"""Tells other routers what API keys are used for here, and hears of them, by way of the membership.

A router's record has it as its load: bootstrap passes loads on about once a second, and keeps none. While bootstrap is
away nothing waits: see `diptych.router.keys.others`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, Protocol

from diptych.router.keys.caller import Callers
from diptych.router.keys.others import Debt, Told, Use
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance, KeyUse, KeyUses

EVERY_S: Final = 0.5
HEARD_AFTER_S: Final = (
    3.0  # a heartbeat, a turn of bootstrap's, a look here: what another router did is counted by then
)
MAX_MS: Final = 2**32 - 1


class HeardMembers(Protocol):
    """Who is a member, and of whom there is no news."""

    def instances(self) -> Mapping[int, Instance]: ...

    def retained(self) -> Mapping[int, Instance]: ...


class KeyExchange:
    """`run` must be running."""

    def __init__(self, callers: Callers, members: HeardMembers, started_unix_ns: int) -> None:
        self._callers = callers
        self._members = members
        self._started_unix_ns = started_unix_ns  # as this router is registered

    def told(self) -> KeyUses:
        """Return what the next heartbeat tells."""
        uses = self._callers.uses().items()
        return KeyUses(ledger=self._callers.ledger, keys=[_to_wire(key, use) for key, use in uses])

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Count what others have told."""
        unheard = self._members.retained().keys()
        routers = (each for each in self._members.instances().values() if each.role == ROLE_ROUTER)
        self._callers.hear({each.instance_id: self._read(each, unheard) for each in routers})

    def _read(self, router: Instance, unheard: Collection[int]) -> Told:
        told = router.load.key_uses
        return Told(
            told.ledger,
            router.started_unix_ns < self._started_unix_ns,
            router.instance_id not in unheard,
            {each.key: _from_wire(each) for each in told.keys},
        )


def _to_wire(key: int, use: Use) -> KeyUse:
    requests_ms, tokens_ms = (min(MAX_MS, round(each * 1000)) for each in use.debt)
    return KeyUse(
        key=key,
        requests=use.requests,
        tokens=use.tokens,
        places=use.places,
        requests_debt_ms=requests_ms,
        tokens_debt_ms=tokens_ms,
    )


def _from_wire(told: KeyUse) -> Use:
    debt = Debt(told.requests_debt_ms / 1000, told.tokens_debt_ms / 1000)
    return Use(told.requests, told.tokens, told.places, debt)
