"""What `--deterministic` costs: decode steps and prompts of Llama-3-8B's shape, beside the default in the same run.

The limit of a row is the default's value.

    python bench/gpu/deterministic.py [--quick] [--json]
"""

from __future__ import annotations

from typing import Final

from forward_batches import PAGE_SIZE, decode_batch, extend_batch
from llama_8b import DECODE_CASES, PROMPT_LEN, model_folder
from model_steps import overlapped, random_pool, runner_of
from report import Report, arguments

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.values.batch import ForwardBatch

NUM_STEPS: Final = 30
NUM_PAGES: Final = 1 + max(size * (context // PAGE_SIZE + 12) for size, context in DECODE_CASES)
Batches = dict[str, ForwardBatch]


def batches(*, quick: bool) -> Batches:
    cases = DECODE_CASES[: 1 if quick else None]
    found = {f"step, B {size}, L {context}": decode_batch(size, context, NUM_PAGES) for size, context in cases}
    return found | {f"prompt of {PROMPT_LEN}": extend_batch(PROMPT_LEN, NUM_PAGES)}


def measure(source: ModelSource, of: Batches, *, deterministic: bool) -> dict[str, float]:
    """Return the milliseconds of each."""
    options = ModelOptions(dtype="bfloat16", deterministic=deterministic)
    model = load_model(source, random_pool(source.config, NUM_PAGES), options)
    runner = runner_of(model, with_graphs=True)
    return {name: 1e3 * overlapped(runner, batch, NUM_STEPS).step_s for name, batch in of.items()}


def main() -> None:
    options = arguments(__doc__).parse_args()
    with model_folder() as folder, Report(as_json=options.json) as report:
        source, of = open_model(str(folder), "dummy"), batches(quick=options.quick)
        default, deterministic = (measure(source, of, deterministic=each) for each in (False, True))
        for name, ms in deterministic.items():
            report.row("gpu/deterministic", name, ms, "ms", default[name], "the default", default[name] / ms)


if __name__ == "__main__":
    main()
