"""Models of each kind of memory on two workers that change their roles and change back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diptych.checkpoints.source import open_model
from diptych.common.members.roles import Role
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.engine.values.limits import Limits

PAGE, STEP_TOKENS = 4, 24
LIMITS = Limits(256, 200, frozenset(), STEP_TOKENS, max_requests=8)
MEMORIES = (
    *("gpt oss", "llama 4", "gemma4, groups of layers with heads of two widths"),  # windows, chunks, of two widths
    *("deepseek v3", "deepseek v3.2"),  # latents, and index keys
    *("qwen3 next", "kimi linear", "nemotron h", "lfm2"),  # states
)

Fleet = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def fleet(family_model: Any, fleet_class: Any) -> Fleet:
    """A prefill and a decode worker."""
    source = open_model(str(family_model.folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=1, page_size=PAGE, dtype="float32")
    per_state, windows = pages_per_state(source.config, 1, "float32", layout), window_pages(source.config, STEP_TOKENS)

    def model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = np.full(layout.shape, np.nan, np.float32)
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32", max_requests=LIMITS.max_requests)

    beside: dict[str, Any] = {"pages_per_state": per_state, "windows": windows}
    num_pages = windows.pool_pages(150, PAGE) + 16 * per_state
    return fleet_class(Role.PREFILL, Role.DECODE, num_pages=num_pages, limits=LIMITS, model=model, **beside)


@pytest.mark.parametrize("family_model", MEMORIES, indirect=True)
def test_before_during_and_after_changes_of_roles_tokens_are_those_of_transformers(
    family_model: Any, fleet: Fleet
) -> None:
    """Requests are on their way when roles change; new ones go the other way, and begin with what is cached."""
    prompts, outputs = family_model.prompts, family_model.outputs
    asked: dict[int, int] = {}

    def ask(prefill: int, decode: int, *indices: int) -> None:
        for index in indices:
            room = 1 + len(asked)
            asked[room] = index
            fleet.start(room, prompts[index], prefill, decode, len(outputs[index]))

    ask(1, 2, 1, 4)
    fleet.run()
    for num_moves, (prefill, decode) in ((2, (2, 1)), (4, (1, 2)), (3, (2, 1))):
        ask(decode, prefill, 3, 6)
        for _ in range(num_moves):
            fleet.advance(1)
            fleet.advance(2)
        fleet.serve(prefill, Role.PREFILL)
        fleet.serve(decode, Role.DECODE)
        ask(prefill, decode, 4, 5)
        fleet.run()
    sent = num_sent(fleet)
    ask(2, 1, 5, 6)  # both workers have had these in either role
    fleet.run()
    assert {room: fleet.tokens(room) for room in asked} == {room: outputs[index] for room, index in asked.items()}
    assert num_sent(fleet) - sent < num_live(fleet, prompts[5]) + num_live(fleet, prompts[6])
    assert_nothing_is_left(fleet)


def num_sent(fleet: Fleet) -> int:
    return sum(worker.core.report().counts.pages_received for worker in fleet.workers.values())


def num_live(fleet: Fleet, prompt: list[int]) -> int:
    cache = fleet.workers[1].cache
    return int(-(-len(prompt) // PAGE) + cache.windows.num_live(len(prompt), PAGE) + cache.pages_per_state)


def assert_nothing_is_left(fleet: Fleet) -> None:
    """No request, no slot of a state, and no page that is neither free nor cached; all that is cached can go."""
    for worker in fleet.workers.values():
        assert worker.core.report().num_open_rooms == 0
        assert worker.cache.num_free_rows == LIMITS.max_requests
        assert worker.cache.num_available == worker.cache.pool.capacity
        worker.cache._evict(worker.cache.num_available)
        assert worker.cache.pool.num_free == worker.cache.pool.capacity
        assert worker.cache.audit(worker.core.report().holders) == []
