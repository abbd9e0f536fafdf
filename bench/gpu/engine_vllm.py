"""vLLM's side of `whole_engines.py`, in a process of its own, because its packages exclude ours.

    python engine_vllm.py FOLDER        (started by whole_engines.py with an interpreter that has vLLM)

Everything is at vLLM's defaults but for the tokenizer, which the folder does not have. Its core is a process beside
this one, as it starts it; tokens are stamped as `LLMEngine.step` returns them, without detokenising.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any, Final

from engine_cases import Asked, Child, Figures, Ready, figures

FP8_MAX: Final = 448.0
FP8_SCALE: Final = 0.02 / 100  # of values around 100: weights as wide as those in 16 bits


def load(folder: str) -> Any:
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True)
    llm.apply_model(fill)
    return llm


def fill(model: Any) -> None:
    """Overwrite the weights in place: vLLM's made-up ones are so small that its products would draw less power."""
    import torch

    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if name.endswith("scale"):
                weight.fill_(FP8_SCALE)
            elif weight.dim() == 1:
                weight.fill_(1.0)
            elif weight.dtype == torch.float8_e4m3fn:
                numbers = torch.randn(weight.shape, device=weight.device).mul_(100).clamp_(-FP8_MAX, FP8_MAX)
                weight.copy_(numbers.to(weight.dtype))
            else:
                weight.normal_(0.0, 0.02)


class Weights:
    """What a worker of `vllm serve` is given, so that it can be told to `fill` its model, too."""

    def fill_weights(self) -> None:
        fill(self.get_model())  # type: ignore[attr-defined]  # the worker's


def set_limits(worker: Any, step_tokens: int, requests: int) -> None:
    """Have the scheduler take no more than these from now on. Its core runs the worker, so it is among the callers."""
    frame: Any = sys._getframe()
    while "scheduler" not in vars_of(frame.f_locals.get("self")):
        frame = frame.f_back
    scheduler = frame.f_locals["self"].scheduler
    scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs = step_tokens, requests


def vars_of(value: object) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def run(llm: Any, asked: Asked) -> Figures:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]

    if asked.limits is not None:
        llm.collective_rpc(set_limits, args=tuple(asked.limits))
    llm.reset_prefix_cache()
    requests, engine = asked.requests(), llm.llm_engine
    stamps: dict[str, list[float]] = {str(number): [] for number in range(len(requests))}
    params = partial(SamplingParams, temperature=0, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    for name, (token_ids, num_tokens) in zip(stamps, requests, strict=True):
        wanted = params(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)
        engine.add_request(name, TokensPrompt(prompt_token_ids=token_ids), wanted)
    while engine.has_unfinished_requests():
        outputs, now_s = engine.step(), time.perf_counter()
        for output in outputs:
            stamps[output.request_id] += [now_s] * len(output.outputs[0].token_ids)
    return figures(requests, began_s, list(stamps.values()))


def main(folder: str) -> None:
    child = Child()
    llm = load(folder)
    limits = llm.llm_engine.vllm_config.scheduler_config
    child.say(Ready(limits.max_num_batched_tokens, limits.max_num_seqs))
    child.serve(partial(run, llm))


if __name__ == "__main__":
    os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1"}  # functions go to its core
    main(sys.argv[1])
