"""Decode and extend attention over paged KV against the memory and the matrix limit, for the heads of Llama-3-8B.

Layers of one pool take turns, so that each reads its KV from memory, as in a model. Decode: the limit is one read of
keys and values at the speed of a copy. Extend: the two products at the speed of large ones; half of the square of new
tokens counts. FlashInfer and FlashAttention-3 stand beside where they are installed, and torch's SDPA on contiguous KV.
What FlashInfer compiles at first use is compiled before, side by side.

    python bench/gpu/attention.py [--quick] [--json]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Final

import flashinfer_peer
import torch
from device_clock import seconds_each, speeds
from kv_states import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, States, make_states, random_queries
from llama_8b import CONTEXT_LEN
from prompt_runs import Run, flash_attention_3_runs, flops, hopper_runs, pointer_runs, sdpa_runs, split_runs
from report import Report, arguments
from roofline import Roofline, roofline
from warm_cache import in_processes

from diptych.kernels.gpu.attention.decode_attention import decode_attention, decode_workspace, launch_for, num_splits
from diptych.kernels.gpu.attention.prompt_attention import serves
from diptych.kernels.gpu.attention.split_extend_attention import is_short

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NAMES: Final = {BF16: "bf16", FP8: "fp8"}
DECODE: Final = (  # requests, tokens of each
    *((BF16, *case) for case in ((1, 1024), (1, 8192), (8, 1024), (8, 4096), (8, 8192), (32, 4096), (64, 4096))),
    *((FP8, *case) for case in ((8, 4096), (32, 4096), (64, 4096), (128, 4096))),
)
QUICK_DECODE: Final = ((BF16, 8, 1024), (BF16, 64, 4096), (FP8, 64, 4096))
EXTEND: Final = (  # requests, cached tokens of each, new ones
    *((BF16, *case) for case in ((1, 0, 4096), (2, 0, 4096), (8, 0, 1024), (1, 3072, 1024), (1, 31744, 1024))),
    (BF16, 1, 0, 32768),
    *((FP8, *case) for case in ((1, 0, 4096), (1, 3072, 1024), (1, 31744, 1024))),
    *((BF16, *case) for case in ((1, 8192, 64), (1, 1024, 16), (4, 1024, 64))),
)
QUICK_EXTEND: Final = ((BF16, 1, 0, 4096), (BF16, 1, 3072, 1024))


def decode_runs(states: States, q: torch.Tensor) -> list[Run]:
    """One launch a layer, shared out as for a worker's largest context, not for this one."""
    launch = launch_for(HEAD_DIM, states.kv.dtype, NUM_HEADS // NUM_KV_HEADS, states.batch_size)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = num_splits(states.batch_size, NUM_KV_HEADS, CONTEXT_LEN, num_sms, launch.programs_per_sm, launch.block)
    workspace = decode_workspace(states.batch_size, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, shares, q.device)
    out = torch.empty_like(q)

    def run(layer: torch.Tensor) -> Run:
        return lambda: decode_attention(
            q, layer, states.page_table, states.seq_lens, out, workspace, scale=SCALE, num_splits=shares
        )

    return [run(layer) for layer in states.layers]


def measure_decode(report: Report, limits: Roofline, dtype: torch.dtype, batch_size: int, seq_len: int) -> None:
    states, q = make_states(batch_size, seq_len, dtype), random_queries(batch_size)
    ours = seconds_each(decode_runs(states, q))
    nbytes = states.layer_nbytes
    peers = speeds(nbytes / 1e9, {"flashinfer": lambda: flashinfer_peer.decode_runs(states, q)})
    case, value, limit = f"decode {NAMES[dtype]}, B {batch_size}, L {seq_len}", nbytes / ours, limits.copy_bytes_s
    report.row("gpu/attention", case, value / 1e9, "GB/s", limit / 1e9, "copy", value / limit, peers)


def measure_extend(
    report: Report, limits: Roofline, dtype: torch.dtype, batch_size: int, prefix: int, new: int
) -> None:
    """Ours is what a worker computes such a step with; `extend_attention` stands beside where that is another."""
    states, q = make_states(batch_size, prefix + new, dtype), random_queries(batch_size * new)
    work = flops(batch_size, prefix, new)
    runs: Callable[[States, torch.Tensor, int], list[Run]]
    runs = hopper_runs if serves(states.layers[0]) else pointer_runs
    if is_short(len(q) * NUM_HEADS // NUM_KV_HEADS, new * NUM_HEADS // NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM):
        runs = split_runs
    value = work / seconds_each(runs(states, q, new))
    others: dict[str, Callable[[], Sequence[Run]]] = {"flashinfer": lambda: flashinfer_peer.extend_runs(states, q, new)}
    if runs is not pointer_runs:
        others["extend_attention"] = lambda: pointer_runs(states, q, new)
        others["flash attention 3"] = lambda: flash_attention_3_runs(states, q, new)
    if dtype == BF16:
        others["torch"] = lambda: sdpa_runs(states, q, new)
    case = f"extend {NAMES[dtype]}, {batch_size} x {new} after {prefix}"
    peers = speeds(work / 1e12, others)
    limit = limits.bf16_flops_s
    report.row("gpu/attention", case, value / 1e12, "TFLOP/s", limit / 1e12, "bf16 product", value / limit, peers)


def compile_peer(what: tuple[str, torch.dtype]) -> None:
    phase, dtype = what
    states, q = make_states(1, 64, dtype), random_queries(64 if phase == "extend" else 1)
    runs = partial(flashinfer_peer.extend_runs, new=64) if phase == "extend" else flashinfer_peer.decode_runs
    speeds(0.0, {"flashinfer": lambda: runs(states, q)[:1]})


def main() -> None:
    options = arguments(__doc__).parse_args()
    if find_spec("flashinfer"):
        in_processes(compile_peer, itertools.product(("decode", "extend"), (BF16, FP8)))
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for extend in QUICK_EXTEND if options.quick else EXTEND:
            measure_extend(report, limits, *extend)
        for decode in QUICK_DECODE if options.quick else DECODE:
            measure_decode(report, limits, *decode)


if __name__ == "__main__":
    main()
