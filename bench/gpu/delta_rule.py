"""The gated delta rule of Qwen3-Next's layers against the bytes that it must move, and a prompt's against products.

Layers take turns, each with states of its own, so that they are read from memory, as in a model. Single tokens: the
limit is one read and one write of the states, at the speed of a copy. Prompts: the products of the chunked form, at the
speed of large ones in bf16; beside it the time of the layer's matrix of inputs, at best.

    python bench/gpu/delta_rule.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.kernels.gpu.recurrent.delta_chunks import CHUNK, mix_prompts
from diptych.kernels.gpu.recurrent.delta_rule import DeltaLayer, mix_single_tokens

KEY_HEADS: Final = 16
VALUE_HEADS: Final = 32
DIM: Final = 128
CONV_WIDTH: Final = 4
HIDDEN: Final = 2048
NUM_LAYERS: Final = 4
SINGLE: Final = (64, 1, 8, 256)  # requests
PROMPTS: Final = ((1, 4096), (8, 1024), (1, 16_384), (64, 64))  # requests, tokens each
Run = Callable[[], object]


def layer_of_random_weights() -> DeltaLayer:
    channels = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
    numbers = torch.randn(VALUE_HEADS, device="cuda")
    conv = torch.randn(channels, CONV_WIDTH, device="cuda").bfloat16()
    norm = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
    return DeltaLayer(KEY_HEADS, VALUE_HEADS, DIM, DIM, conv, -numbers.exp(), numbers, norm, 1e-6)


class Layers:
    """Layers of one step of requests with `length` new tokens each, whose slots are scattered."""

    def __init__(self, batch_size: int, length: int) -> None:
        self.layer, num_tokens = layer_of_random_weights(), batch_size * length
        channels = self.layer.num_channels
        self.projected = torch.randn(num_tokens, self.layer.token_size, device="cuda").bfloat16()
        self.out = torch.empty(num_tokens, VALUE_HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        self.slots = torch.randperm(batch_size, device="cuda")
        self.starts = torch.arange(batch_size + 1, device="cuda", dtype=torch.int32) * length
        self.states = [
            (
                torch.randn(batch_size, channels, CONV_WIDTH - 1, device="cuda").bfloat16(),
                torch.randn(batch_size, VALUE_HEADS, DIM, DIM, device="cuda"),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.state_nbytes = sum(part.nbytes for part in self.states[0])

    def single_runs(self) -> list[Run]:
        def run(newest: Tensor, kept: Tensor) -> Run:
            return lambda: mix_single_tokens(self.layer, self.projected, newest, kept, self.slots, self.out)

        return [run(*state) for state in self.states]

    def prompt_runs(self, length: int) -> list[Run]:
        def run(newest: Tensor, kept: Tensor) -> Run:
            places = self.slots, self.starts, self.out
            return lambda: mix_prompts(self.layer, self.projected, newest, kept, *places, max_len=length)

        return [run(*state) for state in self.states]


def num_flops(num_tokens: int) -> float:
    """Of the products of a chunk's tokens with its keys, with the state, and of the system's solution with both."""
    a_token = 2 * CHUNK * DIM * 2 + 2 * CHUNK * DIM * 2 + 2 * CHUNK * DIM + 3 * 2 * DIM * DIM
    return float(num_tokens * VALUE_HEADS * a_token)


def measure_single(report: Report, limits: Roofline, batch_size: int) -> None:
    layers = Layers(batch_size, 1)
    nbytes, seconds = 2 * layers.state_nbytes, seconds_each(layers.single_runs())
    value, limit = nbytes / seconds, limits.copy_bytes_s
    case = f"single tokens, B {batch_size}"
    report.row("gpu/delta_rule", case, value / 1e9, "GB/s", limit / 1e9, "copy", value / limit, {"us": 1e6 * seconds})


def measure_prompts(report: Report, limits: Roofline, batch_size: int, length: int) -> None:
    layers, num_tokens = Layers(batch_size, length), batch_size * length
    seconds, least = seconds_each(layers.prompt_runs(length)), limits.seconds(0, num_flops(num_tokens))
    matrix_s = limits.seconds(0, 2.0 * num_tokens * HIDDEN * layers.layer.token_size)
    case, peers = f"prompts, {batch_size} x {length}", {"matrix of inputs, at best": 1e6 * matrix_s}
    report.row("gpu/delta_rule", case, 1e6 * seconds, "us", 1e6 * least, "bf16 product", least / seconds, peers)


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for batch_size in SINGLE[:1] if options.quick else SINGLE:
            measure_single(report, limits, batch_size)
        for prompts in PROMPTS[:1] if options.quick else PROMPTS:
            measure_prompts(report, limits, *prompts)


if __name__ == "__main__":
    main()
