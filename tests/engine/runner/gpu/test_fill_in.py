"""Placeholders, filled in on the device as on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.runner.gpu.gpu_runner import filled_in
from diptych.engine.schedule.batch_builder import placeholder
from diptych.engine.scheduler.stepping import fill_in
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, ForwardMode


def test_the_device_fills_in_what_the_host_would() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        newest = rng.integers(0, 1000, 9)
        newest[rng.integers(0, 9)] = NO_TOKEN
        ids = np.where(rng.random(12) < 0.5, rng.integers(0, 1000, 12), placeholder(0) - rng.integers(0, 9, 12))
        expected = fill_in(batch_of(ids), newest).input_ids
        before = torch.from_numpy(ids.copy())
        assert filled_in(before, torch.from_numpy(newest)).tolist() == expected.tolist()
        assert before.tolist() == ids.tolist(), "a graph that is run twice must find the placeholders again"


def batch_of(ids: npt.NDArray[np.int64]) -> ForwardBatch:
    rows = np.arange(len(ids))
    return ForwardBatch(ForwardMode.DECODE, ids, rows, rows, rows[:, None].astype(np.int32), rows, rows, rows)
