"""A model that keeps latents on workers that change their roles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diptych.checkpoints.source import open_model
from diptych.common.members.roles import Role
from diptych.engine.runner.model_runner import ModelRunner

PROMPTS = {room: [(room + 7 * i) % 321 for i in range(17 + room)] for room in (1, 2, 3)}
NUM_TOKENS = 6

Fleet = Any  # the fixture's class: test helpers can't be imported


@pytest.fixture
def new_fleet(tiny_latent_folder: Path, fleet_class: Any) -> Callable[..., Fleet]:
    """By the roles of its workers."""
    source = open_model(str(tiny_latent_folder))

    def new_model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=4, dtype="float32")
        kv = np.full(layout.shape, np.nan, np.float32)
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")

    return lambda *roles: fleet_class(*roles, model=new_model)


@pytest.fixture
def expected(new_fleet: Callable[..., Fleet]) -> dict[int, list[int]]:
    """What one worker generates alone."""
    fleet = new_fleet(Role.UNIFIED)
    for room, prompt in PROMPTS.items():
        fleet.start(room, prompt, 1, 1, NUM_TOKENS)
    fleet.run()
    return {room: fleet.tokens(room) for room in PROMPTS}


@pytest.mark.parametrize("num_moves", [0, 3, 5])
def test_what_began_before_a_change_of_roles_ends_and_what_was_cached_serves_the_new_ones(
    new_fleet: Callable[..., Fleet], expected: dict[int, list[int]], num_moves: int
) -> None:
    fleet = new_fleet(Role.PREFILL, Role.DECODE)
    fleet.start(1, PROMPTS[1], 1, 2, NUM_TOKENS)
    for _ in range(num_moves):
        fleet.advance(1)
        fleet.advance(2)
    fleet.serve(1, Role.DECODE)
    fleet.serve(2, Role.PREFILL)
    fleet.start(2, PROMPTS[2], 2, 1, NUM_TOKENS)
    fleet.run()
    assert [fleet.tokens(room) for room in (1, 2)] == [expected[room] for room in (1, 2)]
    sent = received(fleet, 1)
    fleet.start(11, PROMPTS[1], 2, 1, NUM_TOKENS)  # each side has it from its former role
    fleet.start(3, PROMPTS[3], 2, 1, NUM_TOKENS)
    fleet.run()
    assert [fleet.tokens(room) for room in (11, 3)] == [expected[room] for room in (1, 3)]
    assert received(fleet, 1) - sent <= -(-len(PROMPTS[3]) // 4) + 1
    assert [worker.core.report().num_open_rooms for worker in fleet.workers.values()] == [0, 0]


def received(fleet: Fleet, worker: int) -> int:
    pages: int = fleet.workers[worker].core.report().counts.pages_received
    return pages
