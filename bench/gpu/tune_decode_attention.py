"""Decode attention at the heads of Llama-3-8B: GB/s of keys and values, as a share of the bandwidth of a copy.

Sweeps launches and names the fastest of each case, within a minute; `--quick` measures only those that `launch_for`
chooses. A launch is tokens a tile, stages, warps, programs of a multiprocessor. Layers of a pool take turns, more than
the L2 cache holds.

    python bench/gpu/tune_decode_attention.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from device_clock import seconds_each
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, States, make_states, random_queries
from report import Report, arguments
from roofline import roofline
from torch import Tensor
from triton.runtime.errors import OutOfResources
from warm_cache import in_processes

from diptych.kernels.gpu.attention.decode_attention import (
    FP8,
    Launch,
    decode_attention,
    decode_workspace,
    launch_for,
    num_splits,
)

CONTEXT_LEN: Final = 131_072  # as a worker would say: shares must not depend on what is measured
SHOWN: Final = 3
LAYERS: Final = 8  # measured together
LAUNCHES: Final = (
    *(Launch(64, 4, num_stages, programs) for num_stages, programs in ((3, 2), (3, 3), (3, 4), (4, 2))),
    *(Launch(128, num_warps, num_stages, 2) for num_warps, num_stages in ((4, 2), (4, 3), (8, 2))),
    Launch(64, 8, 3, 2),
    Launch(128, 8, 3, 1),
    Launch(32, 4, 4, 4),
    Launch(32, 2, 3, 6),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal length, or of lengths from a sixteenth of that to all of it."""

    batch_size: int
    seq_len: int
    kv_dtype: torch.dtype = torch.bfloat16
    uneven: bool = False

    def __str__(self) -> str:
        name = "FP8" if self.kv_dtype == FP8 else "bf16"
        return f"{name}, B {self.batch_size}, L {'up to ' * self.uneven}{self.seq_len}"

    @property
    def chosen(self) -> Launch:
        return launch_for(HEAD_DIM, self.kv_dtype, NUM_HEADS // NUM_KV_HEADS, self.batch_size)

    def states(self) -> States:
        states = make_states(self.batch_size, self.seq_len, self.kv_dtype)
        lens = torch.linspace(self.seq_len / 16, self.seq_len, self.batch_size).int().to("cuda")
        return replace(states, seq_lens=lens) if self.uneven else states


CASES: Final = (
    Case(1, 8192),
    Case(8, 1024),
    Case(8, 4096),
    Case(64, 4096),
    Case(64, 8192, uneven=True),
    Case(8, 1024, FP8),
    Case(32, 4096, FP8),
    Case(64, 4096, FP8),
    Case(128, 4096, FP8),
)


def main() -> None:
    options = arguments(__doc__).parse_args()
    copied = roofline().copy_bytes_s
    if not options.quick:
        in_processes(_compile, ((case.kv_dtype, launch) for case in _one_a_dtype() for launch in _launches(case)))
    for case in CASES:
        launches = {case.chosen} if options.quick else _launches(case)
        with Report(as_json=options.json) as report:
            speeds = _speeds(case, launches)
            for launch in sorted(speeds, key=lambda launch: -speeds[launch])[:SHOWN]:
                _row(report, f"{case}, {_name(launch)}", speeds[launch], copied)
            _row(report, f"{case}, {_name(case.chosen)}, chosen", speeds[case.chosen], copied)


def _one_a_dtype() -> list[Case]:
    return list({case.kv_dtype: case for case in CASES}.values())


def _launches(case: Case) -> set[Launch]:
    return {*LAUNCHES, case.chosen}


def _compile(what: tuple[torch.dtype, Launch]) -> None:
    """Into the cache on disk, as one after the other would take minutes."""
    kv_dtype, launch = what
    try:
        _runs(make_states(1, 64, kv_dtype), random_queries(1), launch)[0]()
    except OutOfResources:
        return


def _speeds(case: Case, launches: set[Launch]) -> dict[Launch, float]:
    """Return bytes/s of each launch that fits."""
    states, speeds = case.states(), {}
    q = random_queries(case.batch_size)
    nbytes = states.layer_nbytes * int(states.seq_lens.sum()) / (case.batch_size * case.seq_len)
    for launch in launches:
        try:
            speeds[launch] = nbytes / seconds_each(_runs(states, q, launch))
        except OutOfResources:
            continue
    return speeds


def _runs(states: States, q: Tensor, launch: Launch) -> list[Callable[[], None]]:
    """One a layer."""
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = num_splits(len(q), NUM_KV_HEADS, CONTEXT_LEN, num_sms, launch.programs_per_sm, launch.block)
    workspace = decode_workspace(len(q), NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, shares, q.device)
    attend = partial(decode_attention, scale=SCALE, num_splits=shares, launch=launch)
    out = torch.empty_like(q)
    return [
        partial(attend, q, layer, states.page_table, states.seq_lens, out, workspace)
        for layer in states.layers[:LAYERS]
    ]


def _name(launch: Launch) -> str:
    return f"{launch.block} s{launch.num_stages} w{launch.num_warps} x{launch.programs_per_sm}"


def _row(report: Report, case: str, speed: float, copied: float) -> None:
    report.row("gpu/decode_attention", case, speed / 1e9, "GB/s", copied / 1e9, "copy, same run", speed / copied)


if __name__ == "__main__":
    main()
