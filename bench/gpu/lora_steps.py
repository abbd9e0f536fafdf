"""A decode step of Llama-3-8B with adapters on every linear layer, from graphs, against the step without.

Request i of a batch has adapter i of those that are loaded, in turns. The limit is the same step without adapters and
one read of the adapters' weights at copy speed. Then steps of prompts, of one adapter and of eight.

    python bench/gpu/lora_steps.py [--ranks 16 64] [--quick] [--json]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from forward_batches import PAGE_SIZE, decode_batch, extend_batch
from llama_8b import CONTEXT_LEN, model_folder
from model_steps import DEVICE, MAX_REQUESTS, MAX_STEP_TOKENS, kernels_s, overlapped, random_pool
from report import Report, arguments
from roofline import Roofline, roofline

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.lora.registry import EMBEDDING, OUTPUT, Adapter, Product
from diptych.engine.models.adapters.lora import adapted_matrices
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.values.batch import ForwardBatch

NUM_ADAPTERS: Final = 8
CONTEXT: Final = 1024
BATCHES: Final = (1, 8, 64)
PROMPTS: Final = (512, 4096)  # tokens of a step: replayed in pieces, and launched
NUM_STEPS: Final = 40
NUM_PAGES: Final = 1 + MAX_REQUESTS * (CONTEXT // PAGE_SIZE + 12)


def adapter(source: ModelSource, rank: int) -> tuple[Adapter, int]:
    """Return small random weights for every linear layer, and how many bytes they have on the GPU."""
    matrices = adapted_matrices(FAMILIES[source.config.architecture].placement(source.config))
    random, products, numbers = np.random.default_rng(0), list[Product](), 0
    for name, matrix in matrices.items():
        if name in (EMBEDDING, OUTPUT):
            continue
        a = random.standard_normal((rank, matrix.num_columns), np.float32) / np.float32(100)
        for start, size in matrix.parts:
            products.append(Product(name, start, a, np.full((size, rank), 0.01, np.float32)))
            numbers += rank * (matrix.num_columns + size)
    return Adapter("0" * 32, tuple(products)), 2 * numbers


def load(source: ModelSource, rank: int) -> tuple[GpuRunner, int]:
    """Load the model with all its adapters in their slots; return how many bytes one has, too."""
    options = ModelOptions(dtype="bfloat16", max_loras=NUM_ADAPTERS, max_lora_rank=rank)
    model = load_model(source, random_pool(source.config, NUM_PAGES), options)
    limits = StepLimits(MAX_STEP_TOKENS, MAX_REQUESTS, CONTEXT_LEN // PAGE_SIZE, max_loras=NUM_ADAPTERS)
    weights, nbytes = adapter(source, rank)
    prepared = model.loras.prepare(weights)
    for slot in range(NUM_ADAPTERS):
        model.loras.install(slot, prepared)
    return new_runner(model, limits, DEVICE, with_graphs=True), nbytes


def with_adapters(batch: ForwardBatch, num_adapters: int) -> ForwardBatch:
    return replace(batch, adapters=np.arange(batch.batch_size) % num_adapters) if num_adapters else batch


def measure(
    report: Report, limits: Roofline, runner: GpuRunner, batch: ForwardBatch, name: str, adapter_nbytes: int
) -> None:
    without_s = None
    for num_adapters in (0, 1, NUM_ADAPTERS):
        if num_adapters > max(1, batch.batch_size):
            continue
        now = with_adapters(batch, num_adapters)
        for _ in range(3):
            runner.logits(now)
        torch.cuda.synchronize()
        seconds = kernels_s(runner, now, NUM_STEPS // 4)
        pace = overlapped(runner, now, NUM_STEPS).step_s
        without_s = without_s or seconds
        limit_s = without_s + limits.seconds(num_adapters * adapter_nbytes)
        peers = {"one behind the other": 1e3 * pace, "of that without": seconds / without_s}
        what = f"{name}, {num_adapters} adapters"
        report.row("gpu/lora", what, 1e3 * seconds, "ms", 1e3 * limit_s, "without, and reads", limit_s / seconds, peers)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args()
    limits = roofline()
    with model_folder() as folder:
        source = open_model(str(folder), "dummy")
        for rank in options.ranks:
            with Report(as_json=options.json) as report:
                runner, nbytes = load(source, rank)
                for size in BATCHES[:: 2 if options.quick else 1]:
                    batch = decode_batch(size, CONTEXT, NUM_PAGES)
                    measure(report, limits, runner, batch, f"rank {rank}, B {size}", nbytes)
                for tokens in PROMPTS:
                    batch = extend_batch(tokens // 8, NUM_PAGES, batch_size=8)
                    measure(report, limits, runner, batch, f"rank {rank}, {tokens} tokens of prompts", nbytes)
            del runner
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
