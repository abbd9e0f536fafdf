"""What drafts save a model with recurrent layers on a GPU: as `draft_speed.py`, of the shape of Qwen3.5's dense models.

Three of four layers are gated delta nets. Their states see what came true before the next step, by graphs of their own;
the row `late` is what that takes beside a step, for as many tokens as a step of 1, 16 and 64 requests may have got.

    python bench/gpu/recurrent_draft_speed.py [--quick] [--json]
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import torch
from device_clock import seconds_eager
from draft_speed import PAGE_SIZE, Side, measure, texts_of
from llama_8b import CONTEXT_LEN, model_folder
from model_steps import DEVICE, MAX_REQUESTS, MAX_STEP_TOKENS
from report import Report, arguments

from diptych.checkpoints.source import open_model
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner
from diptych.engine.runner.gpu.warm_up import _decode, greedy
from diptych.engine.runner.kv_pool import new_kv
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import StateMoves
from diptych.engine.values.kv_regions import pages_per_state
from diptych.engine.values.limits import MAX_DRAFTS, MAX_ROW_DRAFTS, PROMPT_ROWS

NAME: Final = "gpu/recurrent_drafts"
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": CONTEXT_LEN,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}
PREFIX_TOKENS: Final = 600  # before what a request is about
TEXT_PAGES: Final = 160  # of a request
STATES: Final = 3  # in pages, of a request
SIZES: Final = (1, 16, 64)  # requests
TRUE: Final = ((1, 6), (16, 4), (64, 2))  # requests, tokens of each that came true


def measure_late(report: Report, runner: GpuRunner, num_requests: int, num_true: int) -> None:
    """Time what lets states see tokens, which are not made of numbers here."""
    late = runner._late_rows
    assert late is not None
    slots, none = np.arange(num_requests), np.zeros(0, np.int64)
    pages = np.zeros((0, 1), np.int32)
    moves = StateMoves(slots, none, none, pages, none, pages, np.full(num_requests, num_true))
    with torch.inference_mode():
        seconds = seconds_eager(lambda: late.queue(moves))
    report.row(NAME, f"late, {num_requests} x {num_true}", 1e6 * seconds, "us")


def capture_all(runner: GpuRunner, limits: StepLimits) -> None:
    """Have all graphs, as workers have: nothing is captured while it is measured."""
    for num_rows in reversed(runner.row_rungs):
        runner.execute(_decode(num_rows, limits, PAGE_SIZE), greedy(num_rows))


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = StepLimits(MAX_STEP_TOKENS, MAX_REQUESTS, CONTEXT_LEN // PAGE_SIZE, max_drafts=MAX_DRAFTS)
    with model_folder(CONFIG) as folder, Report(as_json=options.json) as report:
        source = open_model(str(folder), "dummy")
        layout = ModelRunner.pool_layout(source.config, num_pages=1, page_size=PAGE_SIZE, dtype="bfloat16")
        per_state = pages_per_state(source.config, 1, "bfloat16", layout)
        num_pages = 1 + MAX_REQUESTS * (TEXT_PAGES + STATES * per_state)
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="bfloat16")
        slots, row_tokens = MAX_REQUESTS + PROMPT_ROWS, 1 + MAX_ROW_DRAFTS
        load_options = ModelOptions("bfloat16", max_requests=slots, row_tokens=row_tokens)
        model = load_model(source, new_kv(layout, DEVICE), load_options)
        runner = new_runner(model, limits, DEVICE, with_graphs=True)
        capture_all(runner, limits)
        runner.measure_late_rows(time.perf_counter)
        sides = {speculate: Side(runner, speculate, num_pages, per_state) for speculate in ("off", "suffix")}
        for size in SIZES[:1] if options.quick else SIZES:
            measure(report, sides, NAME, f"code edits, B {size}", texts_of("code edits", size, PREFIX_TOKENS))
        for true in TRUE[:1] if options.quick else TRUE:
            measure_late(report, runner, *true)


if __name__ == "__main__":
    main()
