"""Makes a values file for the chart from a few answers, and asks for those that are not given: `diptych values`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from diptych.cli.plans.chart_values import (
    GIB,
    MOUNT,
    SIMULATION,
    SMALL,
    Answers,
    ModelFacts,
    chart_values,
    kv_tokens,
    split,
    yaml_text,
)
from diptych.common.config import option
from diptych.common.errors import ConfigError

BUILT_IN: Final = (SMALL, SIMULATION)
WEIGHT_FILES: Final = ("*.safetensors", "*.gguf")

Prompter = Callable[[str, str], str]  # a question and its default to an answer


@dataclass(frozen=True, slots=True)
class ValuesConfig:
    """Print a values file for the chart: diptych values > values.yaml, then helm install -f values.yaml.

    What is not given is asked for, or with --yes, or where nobody can answer, taken as it usually is.
    """

    model: str | None = option(None, help=f"as for --model of workers; in a volume, its path below {MOUNT}")
    weights: str | None = option(None, help="pvc:CLAIM, hostpath:/FOLDER, image:REFERENCE; empty: in the image")
    config: Path | None = option(None, help="folder or GGUF file of the model on this machine, to size memory by")
    gpus_per_worker: int | None = option(None, help="GPUs of a worker; 0: CPUs")
    gpus: int | None = option(None, help="GPUs in all, shared by halves among prefill and decode workers")
    prefill: int | None = option(None, help="prefill workers")
    decode: int | None = option(None, help="decode workers")
    unified: int = option(0, help="workers that do both")
    rdma: bool | None = option(None, help="move KV over RDMA, and nothing slower")
    kv_gib: float = option(1.0, help="memory for KV of a worker on CPUs, GiB")
    gpu_memory_gib: float = option(0.0, help="memory of a GPU, GiB, to check that the model fits; 0: don't")
    yes: bool = option(False, help="ask nothing")

    def validate(self) -> None:
        if self.gpus is not None and (self.prefill is not None or self.decode is not None or self.unified):
            raise ConfigError("give --gpus, or numbers of workers")
        if self.gpus is not None and self.gpus_per_worker == 0:
            raise ConfigError("--gpus needs --gpus-per-worker of 1 or more")


def main(config: ValuesConfig) -> int:
    answers = answers_of(config, _ask if sys.stdin.isatty() and not config.yes else lambda _, default: default)
    facts = model_facts(config.config, on_gpu=answers.gpus_per_worker > 0) if config.config else None
    print("\n".join(f"# {line}" for line in _remarks(answers, facts)))
    print(yaml_text(chart_values(answers, facts)), end="")
    return 0


def answers_of(config: ValuesConfig, prompt: Prompter) -> Answers:
    """Return what is given, and what is answered. Raises `ConfigError` for an answer that is none."""
    model = (
        config.model if config.model is not None else prompt(f"Model: smollm2, or its path below {MOUNT}", "smollm2")
    )
    weights = config.weights
    if weights is None:
        weights = "" if model in BUILT_IN else prompt("Its weights: pvc:CLAIM, hostpath:/FOLDER or image:REFERENCE", "")
    if weights and not model.startswith("/"):
        model = f"{MOUNT}/{model}"
    per_worker = config.gpus_per_worker
    if per_worker is None:
        per_worker = _number(prompt("GPUs of a worker (0: CPUs)", "1" if config.gpus else "0"))
    prefill, decode, unified = _workers(config, per_worker, prompt)
    rdma = config.rdma if config.rdma is not None else _is_yes(prompt("KV over RDMA", "no"))
    return Answers(model, weights, per_worker, prefill, decode, unified, rdma, config.kv_gib, config.gpu_memory_gib)


def model_facts(path: Path, *, on_gpu: bool) -> ModelFacts:
    """Return what a model takes: read from its headers and the sizes of its files. Raises `ConfigError`."""
    from diptych.checkpoints.source import open_model  # heavy; not for --help
    from diptych.engine.options.config import KV_WINDOWS, EngineOptions
    from diptych.engine.options.pool_size import token_nbytes, whole_layout

    model = replace(open_model(str(path)).config, keeps_all=KV_WINDOWS == "keep")
    files = [path] if path.is_file() else [each for kind in WEIGHT_FILES for each in path.glob(kind)]
    dtype = "bfloat16" if on_gpu else "float32"
    is_widened = not on_gpu and path.is_dir()  # two bytes a weight in the file, four in memory
    token_bytes = token_nbytes(model, whole_layout(model, EngineOptions().page_size, dtype))
    return ModelFacts(sum(each.stat().st_size for each in files) * (2 if is_widened else 1), token_bytes)


def _workers(config: ValuesConfig, per_worker: int, prompt: Prompter) -> tuple[int, int, int]:
    if config.gpus is not None:
        if config.gpus < per_worker:
            raise ConfigError(f"{config.gpus} GPUs are not enough for a worker of {per_worker}")
        return split(config.gpus // max(1, per_worker))
    usual = "0" if config.unified else "1"
    prefill = config.prefill if config.prefill is not None else _number(prompt("Prefill workers", usual))
    decode = config.decode if config.decode is not None else _number(prompt("Decode workers", usual))
    return prefill, decode, config.unified


def _remarks(answers: Answers, facts: ModelFacts | None) -> list[str]:
    remarks = ["Made by `diptych values`: helm install NAME helm/diptych -f THIS_FILE"]
    if facts is not None:
        remarks.append(f"Weights {facts.weights_bytes / GIB:.1f} GiB, KV {facts.token_bytes / 1024:.0f} KiB a token")
        if not answers.gpus_per_worker or answers.gpu_memory_gib:
            remarks.append(f"A worker holds about {kv_tokens(answers, facts):,} tokens of KV")
    return remarks


def _ask(question: str, default: str) -> str:
    print(f"{question} [{default}]: ", end="", file=sys.stderr, flush=True)  # stdout is for the file
    return sys.stdin.readline().strip() or default


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is no number")
    return int(text)


def _is_yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise ConfigError(f"{text!r} is neither yes nor no")
    return text.lower() in ("y", "yes")
