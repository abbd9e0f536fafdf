"""How long the body of a request may take, by the clock of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fast_loop import FastLoop
from starlette.requests import Request
from starlette.types import Message

from diptych.router.admission.body_budget import BodyBudget
from diptych.router.errors import BodyCutOff, BodyTooSlow, PayloadTooLarge
from diptych.router.http.exchange.body import BodyLimits, read_body

LIMITS = BodyLimits(max_bytes=100, stall_s=60, whole_s=600)


def read(pieces: Sequence[tuple[float, bytes]], *, is_whole: bool = True) -> tuple[bytes, float]:
    """Return the body that comes as (seconds since the piece before, bytes), and when it was there."""
    left = list(pieces)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        after_s, piece = left.pop(0)
        await asyncio.sleep(after_s)
        return {"type": "http.request", "body": piece, "more_body": bool(left) or not is_whole}

    async def body() -> tuple[bytes, float]:
        request = Request({"type": "http", "headers": []}, receive)
        return await read_body(request, LIMITS, BodyBudget(1000).hold("")), asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        return runner.run(body())


def test_a_long_prompt_may_come_slowly_as_long_as_it_comes() -> None:
    assert read([(59, b"x")] * 10) == (b"x" * 10, 590)


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_a_body_of_which_nothing_came_for_a_while_is_given_up(num_pieces: int) -> None:
    with pytest.raises(BodyTooSlow, match="nothing of the body came for 60 s"):
        read([(59, b"x")] * num_pieces, is_whole=False)


def test_a_body_that_is_always_on_its_way_is_given_up_too() -> None:
    with pytest.raises(BodyTooSlow, match="the body was not complete after 600 s"):
        read([(1, b"")] * 700)


def test_neither_a_long_body_nor_one_whose_client_left_counts_as_slow() -> None:
    with pytest.raises(PayloadTooLarge):
        read([(1, b"x" * 101)])

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(BodyCutOff):
        asyncio.run(read_body(Request({"type": "http", "headers": []}, gone), LIMITS, BodyBudget(1000).hold("")))
