"""The gated delta rule of Qwen3-Next's layers against the bytes that it must move, and a prompt's against products.

Layers take turns, each with states of its own, so that they are read from memory, as in a model. Single tokens: the
limit is one read and one write of the states, at the speed of a copy. Rows of drafts: beside as many steps of single
tokens. Prompts: the products of the chunked form, at the speed of large ones in bf16; beside it the time of the layer's
matrix of inputs, at best.

Of the first prompts each part by itself, too.

    python bench/gpu/delta_rule.py [--quick] [--single] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.kernels.gpu.recurrent.chunk_scan import CHUNK, Prompts, scan_chunks
from diptych.kernels.gpu.recurrent.delta_chunks import LAUNCH, DeltaLaunch, convolve, mix_prompts, prepare
from diptych.kernels.gpu.recurrent.delta_rule import DeltaLayer, mix_single_tokens
from diptych.kernels.slot_rows import SlotRows

KEY_HEADS: Final = 16
VALUE_HEADS: Final = 32
DIM: Final = 128
CONV_WIDTH: Final = 4
HIDDEN: Final = 2048
NUM_LAYERS: Final = 4
SINGLE: Final = (64, 1, 8, 256)  # requests
ROWS: Final = ((1, 16), (16, 8), (64, 4))  # requests, tokens that each tries
PROMPTS: Final = ((1, 8192), (1, 4096), (8, 1024), (1, 16_384), (64, 64))  # requests, tokens each
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
        self.rows = SlotRows(self.slots.repeat_interleave(length), self._lens(batch_size, length))
        self.starts = torch.arange(batch_size + 1, device="cuda", dtype=torch.int32) * length
        self.states = [
            (
                torch.randn(batch_size, channels, CONV_WIDTH - 1, device="cuda").bfloat16(),
                torch.randn(batch_size, VALUE_HEADS, DIM, DIM, device="cuda"),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.state_nbytes = sum(part.nbytes for part in self.states[0])

    @staticmethod
    def _lens(batch_size: int, length: int) -> Tensor:
        """Rows of several tokens are tried: their slots stay as they are."""
        lens = torch.zeros(batch_size, length, dtype=torch.int32, device="cuda")
        lens[:, 0] = length if length == 1 else -length
        return lens.flatten()

    def single_runs(self) -> list[Run]:
        starts = torch.arange(len(self.out) + 1, device="cuda", dtype=torch.int32)

        def run(newest: Tensor, kept: Tensor) -> Run:
            return lambda: mix_single_tokens(self.layer, self.projected, newest, kept, self.rows, starts, self.out)

        return [run(*state) for state in self.states]

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.slots, self.starts, max_len=len(self.projected) // len(self.slots))

    def prompt_runs(self, launch: DeltaLaunch = LAUNCH) -> list[Run]:
        def run(newest: Tensor, kept: Tensor) -> Run:
            given = self.layer, self.projected, newest, kept, self.prompts, self.out
            return lambda: mix_prompts(*given, launch)

        return [run(*state) for state in self.states]

    def part_runs(self) -> dict[str, list[Run]]:
        """The kernels but the last one, each on what the one before it left."""
        given, prompts = (self.layer, self.projected), self.prompts
        channels = convolve(*given, self.states[0][0], prompts, LAUNCH)
        chunks, found = prepare(*given, channels, prompts, LAUNCH), self.out.view(-1, VALUE_HEADS, DIM)

        def scan(kept: Tensor) -> Run:
            return lambda: scan_chunks(chunks, kept, (DIM, 1), prompts, found, LAUNCH.scan)

        return {
            "convolution": [lambda: convolve(*given, self.states[0][0], prompts, LAUNCH)] * NUM_LAYERS,
            "chunks": [lambda: prepare(*given, channels, prompts, LAUNCH)] * NUM_LAYERS,
            "chunks in turn": [scan(kept) for _, kept in self.states],
        }


def num_flops(num_tokens: int) -> float:
    """Count the products of a chunk's tokens with its keys, with the state, and of the system's solution with both."""
    a_token = 2 * CHUNK * DIM * 2 + 2 * CHUNK * DIM * 2 + 2 * CHUNK * DIM + 3 * 2 * DIM * DIM
    return float(num_tokens * VALUE_HEADS * a_token)


def measure_single(report: Report, limits: Roofline, batch_size: int) -> None:
    layers = Layers(batch_size, 1)
    nbytes, seconds = 2 * layers.state_nbytes, seconds_each(layers.single_runs())
    value, limit = nbytes / seconds, limits.copy_bytes_s
    case = f"single tokens, B {batch_size}"
    report.row("gpu/delta_rule", case, value / 1e9, "GB/s", limit / 1e9, "copy", value / limit, {"us": 1e6 * seconds})


def measure_rows(report: Report, batch_size: int, length: int) -> None:
    """Beside it as many steps of one token of each request."""
    row_s, single_s = (seconds_each(Layers(batch_size, each).single_runs()) for each in (length, 1))
    case, steps_s = f"rows, {batch_size} x {length}", length * single_s
    report.row("gpu/delta_rule", case, 1e6 * row_s, "us", 1e6 * steps_s, "steps", steps_s / row_s, {})


def measure_prompts(report: Report, limits: Roofline, batch_size: int, length: int) -> None:
    layers, num_tokens = Layers(batch_size, length), batch_size * length
    seconds, least = seconds_each(layers.prompt_runs()), limits.seconds(0, num_flops(num_tokens))
    matrix_s = limits.seconds(0, 2.0 * num_tokens * HIDDEN * layers.layer.token_size)
    bytes_s = limits.seconds(layers.projected.nbytes + layers.out.nbytes + 2 * layers.state_nbytes)
    peers = {"bytes, at best": 1e6 * bytes_s, "matrix of inputs, at best": 1e6 * matrix_s}
    case = f"prompts, {batch_size} x {length}"
    report.row("gpu/delta_rule", case, 1e6 * seconds, "us", 1e6 * least, "bf16 product", least / seconds, peers)


def measure_parts(report: Report, batch_size: int, length: int) -> None:
    for part, runs in Layers(batch_size, length).part_runs().items():
        report.row("gpu/delta_rule", f"{batch_size} x {length}, {part}", 1e6 * seconds_each(runs), "us")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--single", action="store_true", help="no prompts")
    options = parser.parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for batch_size in SINGLE[:1] if options.quick else SINGLE:
            measure_single(report, limits, batch_size)
        for rows in ROWS[:1] if options.quick else ROWS:
            measure_rows(report, *rows)
        if options.single:
            return
        for prompts in PROMPTS[:1] if options.quick else PROMPTS:
            measure_prompts(report, limits, *prompts)
        measure_parts(report, *PROMPTS[0])


if __name__ == "__main__":
    main()
