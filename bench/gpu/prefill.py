"""Prompts of 4,096 tokens through Llama-3-8B, made-up weights in bfloat16: tokens/s against the arithmetic alone.

Through the runner that workers use; steps are queued one behind the other. The limit is the model's arithmetic,
causal attention included, at the speed of a large matrix product in the same run. Then a few new tokens behind a
cached prefix: milliseconds against one read of weights and KV, replayed from graphs but for attention, as workers do
it, and *kernel by kernel*. *Kernels alone* is the same step when all of it was queued before it began: what is above
that is the host's launching. Last, where FlashInfer is installed, the first prompts again with its attention, which
it may have to compile first.

    python bench/gpu/prefill.py [--weights fp8] [--quick] [--json]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from forward_batches import PAGE_SIZE, extend_batch
from llama_8b import PROMPT_LEN, model_folder
from model_cost import kv_numbers, layer_weights, output_weights, prefill_flops
from model_steps import kernels_s, load, one_by_one, overlapped, random_pool, runner_of
from report import Report, arguments
from roofline import Roofline, roofline

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.values.batch import OverlapRunner

CASES: Final = ((1, PROMPT_LEN, 0), (2, PROMPT_LEN, 0), (1, PROMPT_LEN // 2, PROMPT_LEN // 2), (8, PROMPT_LEN // 4, 0))
SMALL_CASES: Final = ((1, 16, 1024), (1, 128, 1024), (4, 64, 1024), (1, 512, 1024), (1, 64, 8192))
NUM_PAGES: Final = 2 * 8192 // PAGE_SIZE
WANTED: Final = 44_000  # tokens/s of 4k prompts
FP8: Final = ", weights FP8"  # in a row's name
WANTED_FP8: Final = 60_000  # with weights in FP8
NUM_STEPS: Final = 12
Case = tuple[int, int, int]  # requests, new tokens of each, tokens of each before


def flops_of(config: ModelConfig, case: Case) -> float:
    batch_size, new, prefix = case
    cached = prefill_flops(config, prefix) if prefix else 0.0
    return batch_size * (prefill_flops(config, prefix + new) - cached)


def measure_prompts(
    report: Report, limits: Roofline, config: ModelConfig, runner: OverlapRunner, case: Case, how: str = ""
) -> None:
    batch_size, new, prefix = case
    num_tokens = batch_size * new
    pace = overlapped(runner, extend_batch(new, NUM_PAGES, batch_size=batch_size, prefix_len=prefix), NUM_STEPS)
    wanted, what, rate = WANTED, "bf16 product", limits.bf16_flops_s
    if FP8 in how:
        wanted, what, rate = WANTED_FP8, "fp8 product", limits.fp8_flops_s
    value, limit = num_tokens / pace.step_s, num_tokens * rate / flops_of(config, case)
    peers = {"wanted": wanted} if new == PROMPT_LEN else {}
    name = f"prefill {batch_size} x {new} after {prefix}{how}"
    report.row("gpu/prefill", name, value, "tokens/s", limit, what, value / limit, peers)


def measure_small(
    report: Report,
    limits: Roofline,
    config: ModelConfig,
    runner: OverlapRunner,
    launching: OverlapRunner,
    case: Case,
    how: str = "",
) -> None:
    batch_size, new, prefix = case
    batch = extend_batch(new, NUM_PAGES, batch_size=batch_size, prefix_len=prefix)
    pace = overlapped(runner, batch, NUM_STEPS)
    beside = {
        "one by one": 1e3 * one_by_one(runner, batch, NUM_STEPS),
        "kernel by kernel": 1e3 * overlapped(launching, batch, NUM_STEPS).step_s,
        "kernels alone": 1e3 * kernels_s(runner, batch, NUM_STEPS),
    }
    others = output_weights(config) + kv_numbers(config, batch_size * (prefix + new))
    nbytes = 2 * others + (1 if FP8 in how else 2) * layer_weights(config)
    ms, limit_ms = 1e3 * pace.step_s, 1e3 * limits.seconds(nbytes, flops_of(config, case))
    name = f"small step, {batch_size} x {new} after {prefix}{how}"
    report.row("gpu/prefill", name, ms, "ms", limit_ms, "bytes at copy speed, or product", limit_ms / ms, beside)


def measure_flashinfer(report: Report, limits: Roofline, model: LoadedModel) -> None:
    options = replace(model.options, attention_backend="flashinfer", decode_attention_backend="triton")
    try:
        other = replace(model, options=options).on(random_pool(model.config, NUM_PAGES))
        runner = runner_of(other, with_graphs=False)
        measure_prompts(report, limits, model.config, runner, CASES[0], ", FlashInfer's attention")
    except Exception as error:  # another project's, of any kind
        print(f"skipped: flashinfer: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--weights", choices=("bfloat16", "fp8"), default="bfloat16", help="of the layers")
    options = parser.parse_args()
    limits, how = roofline(), FP8 if options.weights == "fp8" else ""
    with model_folder() as folder, Report(as_json=options.json) as report:
        model = load(open_model(str(folder), "dummy"), NUM_PAGES, weights=options.weights)
        runner, launching = (runner_of(model, with_graphs=each) for each in (True, False))
        for case in CASES[: 1 if options.quick else None]:
            measure_prompts(report, limits, model.config, runner, case, how)
        for case in SMALL_CASES[: 2 if options.quick else None]:
            measure_small(report, limits, model.config, runner, launching, case, how)
        if find_spec("flashinfer") is not None and not options.quick and not how:
            measure_flashinfer(report, limits, model)


if __name__ == "__main__":
    main()
