from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from diptych.generation.finish import Finish
from diptych.router.serve.response import PIECES_AHEAD, interleave
from diptych.router.values.output import End, Piece, Usage

END = End(Finish.STOP, Usage(1, 2, 0))


async def stream(*texts: str, closed: list[str] | None = None) -> AsyncGenerator[Piece, None]:
    try:
        for text in texts:
            await asyncio.sleep(0)
            if text == "fail":
                raise ValueError("told to fail")
            yield Piece(text, ())
        yield Piece("", (), END)
    finally:
        if closed is not None:
            closed.append(texts[0])


async def collect(*streams: AsyncGenerator[Piece, None]) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for batch in interleave(streams):
        for index, piece in batch:
            texts[index] = texts.get(index, "") + (piece.text if piece.end is None else ".")
    return texts


def test_each_stream_keeps_its_order_and_ends() -> None:
    assert asyncio.run(collect(stream("a", "b"), stream("c"), stream("d", "e", "f"))) == {0: "ab.", 1: "c.", 2: "def."}
    assert asyncio.run(collect(stream("a", "b"))) == {0: "ab."}


@pytest.mark.parametrize("others", [0, 2])
def test_an_error_of_one_ends_all(others: int) -> None:
    closed: list[str] = []
    streams = [stream("a", "fail", closed=closed), *(stream("x", "y", "z", closed=closed) for _ in range(others))]
    with pytest.raises(ValueError, match="told to fail"):
        asyncio.run(collect(*streams))
    assert sorted(closed) == ["a", *["x"] * others]


@pytest.mark.parametrize("count", [1, 3])
def test_closing_it_closes_every_stream(count: int) -> None:
    closed: list[str] = []

    async def leave_early() -> None:
        async with aclosing(interleave([stream("a", "b", "c", closed=closed) for _ in range(count)])) as batches:
            async for _ in batches:
                break

    asyncio.run(leave_early())
    assert closed == ["a"] * count


def test_what_is_ready_at_once_comes_at_once() -> None:
    async def first() -> int:
        async with aclosing(interleave([stream("a") for _ in range(5)])) as batches:
            return len(await anext(batches))

    assert asyncio.run(first()) == 10  # text and end of each


def test_a_reader_that_stays_away_is_read_ahead_for_by_a_few_pieces() -> None:
    async def count_pulled() -> int:
        num_pulled = 0

        async def endless() -> AsyncGenerator[Piece, None]:
            nonlocal num_pulled
            while True:
                num_pulled += 1
                yield Piece("x", ())
                await asyncio.sleep(0)

        async with aclosing(interleave([endless(), endless()])) as batches:
            await anext(batches)
            num_pulled = 0
            for _ in range(100):
                await asyncio.sleep(0)
        return num_pulled

    assert asyncio.run(count_pulled()) <= 2 * (PIECES_AHEAD + 1)
