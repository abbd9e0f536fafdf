"""A line of a batch begins only where nobody else would notice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from diptych.router.batches.idle import Busy, may_begin
from diptych.router.batches.slots import Slots

IDLE = Busy(
    num_waiting=0,
    num_running=0,
    num_places=8,
    num_unanswered=0,
    num_prompts=0,
    num_queued=0,
    num_prefill=2,
    free_share=1.0,
    is_cold=False,
)


@pytest.mark.parametrize(
    ("busy", "may"),
    [
        (IDLE, True),
        (IDLE._replace(num_waiting=1), False),
        (IDLE._replace(num_unanswered=1), False),
        (IDLE._replace(num_running=5), True),
        (IDLE._replace(num_running=6), False),
        (IDLE._replace(num_prompts=1, num_queued=1), True),
        (IDLE._replace(num_prompts=2), False),
        (IDLE._replace(num_queued=1), False),
        (IDLE._replace(num_prefill=0), False),
        (IDLE._replace(free_share=0.25), True),
        (IDLE._replace(free_share=0.24), False),
        (IDLE._replace(is_cold=True, num_prefill=0, free_share=0.0), True),
        (IDLE._replace(is_cold=True, num_prefill=0, num_prompts=1), False),
        (IDLE._replace(is_cold=True, num_prefill=0, num_waiting=1), False),
    ],
)
def test_each_reason_to_wait_is_enough(busy: Busy, may: bool) -> None:
    assert may_begin(busy) is may


@dataclass
class World:
    unanswered: int = 0  # of model "m"; nobody asks for another

    def busy(self, fleet: int, num_prompts: int) -> Busy:
        return IDLE._replace(num_unanswered=0 if fleet else self.unanswered, num_prompts=num_prompts)

    def fleet_of(self, model: str) -> int:
        return 0 if model == "m" else 1


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_lines_wait_for_others_and_for_each_other_and_begin_as_they_came() -> None:
    async def story() -> list[str]:
        world, told = World(unanswered=1), []
        slots = Slots(3, world.busy, world.fleet_of)
        goes_on = {name: asyncio.Event() for name in "abcd"}

        async def line(name: str) -> None:
            async with slots.slot("m") as slot:
                told.append(name)
                await goes_on[name].wait()
                slot.answered()
                told.append(name.upper())
                if name != "d":
                    await asyncio.Event().wait()

        tasks = [asyncio.create_task(line(name)) for name in "abcd"]
        await settle()
        assert told == [], "somebody waits for a first token"
        world.unanswered = 0
        slots._changed.set()
        await settle()
        assert told == ["a", "b"], "a prompt for each worker"
        goes_on["a"].set()
        await settle()
        assert told == ["a", "b", "A", "c"]
        goes_on["b"].set()
        goes_on["d"].set()
        await settle()
        assert told == ["a", "b", "A", "c", "B"], "three at once"
        tasks[0].cancel()
        await settle()
        assert told == ["a", "b", "A", "c", "B", "d", "D"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.num_running == slots._num_prompts[0] == 0
        return told

    asyncio.run(story())


def test_lines_of_a_model_that_is_busy_keep_those_of_another_neither_from_a_place_nor_from_a_prompt() -> None:
    async def story() -> None:
        world, told = World(unanswered=1), []
        slots = Slots(3, world.busy, world.fleet_of)

        async def line(model: str, name: str) -> None:
            async with slots.slot(model):
                told.append(name)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(line(name[0], name)) for name in ("m1", "n1", "n2", "n3")]
        await settle()
        assert told == ["n1", "n2"], "a prompt for each worker of n, though m1 came first"
        world.unanswered = 0
        slots._changed.set()
        await settle()
        assert told == ["n1", "n2", "m1"], "prompts are counted by model"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())
