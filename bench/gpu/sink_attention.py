"""Decode attention with sinks beside the same without, for the heads of gpt-oss, in layers with a window and without.

A sink is one more score of each head in its softmax, which has no value and is not read from memory: so both should
take equally long. The limit is one read of what a layer sees at the speed of a copy.

    python bench/gpu/sink_attention.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from device_clock import seconds_each
from report import Report, arguments
from roofline import Roofline, roofline
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention import decode_attention, decode_workspace, launch_for, num_splits

NUM_HEADS: Final = 64
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 64
PAGE_SIZE: Final = 16
WINDOW: Final = 128
CONTEXT_LEN: Final = 131_072
NUM_LAYERS: Final = 4
CASES: Final = ((64, 4096, 0), (64, 4096, WINDOW), (8, 4096, 0), (1, 32_768, 0))  # requests, tokens, window
Run = Callable[[], object]


def runs(batch_size: int, seq_len: int, window: int, sinks: Tensor | None) -> Sequence[Run]:
    """Return one launch a layer, shared out as for a worker's largest context."""
    num_pages = batch_size * -(-seq_len // PAGE_SIZE)
    shape = (num_pages, NUM_LAYERS, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(num_pages, device="cuda", dtype=torch.int32).view(batch_size, -1)
    lens = torch.full((batch_size,), seq_len, dtype=torch.int32, device="cuda")
    q = torch.randn(batch_size, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    launch = launch_for(HEAD_DIM, kv.dtype, NUM_HEADS // NUM_KV_HEADS, batch_size)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = num_splits(batch_size, NUM_KV_HEADS, CONTEXT_LEN, num_sms, launch.programs_per_sm, launch.block)
    workspace = decode_workspace(batch_size, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, shares, q.device)

    def run(layer: Tensor) -> Run:
        kinds = {"scale": HEAD_DIM**-0.5, "window": window, "sinks": sinks, "num_splits": shares, "launch": launch}
        return lambda: decode_attention(q, layer, table, lens, out, workspace, **kinds)

    return [run(layer) for layer in kv.unbind(1)]


def measure(report: Report, limits: Roofline, batch_size: int, seq_len: int, window: int) -> None:
    sinks = torch.randn(NUM_HEADS, device="cuda")
    seconds, without = (seconds_each(runs(batch_size, seq_len, window, each)) for each in (sinks, None))
    nbytes = batch_size * min(seq_len, window or seq_len) * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    case = f"decode bf16, sinks, B {batch_size}, L {seq_len}, window {window or 'none'}"
    value, limit = nbytes / seconds / 1e9, limits.copy_bytes_s / 1e9
    report.row("gpu/sinks", case, value, "GB/s", limit, "copy", value / limit, {"no sinks": nbytes / without / 1e9})


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for case in CASES[:1] if options.quick else CASES:
            measure(report, limits, *case)


if __name__ == "__main__":
    main()
