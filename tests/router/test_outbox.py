from __future__ import annotations

import asyncio

from diptych.router.outbox import MAX_BATCH_TOKENS, Outbox
from diptych.v1.worker_pb2 import RouterBatch, StartLeg

HALF = StartLeg(room=1, prompt_token_ids=[5] * (MAX_BATCH_TOKENS // 2))
LARGE = StartLeg(room=2, prompt_token_ids=[5] * (MAX_BATCH_TOKENS // 2 + 1))


def taken(outbox: Outbox, count: int) -> list[RouterBatch]:
    async def take() -> list[RouterBatch]:
        return [await asyncio.wait_for(anext(outbox), 1.0) for _ in range(count)]

    return asyncio.run(take())


def is_empty(outbox: Outbox) -> bool:
    async def peek() -> bool:
        next_batch = asyncio.ensure_future(anext(outbox))
        await asyncio.sleep(0)
        return not next_batch.done() and next_batch.cancel()

    return asyncio.run(peek())


def test_everything_that_is_due_leaves_in_one_message() -> None:
    outbox = Outbox()
    outbox.start(StartLeg(room=1))
    outbox.abort(7)
    outbox.start(StartLeg(room=2))
    assert taken(outbox, 1) == [RouterBatch(start=[StartLeg(room=1), StartLeg(room=2)], abort=[7])]
    assert is_empty(outbox)


def test_nothing_leaves_while_nothing_is_due() -> None:
    assert is_empty(Outbox())


def test_long_prompts_are_spread_over_messages_and_no_abort_overtakes_its_start() -> None:
    outbox = Outbox()
    outbox.start(HALF)
    outbox.start(LARGE)
    outbox.abort(2)
    assert taken(outbox, 2) == [RouterBatch(start=[HALF]), RouterBatch(start=[LARGE], abort=[2])]
    assert is_empty(outbox)


def test_it_ends_when_it_is_closed_whatever_is_still_due() -> None:
    outbox = Outbox()
    outbox.start(StartLeg(room=1))
    outbox.close()

    async def rest() -> list[RouterBatch]:
        return [batch async for batch in outbox]

    assert asyncio.run(rest()) == []
