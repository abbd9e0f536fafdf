"""What verification costs: decode steps of Llama-3-8B, made-up weights, with rows of one token and its drafts.

Through the runner that workers use, replayed from graphs. Steps with drafts follow one after the other, as where a
request stands behind drafts is known only when it is over. Beside each stands the step without drafts of an overlapping
scheduler: a row must give the inverse of the ratio in tokens for its drafts to pay.

    python bench/gpu/draft_rows.py [--quick] [--json]
"""

from __future__ import annotations

from typing import Final

from forward_batches import PAGE_SIZE, decode_batch, rows_batch
from llama_8b import CONTEXT_LEN, model_folder
from model_steps import DEVICE, MAX_REQUESTS, MAX_STEP_TOKENS, load, one_by_one, overlapped
from report import Report, arguments

from diptych.checkpoints.source import open_model
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner

CASES: Final = ((1, 1024), (1, 8192), (16, 1024), (16, 4096), (64, 1024))  # requests, tokens of each
DRAFTS: Final = (1, 3, 7, 15)  # of each request
MAX_DRAFTS: Final = 256  # of a step
NUM_STEPS: Final = 20
PAGES_TO_GROW: Final = 4
NUM_PAGES: Final = 1 + max(size * (context // PAGE_SIZE + PAGES_TO_GROW) for size, context in CASES)


def main() -> None:
    options = arguments(__doc__).parse_args()
    cases = CASES[::2] if options.quick else CASES
    limits = StepLimits(MAX_STEP_TOKENS, MAX_REQUESTS, CONTEXT_LEN // PAGE_SIZE, max_drafts=MAX_DRAFTS)
    with model_folder() as folder, Report(as_json=options.json) as report:
        runner = new_runner(load(open_model(str(folder), "dummy"), NUM_PAGES), limits, DEVICE, with_graphs=True)
        for size, context in cases:
            plain_ms = 1e3 * overlapped(runner, decode_batch(size, context, NUM_PAGES), NUM_STEPS).step_s
            for num_drafts in (0, *(each for each in DRAFTS if each * size <= MAX_DRAFTS)):
                batch = rows_batch(size, 1 + num_drafts, context, NUM_PAGES)
                ms = 1e3 * one_by_one(runner, batch, NUM_STEPS)
                name = f"step, {num_drafts} drafts a request, B {size}, L {context}"
                report.row("gpu/drafts", name, ms, "ms", plain_ms, "without drafts, overlapped", plain_ms / ms, {})


if __name__ == "__main__":
    main()
