"""What adapters cost: a decode step of 8 requests and a prefill step with 1, 4 and 8 adapters, against none.

    python bench/lora.py [--threads N] [--model smollm2] [--rank 16] [--quantization auto] [--quick] [--json]

All sides take turns; the best of several rounds counts. The adapters change every linear layer. The limit is the step
without adapters, from the same rounds, and beside it for decode the reading of the adapters' weights from memory, for
prefill their multiplications at the speed of the fastest plain matrix product. `not wrapped` is a model that was loaded
without places for adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from engine import NUM_PAGES, PRODUCT_SIZE, READ_FLOATS, fastest, matrix_products
from forward_batches import PAGE_SIZE, decode_batch, extend_batch
from report import Report, arguments

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.lora.registry import EMBEDDING, OUTPUT, TARGETS, Adapter, Product
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch

BATCH_SIZE = 8
CONTEXT = 128
PREFILL_TOKENS = 512
NUM_ADAPTERS = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Sides:
    """One model with adapters in slots 0 to 7, and one without places for any."""

    wrapped: ModelRunner
    plain: ModelRunner
    adapter_floats: int  # of one adapter


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantization", default="auto", help="auto: weights as they are stored; none: float32")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    source = open_model(options.model)
    sides = build(source, options.rank, options.quantization, options.threads)
    rounds = 8 if options.quick else 80
    with Report(as_json=options.json) as report:
        bench_decode(report, sides, rounds)
        bench_prefill(report, sides, max(4, rounds // 8))


def build(source: ModelSource, rank: int, quantization: str, num_threads: int) -> Sides:
    """Load the model twice. Only the shape of KV and adapters matters: they are random."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.randn(layout.shape)
    wrapped, plain = (
        ModelRunner(
            source, kv, dtype="float32", quantization=quantization, num_threads=num_threads, max_loras=max_loras
        )
        for max_loras in (max(NUM_ADAPTERS), 0)
    )
    for slot in range(max(NUM_ADAPTERS)):
        adapter = random_adapter(source, rank, seed=slot)
        wrapped.loras.install(slot, wrapped.loras.prepare(adapter))
    return Sides(wrapped, plain, sum(product.a.size + product.b.size for product in adapter.products))


def random_adapter(source: ModelSource, rank: int, seed: int) -> Adapter:
    """An adapter of every linear layer that can have one, too weak to change what is computed much."""
    generator, products = np.random.default_rng(seed), []
    for _, pieces in FAMILIES[source.config.architecture].placement(source.config):
        for piece in pieces:
            if TARGETS.fullmatch(piece.target) and piece.target not in (EMBEDDING, OUTPUT):
                a = generator.standard_normal((rank, piece.shape[1]), np.float32)
                b = generator.standard_normal((piece.shape[0], rank), np.float32) * np.float32(1e-3)
                products.append(Product(piece.target, piece.start, a, b))
    return Adapter(str(seed), tuple(products))


def with_adapters(batch: ForwardBatch, num_adapters: int) -> ForwardBatch:
    """Give every request an adapter, one after the other in turn."""
    return replace(batch, adapters=np.arange(batch.batch_size) % num_adapters)


def bench_decode(report: Report, sides: Sides, rounds: int) -> None:
    """One token for each of 8 requests."""
    batch, memory = decode_batch(BATCH_SIZE, CONTEXT, NUM_PAGES), torch.ones(READ_FLOATS)
    steps = [with_adapters(batch, count) for count in NUM_ADAPTERS]
    plain, base, read, *times = fastest(
        rounds,
        lambda: sides.plain.logits(batch),
        lambda: sides.wrapped.logits(batch),
        memory.sum,
        *(lambda step=step: sides.wrapped.logits(step) for step in steps),
    )
    row(report, f"decode {BATCH_SIZE} x {CONTEXT}, no adapter", base, plain, "not wrapped")
    for count, time_s in zip(NUM_ADAPTERS, times, strict=True):
        limit = base + count * sides.adapter_floats * 4 / (memory.nbytes / read)
        row(report, f"decode {BATCH_SIZE} x {CONTEXT}, adapters: {count}", time_s, limit, "base + memory read")


def bench_prefill(report: Report, sides: Sides, rounds: int) -> None:
    """One prompt."""
    batch = extend_batch(PREFILL_TOKENS, NUM_PAGES)
    base, time_s, *products = fastest(
        rounds,
        lambda: sides.wrapped.logits(batch),
        lambda: sides.wrapped.logits(with_adapters(batch, 1)),
        *matrix_products(),
    )
    flops_per_s = 2 * PRODUCT_SIZE**3 / min(products)
    limit = base + 2 * PREFILL_TOKENS * sides.adapter_floats / flops_per_s
    row(report, f"prefill {PREFILL_TOKENS}, adapters: 1", time_s, limit, "base + arithmetic")


def row(report: Report, case: str, value_s: float, limit_s: float, limit_is: str) -> None:
    report.row("lora", case, value_s * 1e3, "ms", limit_s * 1e3, limit_is, limit_s / value_s)


if __name__ == "__main__":
    main()
