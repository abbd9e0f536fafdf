"""What a Kubernetes Service is to clients: the routers that were ready when last asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import httpx

from drill.cluster import Router

PROBE_S: Final = 0.2


class Service:
    """Routers, and which of them are ready. `run` must be running."""

    def __init__(self, routers: Sequence[Router], rng: random.Random) -> None:
        self._routers = routers
        self._rng = rng
        self._ready: set[Router] = set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Probe all routers for ever."""
        async with httpx.AsyncClient() as client:
            while True:
                answers = await asyncio.gather(*(router.is_ready(client) for router in self._routers))
                self._ready = {router for router, answer in zip(self._routers, answers, strict=True) if answer}
                if self._ready:
                    self._changed.set()
                    self._changed = asyncio.Event()
                await asyncio.sleep(PROBE_S)

    async def pick(self, avoided: Router | None) -> Router:
        """Wait for a ready router and return one; another one than `avoided` if there is a choice."""
        while not self._ready:
            await self._changed.wait()
        ready = sorted(self._ready, key=str)
        return self._rng.choice([router for router in ready if router is not avoided] or ready)
