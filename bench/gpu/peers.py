"""transformers' continuous batching on the same weights: paged KV, graphs and overlap as it chooses them itself.

Decode: the time from one token to the next while all requests run, as the library stamps them. Prefill: prompts of
4,096 tokens from the first one's start to the last one's token. Limits are those of `decode_step.py` and `prefill.py`.
Without flash-attn, which it would rather use, it computes by torch's SDPA.

    python bench/gpu/peers.py [--quick] [--json]
"""

from __future__ import annotations

import gc
import importlib
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from llama_8b import CONFIG, PROMPT_LEN, decode_limit_s, model_folder
from model_cost import prefill_flops
from report import Report, arguments
from roofline import Roofline, roofline

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource, open_model

DEVICE: Final = "cuda"
DECODE_CASES: Final = ((1, 1024), (8, 1024), (64, 1024))  # of 4,096 tokens, 64 would take it minutes
NUM_TOKENS: Final = 48  # of each request, in decode cases
NUM_PROMPTS: Final = 8


def transformers_model(source: ModelSource) -> Any:
    """The model on the GPU in bfloat16, with the source's weights."""
    import transformers

    shape = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")}
    theta = shape.pop("rope_theta")
    config = transformers.LlamaConfig(
        **shape | {"eos_token_id": None}, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model: Any = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for name, array in source.tensors():
        model.get_parameter(name).data.copy_(torch.as_tensor(array))
    return model.eval()


def generate(model: Any, num_prompts: int, prompt_len: int, num_tokens: int) -> list[Any]:
    """Return what the library says of each request."""
    transformers: Any = importlib.import_module("transformers")
    generation: Any = importlib.import_module("transformers.generation")
    gc.collect()
    torch.cuda.empty_cache()  # the library makes a new pool each time, of what is free
    rng = random.Random(num_prompts)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(prompt_len)] for _ in range(num_prompts)]
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None),
        continuous_batching_config=generation.ContinuousBatchingConfig(max_memory_percent=0.8),
        record_timestamps=True,
        progress_bar=False,
    )
    made = list(outputs.values())
    if len(made) < num_prompts or any(len(each.generated_tokens) < num_tokens for each in made):
        raise RuntimeError(f"{num_prompts} requests: {[each.error for each in made if each.error][:1]}")
    return made


def step_s(stamps: Sequence[Sequence[float]]) -> float:
    """Return the time of a step while all requests run."""
    start, end = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    steps = statistics.median(sum(start < stamp <= end for stamp in each) for each in stamps)
    if not steps:
        raise RuntimeError("the requests did not run at the same time")
    return (end - start) / steps


def measure_decode(report: Report, limits: Roofline, config: ModelConfig, model: Any, case: tuple[int, int]) -> None:
    batch_size, context = case
    made = generate(model, batch_size, context, NUM_TOKENS)
    seconds, limit = step_s([each.timestamps for each in made]), decode_limit_s(limits, config, *case)
    name = f"transformers, step B {batch_size}, L {context}"
    report.row("gpu/peers", name, 1e3 * seconds, "ms", 1e3 * limit, "bytes at copy speed", limit / seconds)


def measure_prefill(report: Report, limits: Roofline, config: ModelConfig, model: Any) -> None:
    made = generate(model, NUM_PROMPTS, PROMPT_LEN, 1)
    seconds = max(each.timestamps[-1] for each in made) - min(each.lifespan[0] for each in made)
    value = NUM_PROMPTS * PROMPT_LEN / seconds
    limit = PROMPT_LEN * limits.bf16_flops_s / prefill_flops(config, PROMPT_LEN)
    name = f"transformers, prefill {NUM_PROMPTS} x {PROMPT_LEN}"
    report.row("gpu/peers", name, value, "tokens/s", limit, "bf16 product", value / limit)


def main() -> int:
    options = arguments(__doc__).parse_args()
    limits = roofline()
    torch.cuda.empty_cache()
    with model_folder() as folder, Report(as_json=options.json) as report:
        source = open_model(str(folder), "dummy")
        try:
            model = transformers_model(source)
            generate(model, 2, 64, 8)  # warm up
            measure_prefill(report, limits, source.config, model)
            for case in DECODE_CASES[: 1 if options.quick else None]:
                measure_decode(report, limits, source.config, model, case)
        except Exception as error:  # another project's, of any kind
            print(f"skipped: transformers: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
