"""Kimi's delta rule and state spaces: prompts against products and bytes, beside torch, and decode steps against bytes.

Layers take turns, each with states of its own. A rule gets what is behind a layer's convolution, in float32, and gives
what is before its norm: these bytes, and the products of chunks, at the speed of large ones in bf16, are the limits.
The convolution is measured by itself, against its bytes. Single tokens of many requests, a decode step: the states are
read and written once, and what a rule gets and gives is moved, at the speed of a copy.

    python bench/gpu/recurrent_prompts.py [--quick] [--single] [--json]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from device_clock import seconds_each, seconds_eager
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.engine.models.layers.recurrent import kimi_delta_rule, mamba2_scan, short_conv
from diptych.kernels.gpu.recurrent import kimi_delta_chunks, mamba2_chunks
from diptych.kernels.gpu.recurrent.chunk_scan import CHUNK, Prompts
from diptych.kernels.gpu.recurrent.kimi_delta_step import kimi_delta_step
from diptych.kernels.gpu.recurrent.mamba2_step import mamba2_step
from diptych.kernels.gpu.recurrent.short_conv_prompts import short_conv_prompts
from diptych.kernels.slot_rows import SlotRows

NUM_LAYERS: Final = 4
SINGLE: Final = (64, 1, 8, 256)  # requests
PROMPTS: Final = ((1, 8192), (8, 1024), (64, 64))  # requests, tokens each
TORCH: Final = 1  # of `PROMPTS` so many are computed by torch, too
CONV_WIDTH: Final = 4
Run = Callable[[], object]


class Rule(ABC):
    """One of them, as published, on so many tokens."""

    name: str
    num_channels: int
    out_shape: tuple[int, int]
    state_shape: tuple[int, int, int]

    def __init__(self, batch_size: int, length: int) -> None:
        self.num_tokens = batch_size * length
        slots, starts = torch.randperm(batch_size), np.arange(batch_size + 1, dtype=np.int32) * length
        self.prompts = Prompts(slots.cuda(), torch.from_numpy(starts).cuda(), max_len=length)
        self.single_rows = SlotRows.of_one_token(self.prompts.slots)
        self.mixed = torch.randn(self.num_tokens, self.num_channels, device="cuda")
        self.out = torch.empty(self.num_tokens, *self.out_shape, device="cuda")
        self.states = [torch.randn(batch_size, *self.state_shape, device="cuda") for _ in range(NUM_LAYERS)]

    @property
    def nbytes(self) -> int:
        return self.mixed.nbytes + self.out.nbytes + 2 * self.states[0].nbytes

    @property
    @abstractmethod
    def num_flops(self) -> float: ...

    @abstractmethod
    def run(self, state: Tensor) -> None: ...

    @abstractmethod
    def run_single(self, state: Tensor) -> None:
        """Compute all tokens, of which each request has one."""

    @abstractmethod
    def run_torch(self) -> None:
        """Compute the first request."""


class Kimi(Rule):
    """Kimi Linear."""

    name = "Kimi's delta rule"
    num_channels, out_shape, state_shape = 3 * 32 * 128, (32, 128), (32, 128, 128)

    def __init__(self, batch_size: int, length: int, launch: kimi_delta_chunks.KimiLaunch = kimi_delta_chunks.LAUNCH):
        super().__init__(batch_size, length)
        self.launch = launch
        self.mixed = self.mixed.view(-1, 32, 3 * 128)
        self.decays = torch.randn(self.out.shape, device="cuda").bfloat16()
        self.betas = torch.randn(self.num_tokens, 32, device="cuda").bfloat16()
        self.heads = kimi_delta_chunks.KimiHeads(torch.rand(32, device="cuda"), torch.randn(32, 128, device="cuda"))

    @property
    def num_flops(self) -> float:
        """Those of the gated delta rule's chunks; that decays differ by channels is our own trouble."""
        return float(self.num_tokens * 32 * (4 * CHUNK * 128 + 4 * CHUNK * 128 + 2 * CHUNK * 128 + 6 * 128 * 128))

    def run(self, state: Tensor) -> None:
        given = self.mixed, self.decays, self.betas, self.heads, state, self.prompts, self.out
        kimi_delta_chunks.kimi_delta_prompts(*given, self.launch)

    def run_single(self, state: Tensor) -> None:
        kimi_delta_step(self.mixed, self.decays, self.betas, *self.heads, state, self.single_rows, self.out)

    def run_torch(self) -> None:
        length, decay = self.prompts.max_len, kimi_delta_rule.Decay(*self.heads)
        given = self.mixed[:length], self.decays[:length], self.betas[:length]
        kimi_delta_rule.in_chunks(*given, decay, self.states[0][0], self.out[:length])


class Mamba(Rule):
    """Nemotron 3 Nano."""

    name = "state spaces"
    num_channels, out_shape, state_shape = 8 * (8 * 64 + 2 * 128), (64, 64), (64, 64, 128)

    def __init__(self, batch_size: int, length: int, launch: mamba2_chunks.MambaLaunch = mamba2_chunks.LAUNCH):
        super().__init__(batch_size, length)
        self.launch = launch
        self.mixed = self.mixed.view(len(self.mixed), 8, -1)
        self.steps = torch.randn(self.num_tokens, 64, device="cuda").bfloat16()
        rate, bias, skip = torch.randn(3, 8, 8, device="cuda").unbind()
        self.heads = mamba2_chunks.MambaHeads(-rate.exp(), bias, skip, 0.001)

    @property
    def num_flops(self) -> float:
        return float(self.num_tokens * (64 * (2 * CHUNK * 64 + 4 * 64 * 128) + 8 * 2 * CHUNK * 128))

    def run(self, state: Tensor) -> None:
        given = self.mixed, self.steps, self.heads, state, self.prompts, self.out
        mamba2_chunks.mamba2_prompts(*given, self.launch)

    def run_single(self, state: Tensor) -> None:
        mamba2_step(self.mixed, self.steps, *self.heads, state, self.single_rows, self.out)

    def run_torch(self) -> None:
        length, heads = self.prompts.max_len, mamba2_scan.Heads(*self.heads, 64)
        given = self.mixed[:length], self.steps[:length], heads
        mamba2_scan.in_chunks(*given, self.states[0][0], self.out[:length])


def runs(rule: Rule) -> list[Run]:
    return [partial(rule.run, state) for state in rule.states]


def measure_single(report: Report, limits: Roofline, kind: type[Kimi | Mamba], batch_size: int) -> None:
    rule = kind(batch_size, 1)
    seconds = seconds_each([partial(rule.run_single, state) for state in rule.states])
    value, limit, case = rule.nbytes / seconds, limits.copy_bytes_s, f"{rule.name}, single tokens, B {batch_size}"
    peers = {"us": 1e6 * seconds}
    report.row("gpu/recurrent_prompts", case, value / 1e9, "GB/s", limit / 1e9, "copy", value / limit, peers)


def measure(report: Report, limits: Roofline, kind: type[Kimi | Mamba], batch_size: int, length: int) -> None:
    rule = kind(batch_size, length)
    seconds, least = seconds_each(runs(rule)), limits.seconds(0, rule.num_flops)
    peers = {"bytes, at best": 1e6 * limits.seconds(rule.nbytes)}
    if (batch_size, length) in PROMPTS[:TORCH]:
        peers["torch"] = 1e6 * seconds_eager(rule.run_torch, rounds=3)
    case = f"{rule.name}, {batch_size} x {length}"
    report.row("gpu/recurrent_prompts", case, 1e6 * seconds, "us", 1e6 * least, "bf16 product", least / seconds, peers)


def measure_convolution(report: Report, limits: Roofline, channels: int, batch_size: int, length: int) -> None:
    x = torch.randn(batch_size * length, channels, device="cuda").bfloat16()
    weight, out = torch.randn(channels, CONV_WIDTH, device="cuda"), torch.empty_like(x, dtype=torch.float32)
    state = torch.zeros(batch_size, channels, CONV_WIDTH - 1, device="cuda", dtype=torch.bfloat16)
    slots, starts = torch.arange(batch_size).cuda(), torch.arange(batch_size + 1, dtype=torch.int32).cuda() * length
    prompts = Prompts(slots, starts, max_len=length)
    ours = seconds_each([lambda: short_conv_prompts(x, state, prompts, weight, None, out)] * NUM_LAYERS)
    torchs = seconds_eager(lambda: short_conv.convolve(x[:length], state[0], weight, None), rounds=3) * batch_size
    least, case = limits.seconds(x.nbytes + out.nbytes), f"convolution of {channels} channels, {batch_size} x {length}"
    peers = {"torch": 1e6 * torchs}
    report.row("gpu/recurrent_prompts", case, 1e6 * ours, "us", 1e6 * least, "bytes", least / ours, peers)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--single", action="store_true", help="no prompts")
    options = parser.parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for batch_size in SINGLE[:1] if options.quick else SINGLE:
            for kind in (Kimi, Mamba):
                measure_single(report, limits, kind, batch_size)
        if options.single:
            return
        for prompts in PROMPTS[:1] if options.quick else PROMPTS:
            for kind in (Kimi, Mamba):
                measure(report, limits, kind, *prompts)
        measure_convolution(report, limits, Kimi.num_channels, *PROMPTS[0])


if __name__ == "__main__":
    main()
