"""How long a kill is felt: until every stream that was open has its next token, and a new request is answered."""

from __future__ import annotations

import asyncio
import time

from drill.cluster import HUNG_S
from drill.drill import Drill


async def recovery(drill: Drill, victim: str) -> float:
    """Call it at once after the kill; return the seconds."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_S):
            await asyncio.gather(drill.traffic.next_tokens(), drill.traffic.ask_once())
    except TimeoutError:
        drill.problems.append(f"{victim} was killed, and {HUNG_S:g} s later a stream still waits")
    return time.monotonic() - began_s
