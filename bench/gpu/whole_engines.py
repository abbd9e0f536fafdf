"""Whole engines beside each other: ours and vLLM's, the same token ids, in turns on one GPU, at defaults of both.

Llama-3-8B by shape with made-up weights, in 16 bits and in FP8 (a scale a row, rows of activations quantised on the
fly). All requests of a case are asked at once, random prompts that nobody has cached, greedy, of fixed lengths: decode
steps while all requests run, prompts with one token of output, and two mixes of 512 requests: A has 512 to 2,048 tokens
in and 128 to 256 out, B 64 to 512 in and 256 to 512 out. Each engine is a process of its own whose client is in it,
without text; then the mixes again with vLLM held to our sizes of a step, and through HTTP: ours behind its router. A
*gap* is the time between two tokens of a request. Start until ready counts all from the program's first line on.

    python bench/gpu/whole_engines.py [--vllm "env PYTHONPATH=FOLDER python3"] [--budget-s 360] [--quick] [--json]
    python bench/gpu/whole_engines.py --device cpu --quick     # a tiny model: shows that it works, measures nothing

Turns are taken in the order of `TURNS`; one that may not end within `--budget-s` is left out, and said to be. Without
vLLM there are our rows alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_cases import Case, decode_case, prompt_case
from engine_rows import OURS, PEER, PEER_AT_OURS, Found, Scale, add_to_report
from engine_sides import Engine, Failed, diptych_engine, diptych_over_http, has_vllm, vllm_engine, vllm_over_http
from llama_8b import CONFIG, model_folder
from report import Report, arguments
from roofline import FILE_VARIABLE, recorded

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model

BATCHES: Final = (1, 8, 64, 256)
CONTEXT: Final = 1024
PROMPTS: Final = (40, 4096)
MIXES: Final = (Case("mix A", 512, (512, 2048), (128, 256)), Case("mix B", 512, (64, 512), (256, 512)))
WAKE: Final = Case("wake", 512, (64, 96), (8, 16))  # what an engine does but once is not part of any figure
QUICK_MIXES: Final = (Case("mix A", 16, (64, 256), (16, 32)), Case("mix B", 16, (8, 64), (32, 64)))
QUICK_WAKE: Final = Case("wake", 16, (8, 12), (2, 4))
NUM_SPECIAL: Final = 1000  # ids that prompts leave out, at the end of a vocabulary
TINY: Final[Mapping[str, Any]] = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CPU_OPTIONS: Final[Mapping[str, Any]] = {"device": "cpu", "kv_cache_mib": 64}
FP8_SCHEME: Final[Mapping[str, Any]] = {  # as checkpoints say it
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine of one side, and how long it takes at most, with its start."""

    side: str
    way: str
    needs_s: float

    @property
    def name(self) -> str:
        return f"{self.side}, {self.way}"


BF16, FP8, HTTP = "bf16", "FP8 weights", "bf16, HTTP"
TURNS: Final = (
    Turn(OURS, BF16, 110),
    Turn(PEER, BF16, 225),
    Turn(OURS, HTTP, 75),
    Turn(OURS, FP8, 45),
    Turn(PEER, FP8, 120),
    Turn(PEER, HTTP, 125),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, and of what model."""

    folder: str
    fp8_folder: str  # the same model, with the scheme in its config
    vllm: str  # an interpreter's command, or nothing
    on_cpu: bool
    wakes: Sequence[Case]  # what is asked before all that counts
    decode: Mapping[str, tuple[int, int]]
    prompts: Case
    mixes: Sequence[Case]
    config: ModelConfig

    @property
    def num_ids(self) -> int:
        return self.config.vocab_size - NUM_SPECIAL

    def cases(self, way: str) -> list[Case]:
        """Return those of a way: steps and prompts without HTTP, mixes in 16 bits."""
        steps = [*(decode_case(*case) for case in self.decode.values()), self.prompts]
        return {BF16: [*steps, *self.mixes], FP8: steps, HTTP: list(self.mixes)}[way]


def wake_of(batch: int) -> Case:
    """Return few tokens of so many requests: the sizes of steps that a decode case has."""
    return Case(f"wake {batch}", batch, (64, 64), (8, 8))


def begin(plan: Plan, turn: Turn, limit_s: float) -> AbstractContextManager[Engine]:
    options = CPU_OPTIONS if plan.on_cpu else {"device": "cuda"}
    folder = plan.fp8_folder if turn.way == FP8 else plan.folder
    if turn.side == PEER:
        return (vllm_over_http if turn.way == HTTP else vllm_engine)(plan.vllm, folder, limit_s)
    if turn.way == HTTP:
        flags = {name.replace("_", "-"): value for name, value in options.items()}
        return diptych_over_http(plan.folder, plan.config.model_id, flags, limit_s)
    made = {"quantization": "fp8"} if turn.way == FP8 and not plan.on_cpu else {}
    return diptych_engine(plan.folder, {**options, **made}, limit_s)


def take(plan: Plan, turn: Turn, found: Found, limit_s: float) -> None:
    """Have its turn; what was measured before it failed is kept. Raises `Failed`."""
    with begin(plan, turn, limit_s) as engine:
        found.ready_s[turn.side] = engine.ready_s
        if engine.ready:
            found.sizes[turn.side] = engine.ready
        for case in plan.wakes:
            engine.ask(case, plan.num_ids)
        for case in plan.cases(turn.way):
            found.add(turn.side, case.name, _told(turn, case, engine.ask(case, plan.num_ids)))
        ours = found.sizes.get(OURS)
        if ours and (turn.side, turn.way) == (PEER, BF16):
            sizes = (ours.step_tokens, ours.requests)
            for case in plan.mixes:
                found.add(PEER_AT_OURS, case.name, _told(turn, case, engine.ask(case, plan.num_ids, sizes)))


def _told(turn: Turn, case: Case, figures: Any) -> Any:
    print(f"{turn.name}, {case.name}: {figures}", file=sys.stderr, flush=True)
    return figures


def turns_of(options: Namespace) -> list[Turn]:
    """Return those that are wanted; on a CPU nothing is made FP8."""
    possible = [turn for turn in TURNS if options.device == "cuda" or turn.way != FP8]
    return [turn for turn in possible if turn.name in (options.turns or [turn.name])]


def run(plan: Plan, budget_s: float, turns: Sequence[Turn]) -> tuple[list[Found], list[str]]:
    """Return what was found, by way, and why turns have no rows."""
    found = {way: Found(way, 1 if way == FP8 else 2) for way in dict.fromkeys(turn.way for turn in turns)}
    until_s, problems = time.monotonic() + budget_s, list[str]()
    for turn in turns:
        left_s = until_s - time.monotonic()
        if turn.side == PEER and not plan.vllm:
            problems.append(f"{turn.name}: there is no vLLM here")
        elif left_s < turn.needs_s:
            problems.append(f"{turn.name}: not begun, {left_s:.0f} s are left of the budget")
        else:
            try:
                take(plan, turn, found[turn.way], min(left_s, 2 * turn.needs_s))
            except (Failed, SystemExit, ValueError, OSError) as error:
                problems.append(f"{turn.name}: {error}")
    return list(found.values()), problems


@contextmanager
def plan_of(options: Namespace) -> Iterator[Plan]:
    on_cpu = options.device == "cpu"
    config = {**CONFIG, **(TINY if on_cpu else {}), "dtype": "bfloat16"}
    batches, context, prompts = ((1, 4), 128, (4, 256)) if options.quick else (BATCHES, CONTEXT, PROMPTS)
    with model_folder(config) as folder, model_folder({**config, "quantization_config": FP8_SCHEME}) as fp8_folder:
        yield Plan(
            str(folder),
            str(fp8_folder),
            options.vllm if has_vllm(options.vllm) else "",
            on_cpu,
            [QUICK_WAKE if options.quick else WAKE, *(wake_of(batch) for batch in batches)],
            {decode_case(batch, context).name: (batch, context) for batch in batches},
            prompt_case(*prompts),
            QUICK_MIXES if options.quick else MIXES,
            open_model(str(folder), "dummy").config,
        )


def measure_limits() -> None:
    """Have another process measure this GPU, so that no memory of it stays taken."""
    command = [sys.executable, str(Path(__file__).with_name("roofline.py"))]
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> int:
    parser = arguments(__doc__)
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    parser.add_argument("--vllm", default=python, help="an interpreter that has it, as a command; or $VLLM_PYTHON")
    parser.add_argument("--turns", nargs="+", choices=[turn.name for turn in TURNS], help="all, if none is named")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no turn that may take longer")
    options = parser.parse_args()
    with ExitStack() as stack:
        if FILE_VARIABLE not in os.environ:
            os.environ[FILE_VARIABLE] = stack.enter_context(tempfile.TemporaryDirectory()) + "/roofline.json"
        began_s = time.monotonic()
        if options.device == "cuda" and recorded() is None:
            measure_limits()
        plan = stack.enter_context(plan_of(options))
        found, problems = run(plan, options.budget_s - (time.monotonic() - began_s), turns_of(options))
        scale = Scale(plan.config, recorded(), plan.decode, {plan.prompts.name: plan.prompts.prompt_lens[0]})
        with Report(as_json=options.json) as report:
            for each in found:
                add_to_report(report, each, scale)
        print("\n".join(problems), file=sys.stderr)
    return int(any(problem.startswith(OURS) for problem in problems))


if __name__ == "__main__":
    raise SystemExit(main())
