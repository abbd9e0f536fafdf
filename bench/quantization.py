"""Weights and KV in fewer bits: speed against memory's and arithmetic's limits, and what happens to the logits.

    python bench/quantization.py [--threads N] [--model smollm2] [--quick] [--json]

`as stored` keeps the model's own format; its values, and so its logits, are those of float32, to the bit. int8, int4
and fp8 are these values rounded to nearest (int8: a scale a row; int4: scale and min for 128 columns; fp8: a scale for
128 columns), without the calibration that AWQ and GPTQ add. All sides take turns; the best of several rounds counts.
One thread is timed by the processor time it got, so that other programs disturb little.
Limits, from the same rounds: decode, reading this side's weights and the batch's KV once a step; prefill, the model's
multiplications at the speed of the fastest float32 product. Accuracy is measured over every token of fixed texts:
the largest and the mean difference of a logit, and how often the likeliest token is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from engine import NUM_PAGES, PRODUCT_SIZE, READ_FLOATS, fastest, matrix_bytes, matrix_products
from forward_batches import PAGE_SIZE, decode_batch, extend_batch
from model_cost import prefill_flops
from report import Report, arguments
from torch import Tensor

from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored, as_floats, expanded
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.kv_pool import KV_DTYPES
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows
from diptych.kernels.quantized import FP8_VALUES, Array, QuantizedArray
from diptych.tokens.tokenizer import Tokenizer

GROUP = 128
BATCH_SIZES = (1, 8, 16)
WEIGHTS_CONTEXT, KV_CONTEXT = 128, 512
PREFILL_TOKENS = 512
TEXTS: Final = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is Madrid.",
    "Water boils at a temperature of one hundred degrees Celsius at sea level, and freezes at zero degrees.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never caught a fish.",
    "To make bread you need flour, water, salt and yeast. Mix them, let the dough rest, and bake it until brown.",
    "Dear Ms. Miller, thank you for your letter of the third of May. We are sorry to hear that the parcel was late.",
    "If a train leaves at nine and travels at eighty kilometres an hour, it has gone 160 kilometres by eleven.",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "known_for": "the first program"}',
)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to store weights and KV."""

    name: str
    runner: ModelRunner
    weight_bytes: int
    kv_itemsize: int


class Rounded:
    """A `ModelSource` whose matrices are rounded to fewer bits."""

    def __init__(self, source: ModelSource, quantize: Callable[[Array], QuantizedArray]) -> None:
        self._source = source
        self.config, self.weights_id = source.config, source.weights_id
        self.weight_files = source.weight_files
        floats = ((name, as_floats(tensor)) for name, tensor in source.tensors())
        self._tensors = [(name, quantize(values) if values.ndim == 2 else values) for name, values in floats]

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def next_layer(self) -> ModelSource:
        return self._source.next_layer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        yield from self._tensors

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart


def int8(values: Array) -> QuantizedArray:
    scales = np.abs(values).max(axis=1, keepdims=True) / 127
    return QuantizedArray("int8", np.rint(values / scales).astype(np.int8), scales)


def int4(values: Array) -> QuantizedArray:
    groups = _groups(values)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    codes = np.rint((groups - low[..., None]) / scales[..., None]).clip(0, 15).astype(np.uint8)
    return QuantizedArray("int4", codes.reshape(len(values), -1)[:, : values.shape[1]], scales, low, GROUP)


def fp8(values: Array) -> QuantizedArray:
    groups = _groups(values)
    scales = np.abs(groups).max(axis=2) / FP8_VALUES[:127].max()
    scaled = (groups / scales[..., None]).reshape(len(values), -1)[:, : values.shape[1]]
    codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return QuantizedArray("fp8", codes, scales, None, GROUP)


def _groups(values: Array) -> Array:
    """`[num_rows, num_groups, GROUP]`; the last group may be filled up with the row's last value."""
    missing = -values.shape[1] % GROUP
    return np.pad(values, ((0, 0), (0, missing)), mode="edge").reshape(len(values), -1, GROUP)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    source = open_model(options.model)
    weights = _weight_sides(source, options.threads)
    rounds = 3 if options.quick else 10
    with Report(as_json=options.json) as report:
        for batch_size in BATCH_SIZES:
            bench_decode(report, weights, source, batch_size, WEIGHTS_CONTEXT, 2 * rounds)
        bench_prefill(report, weights, source, rounds)
        for side in weights[1:]:
            bench_accuracy(report, weights[0], side, source)
        kv = _kv_sides(source, options.threads)
        for batch_size in BATCH_SIZES:
            bench_decode(report, kv, source, batch_size, KV_CONTEXT, rounds)
        for side in kv[1:]:
            bench_accuracy(report, kv[0], side, source)


def _weight_sides(source: ModelSource, num_threads: int) -> list[Side]:
    sources: dict[str, ModelSource] = {
        "as stored": source,
        "int8": Rounded(source, int8),
        "int4": Rounded(source, int4),
        "fp8": Rounded(source, fp8),
    }
    float32 = _side("float32", source, num_threads, quantization="none")
    return [float32, *(_side(name, each, num_threads) for name, each in sources.items())]


def _kv_sides(source: ModelSource, num_threads: int) -> list[Side]:
    return [_side(f"KV {kv_dtype}", source, num_threads, kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES]


def _side(
    name: str, source: ModelSource, num_threads: int, *, quantization: str = "auto", kv_dtype: str = "float32"
) -> Side:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=kv_dtype)
    kv = torch.randn(layout.shape).to(KV_DTYPES[kv_dtype])
    runner = ModelRunner(source, kv, dtype="float32", quantization=quantization, num_threads=num_threads)
    tensors = source.tensors() if quantization == "auto" else expanded(source.tensors())
    return Side(name, runner, matrix_bytes(tensors), kv.itemsize)


def bench_decode(
    report: Report, sides: list[Side], source: ModelSource, batch_size: int, context: int, rounds: int
) -> None:
    """One token for each of `batch_size` requests; the first side is what the others are compared with."""
    batch, memory = decode_batch(batch_size, context, NUM_PAGES), torch.ones(READ_FLOATS)
    *times, read = fastest(rounds, *(_step(side, batch) for side in sides), memory.sum, clock=_clock())
    config = source.config
    kv_values = 2 * batch_size * context * config.num_layers * config.num_kv_heads * config.head_dim
    for side, seconds in zip(sides, times, strict=True):
        step_s = (side.weight_bytes + kv_values * side.kv_itemsize) / (memory.nbytes / read)
        value, limit, peers = batch_size / seconds, batch_size / step_s, {sides[0].name: batch_size / times[0]}
        case = f"{side.name}: decode {batch_size} x {context}"
        report.row("quantization", case, value, "token/s", limit, "memory read", value / limit, peers)


def bench_prefill(report: Report, sides: list[Side], source: ModelSource, rounds: int) -> None:
    """One prompt without a cached prefix."""
    batch = extend_batch(PREFILL_TOKENS, NUM_PAGES)
    steps = [_step(side, batch) for side in sides]
    *times, theirs, ours = fastest(rounds, *steps, *matrix_products(), clock=_clock())
    flops_per_s = 2 * PRODUCT_SIZE**3 / min(theirs, ours)
    limit = PREFILL_TOKENS / (prefill_flops(source.config, PREFILL_TOKENS) / flops_per_s)
    for side, seconds in zip(sides, times, strict=True):
        value, peers = PREFILL_TOKENS / seconds, {sides[0].name: PREFILL_TOKENS / times[0]}
        case = f"{side.name}: prefill {PREFILL_TOKENS}"
        report.row("quantization", case, value, "token/s", limit, "arithmetic", value / limit, peers)


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _step(side: Side, batch: ForwardBatch) -> Callable[[], Tensor]:
    return lambda: side.runner.logits(batch)


def bench_accuracy(report: Report, exact: Side, side: Side, source: ModelSource) -> None:
    """Logits of every token of every text."""
    tokenizer = source.tokenizer()
    batches = [text_batch(tokenizer.encode(text)) for text in TEXTS]
    expected = torch.cat([exact.runner.logits(batch) for batch in batches])
    found = torch.cat([side.runner.logits(batch) for batch in batches])
    difference = (found - expected).abs()
    agreement = float((found.argmax(1) == expected.argmax(1)).float().mean())
    report.row("quantization", f"{side.name}: largest logit error", float(difference.max()), "logit")
    report.row("quantization", f"{side.name}: mean logit error", float(difference.mean()), "logit")
    report.row("quantization", f"{side.name}: same first choice", agreement, "share", 1.0, "all tokens", agreement)


def text_batch(token_ids: list[int]) -> ForwardBatch:
    """A text at once, with the logits of all its tokens."""
    num_tokens = len(token_ids)
    positions, page_table = np.arange(num_tokens), np.arange(-(-num_tokens // PAGE_SIZE), dtype=np.int32)[None]
    before_last = positions[:-1]
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=np.array(token_ids),
        positions=positions,
        out_slots=positions,
        page_table=page_table,
        seq_lens=np.array([num_tokens]),
        extend_lens=np.array([num_tokens]),
        num_sampled=np.ones(1, np.int64),
        prompt_rows=PromptRows(before_last, before_last, 0),
    )


if __name__ == "__main__":
    main()
