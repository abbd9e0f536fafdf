"""A step that the last rank refuses, while the others compute it: its group ends as one, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from diptych.common.errors import InternalError
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied

ONE = EngineOptions(kv_cache_mib=1, page_size=8, max_step_tokens=64)
REFUSING = Path(__file__).parents[1] / "support" / "refusing"
REFUSED = 319  # see there
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny_folder", replace(ONE, tp=2)),
        ("tiny_latent_experts_folder", replace(ONE, tp=2, expert_parallel=True)),
        ("tiny_six_experts_folder", replace(ONE, pp=2)),
        ("tiny_tied_folder", replace(ONE, dp=2, dp_attention=True)),
        ("tiny_latent_experts_folder", replace(ONE, dp=2, dp_attention=True)),
    ],
    ids=["ranks", "latents and experts on ranks", "stages", "shared networks", "shared experts"],
)
def test_a_step_that_one_rank_refuses_ends_its_group_and_no_request_waits_for_ever(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str, options: EngineOptions
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REFUSING))
    with Engine(str(request.getfixturevalue(model)), options, dispatch="round_robin") as engine:
        processes = [psutil.Process(pid) for pid in engine.scheduler_pids]
        assert len(processes) == 2
        stream = engine.stream([1, 2, 3], LONG)
        next(stream)
        with pytest.raises((SchedulerDied, InternalError), match=r"ended with code 1|refuses the step"):
            engine.generate([4, REFUSED, 5], LONG)
        with pytest.raises((SchedulerDied, InternalError), match=r"died|ended|refuses"):
            list(stream)
        assert not any(process.is_running() for process in processes)
