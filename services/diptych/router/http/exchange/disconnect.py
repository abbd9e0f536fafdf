"""Ends work whose client has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """Run `work` and return its result; cancel it and return None when the client leaves first.

    The body must have been read: what `receive` gives now is the news that the client has left.
    """
    task = asyncio.current_task()
    assert task is not None, "work is cancelled by its task"
    watcher = asyncio.ensure_future(_cancel_on_disconnect(receive, task))
    try:
        return await work
    except asyncio.CancelledError:
        if watcher.done() and task.uncancel() == 0:  # nobody else wants us to end
            return None
        raise
    finally:
        watcher.cancel()


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
