"""A decode core that serves local requests, stepped by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from stepped_engine import PAGE, Engine

from diptych.common.members.roles import LegKind
from diptych.decode.core import DecodeCore
from diptych.engine.schedule.batch_builder import BuildBatch, build_batch
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.running import Drafter


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines, and checks at the end that they are empty."""
    engines: list[Engine] = []

    def build(drafter: Drafter | None = None, build_batch: BuildBatch = build_batch, **options: Any) -> Engine:
        pace, page_nbytes = StepPace(math.inf), PAGE * 8
        build_core = partial(DecodeCore, page_nbytes=page_nbytes, pace=pace, drafter=drafter, build=build_batch)
        engines.append(Engine(build=build_core, kind=LegKind.LOCAL, **options))
        return engines[-1]

    yield build
    for engine in engines:
        if not engine.is_abandoned:
            engine.run()
            engine.close()
