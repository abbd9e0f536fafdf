"""Where a process computes."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.runner.torch_hardware import choose_device


@pytest.mark.parametrize(
    ("wanted", "gpu", "num_gpus", "chosen"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 3, 0, "cpu"),
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 0, 1, "cuda:0"),
        ("cpu", 0, 8, "cpu"),
    ],
)
def test_a_process_takes_its_gpu_where_there_are_any(wanted: str, gpu: int, num_gpus: int, chosen: str) -> None:
    assert choose_device(wanted, gpu, num_gpus) == chosen


@pytest.mark.parametrize(("wanted", "gpu", "num_gpus"), [("cuda", 0, 0), ("cuda", 2, 2), ("auto", 1, 1)])
def test_a_gpu_that_is_missing_is_an_error_and_never_a_slow_surprise(wanted: str, gpu: int, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"needs GPU {gpu}.* sees {num_gpus}"):
        choose_device(wanted, gpu, num_gpus)
