"""Reads several streams of pieces as one, in batches: everything that is ready at once comes at once.

Rule: a few pieces of each stream wait here, however long the reader stays away. The stream keeps what follows as
tokens, and gives them as one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from diptych.router.output import Piece

PIECES_AHEAD: Final = 2  # a short answer's text and its end

Stream = AsyncGenerator[Piece, None]
Batch = list[tuple[int, Piece]]  # (index of the stream, piece)


async def interleave(streams: Sequence[Stream]) -> AsyncGenerator[Batch, None]:
    """Yield pieces until every stream has ended. The first error ends all. Close it to close all streams."""
    if len(streams) == 1:  # the common case needs no task
        async with aclosing(streams[0]) as stream:
            async for piece in stream:
                yield [(0, piece)]
        return
    ready: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(PIECES_AHEAD * len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, ready)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            batch = await _take_all(ready)
            num_open -= sum(piece.end is not None for _, piece in batch)
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: Stream, ready: asyncio.Queue[tuple[int, Piece | Exception]]) -> None:
    try:
        async with aclosing(stream):
            async for piece in stream:
                await ready.put((index, piece))
    except Exception as error:  # raised again by the reader
        await ready.put((index, error))


async def _take_all(ready: asyncio.Queue[tuple[int, Piece | Exception]]) -> Batch:
    items = [await ready.get()]
    while not ready.empty():
        items.append(ready.get_nowait())
    batch: Batch = []
    for index, item in items:
        if isinstance(item, Exception):
            raise item
        batch.append((index, item))
    return batch
