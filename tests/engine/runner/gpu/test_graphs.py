"""Captured steps: each size once, and what they take is counted."""

from __future__ import annotations

import logging

import pytest
import torch
from emulated_gpu import Recorder

from diptych.engine.runner.gpu.graphs import MIB, Graphs


def test_what_is_captured_is_replayed_on_what_its_inputs_hold_then_and_its_memory_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    recorder = Recorder(nbytes=3 * MIB)
    graphs = Graphs((1, 2), recorder)
    inputs = torch.tensor([1.0, 2.0])
    graphs.capture(2, lambda: inputs * 2)
    assert 1 not in graphs
    graphs.capture(1, lambda: inputs[:1] + 1)
    for value in (5.0, 6.0):
        inputs.fill_(value)
        assert graphs.replay(2).tolist() == [value * 2] * 2
        assert graphs.replay(1).tolist() == [value + 1]
    assert (recorder.captured, len(graphs), graphs.nbytes) == (2, 2, 6 * MIB)
    assert "decode step of 1 rows" in caplog.text
    assert "all 2 graphs 6 MiB" in caplog.text
