"""Our side of `whole_engines.py`, in a process of its own like that of a peer.

    python engine_diptych.py FOLDER [OPTION=VALUE ...]     (started by whole_engines.py)

Everything is at a worker's defaults but for the given engine options. The scheduler is a process beside this one, as a
worker has it; tokens are stamped where its frontend gets them, without detokenising.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from defaults import engine, stamps_of
from engine_cases import Asked, Child, Figures, Ready, figures

from diptych.embedded.data_parallel_controller import DataParallelController
from diptych.engine import EngineOptions


async def run(controller: DataParallelController, asked: Asked) -> Figures:
    if asked.limits is not None:
        raise ValueError("a running engine's limits cannot be changed: start another")
    requests = asked.requests()
    began_s = time.perf_counter()
    stamps = await asyncio.gather(*(stamps_of(controller, *request) for request in requests))
    return figures(requests, began_s, stamps)


async def serve(options: EngineOptions) -> None:
    child = Child()
    async with engine(options) as (controller, ready):
        child.say(Ready(ready.max_step_tokens, ready.max_requests))
        while line := await asyncio.to_thread(sys.stdin.readline):
            child.say(await run(controller, Asked(**json.loads(line))))


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return `NAME=VALUE` as a mapping; values are JSON, or else words."""
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    asyncio.run(serve(EngineOptions(model=folder, load_format="dummy", kv_events="off", **options_of(words))))
