"""Prefill and decode speed of the engine's forward step, against transformers and against what the machine can do.

    python bench/engine.py [--threads N] [--model smollm2] [--vllm PYTHON] [--quick] [--json]

Both sides have the same float32 weights and the same number of threads, and take turns; the best of several rounds
counts. transformers is measured at its best: bare forward passes, without the cost of its `generate` loop. vLLM's CPU
build is measured too where `--vllm` names a Python that has it; its times include its scheduler.
Limits, from the same rounds: prefill, the model's multiplications at the speed of the fastest plain matrix product
(torch's or ours); decode, reading all weights and the batch's KV from memory once a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from forward_batches import PAGE_SIZE, decode_batch, extend_batch, greedy
from model_cost import kv_numbers, prefill_flops
from report import Report, arguments
from vllm_client import VllmClient

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.quantization.weight import Stored, expanded
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.kernels.cpu.linear import PackedMatrix

PREFILL_TOKENS = (512, 2048)
DECODE_CASES = tuple((batch_size, context) for context in (128, 512) for batch_size in (1, 4, 8, 16))
NUM_PAGES = max(max(PREFILL_TOKENS), max(batch_size * context for batch_size, context in DECODE_CASES)) // PAGE_SIZE
PRODUCT_SIZE = 1536  # of the square matrices that measure the arithmetic
READ_FLOATS = 1 << 26  # 256 MiB: far beyond any cache


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared, on one model."""

    config: ModelConfig
    weight_bytes: int
    runner: ModelRunner
    peer: Any  # transformers.LlamaForCausalLM, whose types are not strict
    vllm: VllmClient | None


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vLLM's CPU build")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    sides = build(options.model, options.threads, options.vllm)
    rounds = 3 if options.quick else 10
    with Report(as_json=options.json) as report:
        for num_tokens in PREFILL_TOKENS[: 1 if options.quick else None]:
            bench_prefill(report, sides, num_tokens, rounds)
        for batch_size, context in DECODE_CASES:
            bench_decode(report, sides, batch_size, context, 2 * rounds)
    if sides.vllm:
        sides.vllm.close()


def build(model: str, num_threads: int, vllm_python: str | None) -> Sides:
    """Load the model for each side. Only the shape of the KV matters: it is random."""
    source = open_model(model)
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    runner = ModelRunner(source, torch.randn(layout.shape), dtype="float32", num_threads=num_threads)
    peer = transformers_model(source)
    vllm = start_vllm(vllm_python, peer, num_threads) if vllm_python else None
    return Sides(source.config, matrix_bytes(source.tensors()), runner, peer, vllm)


def start_vllm(python: str, model: Any, num_threads: int) -> VllmClient:
    """Give vLLM the same weights, in a folder that it reads at once."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return VllmClient(python, Path(folder), num_threads)


def transformers_model(source: ModelSource) -> Any:
    """The same weights in transformers."""
    config = source.config
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        max_position_embeddings=config.context_len,
        tie_word_embeddings=config.tie_embeddings,
    )
    model: Any = transformers.LlamaForCausalLM(theirs)
    for name, array in expanded(source.tensors()):
        model.get_parameter(name).data.copy_(torch.from_numpy(array))
    return model.eval()


def bench_prefill(report: Report, sides: Sides, num_tokens: int, rounds: int) -> None:
    """One prompt of `num_tokens` without a cached prefix."""
    batch, sampling = extend_batch(num_tokens, NUM_PAGES), greedy(1)
    ids = torch.from_numpy(batch.input_ids)[None]
    ours, theirs, *products = fastest(
        rounds,
        lambda: sides.runner.execute(batch, sampling),
        lambda: sides.peer(ids, logits_to_keep=1, use_cache=False),
        *matrix_products(),
    )
    flops_per_s = 2 * PRODUCT_SIZE**3 / min(products)
    value, limit = num_tokens / ours, num_tokens / (prefill_flops(sides.config, num_tokens) / flops_per_s)
    peers = {"transformers": num_tokens / theirs}
    if sides.vllm:
        peers["vllm"] = num_tokens / sides.vllm.prefill_s(num_tokens, rounds)
    report.row("engine", f"prefill {num_tokens}", value, "token/s", limit, "arithmetic", value / limit, peers)


def bench_decode(report: Report, sides: Sides, batch_size: int, context: int, rounds: int) -> None:
    """One token for each of `batch_size` requests that have `context` tokens with the new one."""
    batch, sampling = decode_batch(batch_size, context, NUM_PAGES), greedy(batch_size)
    cache = random_cache(sides.config, batch_size, context - 1)
    ids = torch.from_numpy(batch.input_ids)[:, None]
    memory = torch.ones(READ_FLOATS)

    def peer_step() -> None:
        sides.peer(ids, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    ours, theirs, read = fastest(rounds, lambda: sides.runner.execute(batch, sampling), peer_step, memory.sum)
    step_s = decode_bytes(sides, batch_size * context) / (memory.nbytes / read)
    value, limit = batch_size / ours, batch_size / step_s
    peers = {"transformers": batch_size / theirs}
    if sides.vllm:
        peers["vllm"] = batch_size / sides.vllm.decode_step_s(batch_size, context, max(2, rounds // 4))
    case = f"decode {batch_size} x {context}"
    report.row("engine", case, value, "token/s", limit, "memory read", value / limit, peers)


def fastest(rounds: int, *sides: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the shortest time of each side in seconds, the sides taking turns after one round to warm up."""
    times = [[_timed(side, clock) for side in sides] for _ in range(rounds + 1)]
    return [min(side_times) for side_times in zip(*times[1:], strict=True)]


def matrix_products() -> tuple[Callable[[], object], Callable[[], object]]:
    """A square product by torch and by the C kernel."""
    weight, x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE), torch.randn(PRODUCT_SIZE, PRODUCT_SIZE)
    out, packed = torch.empty(PRODUCT_SIZE, PRODUCT_SIZE), PackedMatrix(weight)
    return lambda: torch.mm(x, weight, out=out), lambda: packed.multiply(x, out)


def decode_bytes(sides: Sides, num_cached_tokens: int) -> int:
    """What one decode step must read: weights as we store them, keys and values in float32."""
    return sides.weight_bytes + 4 * kv_numbers(sides.config, num_cached_tokens)


def matrix_bytes(tensors: Iterable[tuple[str, Stored]]) -> int:
    """What the matrices of a model with tied embeddings take, each read once a step."""
    matrices = [tensor for _, tensor in tensors if len(tensor.shape) == 2]
    return sum(matrix.nbytes for matrix in matrices)


def random_cache(config: ModelConfig, batch_size: int, num_tokens: int) -> transformers.DynamicCache:
    """A transformers KV cache of the same size as ours."""
    cache = transformers.DynamicCache()
    shape = (batch_size, config.num_kv_heads, num_tokens, config.head_dim)
    for layer in range(config.num_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def _timed(side: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    side()
    return clock() - started


if __name__ == "__main__":
    main()
