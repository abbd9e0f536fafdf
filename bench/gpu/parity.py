"""The same tokens everywhere: greedy answers on GPUs against those of the CPU engine.

Fifty prompts, float32, in every way to run them: with and without graphs, on two ranks, handed over between two GPUs
with the KV's digests compared on both sides. The CPU engine's answers of the small model are in `parity_smollm2.json`,
with the margin of each token: how far the second choice was behind, in log-probability. Sums in another order may turn
a tie round; a first difference within `TIE` is counted as one, a wider one is an error, and the command ends with 1.
The small model's nine heads can't be shared by two ranks: these run a made-up model, after the CPU engine has.

    python bench/gpu/parity.py --write             # on any machine: the CPU engine's answers
    python bench/gpu/parity.py                     # on one GPU or two, several ways at a time
    python bench/gpu/parity.py --device cpu        # the same comparison without a GPU
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from llama_8b import model_folder
from parity_prompts import prompts
from report import Report, arguments
from scheduler_pair import SchedulerPair

from diptych.checkpoints.source import open_model
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.values.transfer_rules import TransferRules

ANSWERS: Final = Path(__file__).with_name("parity_smollm2.json")
NUM_TOKENS: Final = 32
TIE: Final = 2e-3  # log-probability; float32 sums in another order move logits by less than a tenth of it
AT_ONCE: Final = 4  # ways, on GPUs; each has processes of its own, and is small
CPU_THREADS: Final = min(8, os.cpu_count() or 1)
COMMON: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "quantization": "none",
    "kv_cache_mib": 512,
    "max_step_tokens": 256,  # so that long prompts come in chunks
}
MADE_UP: Final = {  # heads and KV heads that two and four ranks can share; the small model's tokens
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SAME: Final[Mapping[str, Any]] = {}
ONE_RANK: Final[Mapping[str, Any]] = {"tp": 1}
TWO_RANKS: Final[Mapping[str, Any]] = {"tp": 2, "base_gpu": 0}
GREEDY: Final = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answers:
    """The CPU engine's."""

    token_ids: list[list[int]]
    margins: list[list[float]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model."""

    num_gpus: int
    run: Callable[[str, Mapping[str, Any], list[list[int]]], list[list[int]]]  # of model, options and prompts
    options: Mapping[str, Any]
    is_made_up: bool = False  # the model


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and what it should say."""

    model: str
    options: Mapping[str, Any]
    answers: Answers


def alone(model: str, options: Mapping[str, Any], requests: list[list[int]]) -> list[list[int]]:
    with Engine(model, EngineOptions(**options)) as engine:
        return [list(each.token_ids) for each in engine.generate_batch(requests, GREEDY)]


def handed_over(
    model: str, options: Mapping[str, Any], requests: list[list[int]], *, of_decode: Mapping[str, Any] = SAME
) -> list[list[int]]:
    """`of_decode`: the options in which decode differs. Raises when a hand-off moved nothing, or its digests differ."""
    sides = ({**options, "model": model, **own} for own in ({}, of_decode))
    prefill, decode = (EngineOptions(**gpu | side) for side, gpu in zip(sides, _gpus(options), strict=True))
    return asyncio.run(_handed_over(prefill, decode, requests))


async def _handed_over(prefill: EngineOptions, decode: EngineOptions, requests: list[list[int]]) -> list[list[int]]:
    outputs = []
    async with SchedulerPair(prefill, TransferRules("always", num_windows=4), decode_engine=decode) as pair:
        rooms = [(2 * number + 1, request) for number, request in enumerate(requests)]
        for first, last in await asyncio.gather(*(pair.request(*room, max_tokens=NUM_TOKENS) for room in rooms)):
            if first.last is None or last.last is None or last.last.HasField("error"):
                raise RuntimeError(f"a hand-off failed: {last.last}")
            sent, received = first.last.stats, last.last.stats
            if not sent.pages_moved or sent.kv_digest != received.kv_digest:
                raise RuntimeError(f"prefill sent {sent}, decode received {received}")
            outputs.append([*first.token_ids, *last.token_ids])
    return outputs


def _gpus(options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the options that put the two sides on different GPUs."""
    if options["device"] != "cuda":
        return {}, {}
    return {"base_gpu": 0}, {"base_gpu": 1}


WAYS: Final[Mapping[str, Way]] = {
    "one process": Way(1, alone, {}),
    "without graphs": Way(1, alone, {"cuda_graphs": "off"}),
    "steps one by one": Way(1, alone, {"overlap": "off"}),
    "disaggregated": Way(2, handed_over, {}),
    "from pages of 16 tokens to 64": Way(2, partial(handed_over, of_decode={"page_size": 64}), {}),
    "from pages of 64 tokens to 16": Way(2, partial(handed_over, of_decode={"page_size": 16}), {"page_size": 64}),
    "memory measured": Way(1, alone, {"kv_cache_mib": 0, "gpu_memory_share": 0.3}),  # as the default is
    "made-up model": Way(1, alone, {}, is_made_up=True),
    "made-up model, tp 2": Way(2, alone, {"tp": 2}, is_made_up=True),
    "made-up model, tp 2, without graphs": Way(2, alone, {"tp": 2, "cuda_graphs": "off"}, is_made_up=True),
    "made-up model, from tp 2 to tp 1": Way(2, partial(handed_over, of_decode=ONE_RANK), {"tp": 2}, is_made_up=True),
    "made-up model, from tp 1 to tp 2": Way(2, partial(handed_over, of_decode=TWO_RANKS), {}, is_made_up=True),
    "from float32 to FP8, for information": Way(2, partial(handed_over, of_decode={"kv_cache_dtype": "fp8_e4m3"}), {}),
    "bfloat16, for information": Way(1, alone, {"dtype": "bfloat16"}),
}
CPU_WAYS: Final = ("one process", "disaggregated", "from pages of 16 tokens to 64", "made-up model, tp 2")


def reference(model: str, options: Mapping[str, Any], requests: list[list[int]]) -> Answers:
    """What the CPU engine says."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    with Engine(model, EngineOptions(**COMMON, **options, device="cpu", num_threads=CPU_THREADS)) as engine:
        made = engine.generate_batch(requests, params)
    margins = []
    for each in made:
        assert each.logprobs is not None
        tops = each.logprobs.top_logprobs
        margins.append([round(a - b, 4) for a, b in zip(tops[::2], tops[1::2], strict=True)])
    return Answers([list(each.token_ids) for each in made], margins)


def differences(answers: Answers, outputs: Sequence[Sequence[int]]) -> list[tuple[int, int, float]]:
    """Return prompt, position and the CPU's margin of the first token that differs, for each prompt with one."""
    found = []
    for number, (wanted, got) in enumerate(zip(answers.token_ids, outputs, strict=True)):
        for position in range(len(wanted)):
            if position >= len(got) or wanted[position] != got[position]:
                found.append((number, position, answers.margins[number][position]))
                break
    return found


def compare(report: Report, name: str, answers: Answers, outputs: Sequence[Sequence[int]]) -> bool:
    """Tell how many prompts are answered alike; False where one is not, and it was no tie."""
    wrong = differences(answers, outputs)
    wide = [difference for difference in wrong if difference[2] > TIE]
    for number, position, margin in wrong:
        print(f"{name}: prompt {number} differs at token {position}, margin {margin}", file=sys.stderr)
    equal, all_of_them = len(outputs) - len(wrong), len(outputs)
    peers = {"ties": len(wrong) - len(wide), "wrong": len(wide)}
    report.row("gpu/parity", name, equal, "prompts", all_of_them, "CPU engine", equal / all_of_them, peers)
    return not wide


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--write", action="store_true", help="compute the CPU engine's answers, and keep them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=2, help="that may be used")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="all that there are GPUs for, if not given")
    parser.add_argument("--model", default="smollm2", help="the same one, in a file")
    options = parser.parse_args()
    tokenizer = open_model(options.model).tokenizer()
    requests = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts()]
    if options.write:
        answers = reference(options.model, {}, requests)
        ANSWERS.write_text(json.dumps(asdict(answers), separators=(",", ":")) + "\n")
        return 0
    possible = CPU_WAYS if options.device == "cpu" else [name for name in WAYS if WAYS[name].num_gpus <= options.gpus]
    names = options.ways or possible
    at_once = ThreadPoolExecutor(1 if options.device == "cpu" else AT_ONCE)
    with model_folder(MADE_UP) as folder, Report(as_json=options.json) as report, at_once as pool:

        def run(subject: Subject, of_made_up: bool) -> list[Future[bool]]:
            ways = [name for name in names if WAYS[name].is_made_up is of_made_up]
            return [pool.submit(_try, report, name, subject, options.device, requests) for name in ways]

        runs = run(Subject(options.model, {}, Answers(**json.loads(ANSWERS.read_text()))), False)
        if any(WAYS[name].is_made_up for name in names):
            runs += run(made_up_subject(str(folder), requests), True)
        return 0 if all([each.result() for each in runs]) else 1


def made_up_subject(folder: str, requests: list[list[int]]) -> Subject:
    options = {"load_format": "dummy"}
    return Subject(folder, options, reference(folder, options, requests))


def _try(report: Report, name: str, subject: Subject, device: str, requests: list[list[int]]) -> bool:
    """Run one way; what fails costs no other."""
    way, began = WAYS[name], time.perf_counter()
    try:
        outputs = way.run(subject.model, {**COMMON, **subject.options, "device": device, **way.options}, requests)
    except Exception:
        print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return False
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return compare(report, name, subject.answers, outputs) or "information" in name


if __name__ == "__main__":
    raise SystemExit(main())
