"""One process of the drill."""

from __future__ import annotations

import asyncio
from pathlib import Path

from drill.component import Component
from drill.network import HERE


def test_the_end_of_a_process_is_not_that_of_the_one_that_somebody_has_started_in_its_place(tmp_path: Path) -> None:
    async def test() -> None:
        component = Component("bootstrap", "b", HERE, {"port": 0}, tmp_path / "log")
        try:
            ended = component.exited()
            component.kill()
            component.start()
            await asyncio.wait_for(ended, 60)
            assert component.is_running
        finally:
            component.kill()

    asyncio.run(test())
