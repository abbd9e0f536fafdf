from __future__ import annotations

import asyncio

import pytest

from diptych.router.workers import outbox as outbox_module
from diptych.router.workers.outbox import Outbox
from diptych.v1.worker_pb2 import RouterBatch, StartLeg

MAX_BATCH_BYTES = 10_000  # of an outbox in a test
HALF = StartLeg(room=1, prompt_tokens=bytes(MAX_BATCH_BYTES // 2))
LARGE = StartLeg(room=2, prompt_tokens=bytes(MAX_BATCH_BYTES // 2 + 1))
HUGE = StartLeg(room=3, prompt_tokens=bytes(MAX_BATCH_BYTES + 1))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_BATCH_BYTES", MAX_BATCH_BYTES)


def popped(outbox: Outbox, count: int) -> list[RouterBatch]:
    async def pop() -> list[RouterBatch]:
        return [RouterBatch.FromString(await asyncio.wait_for(anext(outbox), 200)) for _ in range(count)]

    return asyncio.run(pop())


def rooms(batches: list[RouterBatch]) -> list[tuple[list[int], list[int]]]:
    """What starts and what is aborted."""
    return [([leg.room for leg in batch.start], list(batch.abort)) for batch in batches]


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
    assert popped(outbox, 1) == [RouterBatch(start=[StartLeg(room=1), StartLeg(room=2)], abort=[7])]
    assert is_empty(outbox)


def test_nothing_leaves_while_nothing_is_due() -> None:
    assert is_empty(Outbox())


def test_long_prompts_are_spread_over_messages_and_no_abort_overtakes_its_start() -> None:
    outbox = Outbox()
    outbox.start(HALF)
    outbox.start(LARGE)
    outbox.abort(2)
    assert rooms(popped(outbox, 2)) == [([1], []), ([2], [2])]
    assert is_empty(outbox)


def test_it_ends_when_it_is_closed_whatever_is_still_due() -> None:
    outbox = Outbox()
    outbox.start(StartLeg(room=1))
    outbox.close()

    async def rest() -> list[RouterBatch]:
        return [RouterBatch.FromString(batch) async for batch in outbox]

    assert asyncio.run(rest()) == []


def test_a_prompt_is_part_of_its_leg() -> None:
    outbox, prompt = Outbox(), StartLeg(prompt_text="naïve", prompt_token_ids=[1, 2])
    outbox.start(StartLeg(room=1, lora="a"), prompt.SerializeToString())
    outbox.start(StartLeg(room=2), StartLeg(prompt_tokens=bytes(1000)).SerializeToString())
    whole = StartLeg(room=1, lora="a", prompt_text="naïve", prompt_token_ids=[1, 2])
    assert popped(outbox, 1) == [RouterBatch(start=[whole, StartLeg(room=2, prompt_tokens=bytes(1000))])]


def test_a_prompt_that_is_longer_than_a_message_should_be_leaves_alone() -> None:
    outbox = Outbox()
    outbox.start(HUGE)
    outbox.start(HALF)
    assert rooms(popped(outbox, 2)) == [([3], []), ([1], [])]
