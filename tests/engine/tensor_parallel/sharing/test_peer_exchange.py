"""Why tokens do not go to experts by stores into peers' memory is said."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from diptych.engine.options.config import EngineOptions
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.runner import torch_hardware
from diptych.engine.runner.torch_hardware import TorchHardware


@dataclass
class Ranks:
    """Who may not even ask each other for memory."""

    rank: int
    size: int

    def everybodys(self, x: Tensor) -> list[Tensor]:
        raise AssertionError("nobody has to be asked")


@pytest.mark.parametrize(
    ("size", "width", "words"),
    [
        (16, 2048, "16 GPUs share them, and 8 at most exchange by stores"),
        (2, 2044, "a hidden state has 4088 bytes, which is no multiple of 16"),
        (2, 65_536, "a hidden state has 65536 numbers, and the kernels take 32768 at most"),
    ],
)
def test_what_the_kernels_can_not_exchange_is_said_by_one_rank(
    size: int, width: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    from diptych.engine.tensor_parallel.sharing.peer_exchange import open_exchange  # needs Triton

    caplog.set_level(logging.INFO)
    for rank in range(2):
        assert open_exchange(Ranks(rank, size), torch.device("cpu"), torch.bfloat16, width, 8, 8) is None
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", f"tokens go to experts by NCCL, launch by launch: {words}")
    ]


@pytest.mark.parametrize(("every", "scheduler", "is_said"), [(100, 0, True), (100, 1, False), (0, 0, False)])
def test_that_placements_that_change_leave_no_graphs_is_said_by_one_rank(
    every: int, scheduler: int, is_said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    options = EngineOptions(device="cpu", dp=2, dp_attention=True, rebalance_experts=every)
    hardware = TorchHardware(options, 0)
    monkeypatch.setattr(hardware, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch_hardware, "ExpertGroup", lambda *parts, **kept: object())
    hardware.share_experts(SharedExperts("", scheduler, 2), 0)
    assert ("--rebalance-experts" in caplog.text) is is_said
