"""The sizes of a worker's steps, from the options to the scheduler, on a device whose speed is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.scheduler.base import build_base
from diptych.engine.tensor_parallel.company import HostLead
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.transfer_rules import TransferRules


def limits(folder: Path, **options: Any) -> Limits:
    engine = EngineOptions(model=str(folder), device="sim", kv_cache_mib=64, **options)
    config = SchedulerConfig("c", "text", "info", 1, "auto", TransferRules("off"), engine)
    base = build_base(config, lambda config: None, HostLead(""))
    cache = base.new_cache(base.limits())
    assert cache.num_rows == base.limits().max_requests + PROMPT_ROWS
    base.close()
    return base.limits()


@pytest.mark.parametrize(
    ("options", "step_tokens", "requests"),
    [
        ({}, 8192, 512),  # as fast as an H200, and a tiny model, of which the pool holds much
        ({"sim_timing": ("prompt=500",)}, 512, 512),
        ({"sim_timing": ("h200", "prompt=100")}, 2048, 512),
        ({"max_requests": 5}, 8192, 5),
        ({"max_step_tokens": 100, "max_requests": 5}, 100, 5),
    ],
)
def test_a_scheduler_has_the_sizes_that_fit_its_device_or_those_given(
    tiny_folder: Path, options: dict[str, Any], step_tokens: int, requests: int
) -> None:
    found = limits(tiny_folder, **options)
    assert (found.max_step_tokens, found.max_requests) == (step_tokens, requests)


def test_the_time_of_mixed_steps_is_that_of_the_options(tiny_folder: Path) -> None:
    assert limits(tiny_folder).mixed_step_s == 0.1
    assert limits(tiny_folder, mixed_step_ms=0).mixed_step_s == float("inf")
