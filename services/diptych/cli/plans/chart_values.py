"""Decides what a values file of our chart says for a model and a number of workers. Pure.

Rule: a value that the chart can decide by itself is not written. Memory follows from the model where it is known.

`yaml_text` writes plain values as YAML that people like to read: block style, quotes only where they are needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.errors import ConfigError

GIB: Final = 2**30
GPU_SHARE: Final = 0.9  # part of a GPU's memory for weights and KV; steps take the rest, about what workers find
OVERHEAD_GIB: Final = 2  # a worker's process takes it, on CPUs
HOST_GIB: Final = 8  # a GPU, for processes and buffers of the host
UNKNOWN_GIB: Final = 64  # for the page cache, where the size of the weights is not known
DEFAULT: Final = "default"  # name of the pools
MOUNT: Final = "/models"
SIMULATION: Final = "sim"  # the model that is none
SMALL: Final = "smollm2"  # the model in the image for CPUs
Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | float | bool  # a Sequence that is no str

PLAIN: Final = re.compile(r"[A-Za-z_/][\w./-]*")  # and no other word of YAML, such as "no"
WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model takes."""

    weights_bytes: int  # as workers hold them, all GPUs together
    token_bytes: int  # KV of one token


@dataclass(frozen=True, slots=True)
class Answers:
    """What an operator wants."""

    model: str  # as for `--model`, in the pods
    weights: str  # pvc:CLAIM, hostpath:/FOLDER, image:REFERENCE; empty: the model is in the image
    gpus_per_worker: int  # 0: on CPUs
    num_prefill: int
    num_decode: int
    num_unified: int
    rdma: bool
    kv_gib: float  # a worker's KV pool, on CPUs
    gpu_memory_gib: float  # one GPU has so much; 0: not known


def split(num_workers: int) -> tuple[int, int, int]:
    """Return how many prefill, decode and unified workers make best use of so many: halves, as nothing is known of the
    load; one alone does both."""
    return (0, 0, 1) if num_workers == 1 else (num_workers // 2, num_workers - num_workers // 2, 0)


def chart_values(answers: Answers, facts: ModelFacts | None = None) -> dict[str, Any]:
    """Return the values. Raises `ConfigError` for what can't work."""
    check(answers, facts)
    values: dict[str, Any] = {"image": _image(answers), "model": _model(answers), "workers": _workers(answers, facts)}
    for role, count in _counts(answers).items():
        values[role] = {"pools": [{"name": DEFAULT, "replicas": count}] if count else []}
    return {name: value for name, value in values.items() if value}


def check(answers: Answers, facts: ModelFacts | None) -> None:
    """Raise `ConfigError` for answers that contradict each other, or a model that does not fit."""
    if not (answers.num_unified or (answers.num_prefill and answers.num_decode)):
        raise ConfigError("a request needs a prefill and a decode worker, or a unified one")
    if min(_counts(answers).values()) < 0 or answers.gpus_per_worker < 0:
        raise ConfigError("numbers of workers and GPUs must not be negative")
    if answers.gpus_per_worker and answers.model in (SIMULATION, SMALL):
        raise ConfigError(f"the model {answers.model} runs on CPUs: --gpus-per-worker 0")
    if answers.kv_gib <= 0:
        raise ConfigError("memory for KV must be more than 0 GiB")
    if facts is not None and answers.gpus_per_worker and answers.gpu_memory_gib and kv_tokens(answers, facts) <= 0:
        have, need = answers.gpus_per_worker * answers.gpu_memory_gib, facts.weights_bytes / GIB
        raise ConfigError(f"{need:.0f} GiB of weights leave no room for KV in {have:.0f} GiB: more GPUs a worker")


def kv_tokens(answers: Answers, facts: ModelFacts) -> int:
    """Return about how many tokens of KV a worker will hold."""
    nbytes = answers.kv_gib * GIB
    if answers.gpus_per_worker:
        nbytes = answers.gpus_per_worker * answers.gpu_memory_gib * GIB * GPU_SHARE - facts.weights_bytes
    return int(nbytes / facts.token_bytes)


def _counts(answers: Answers) -> Mapping[str, int]:
    return {"prefill": answers.num_prefill, "decode": answers.num_decode, "unified": answers.num_unified}


def _image(answers: Answers) -> dict[str, Any]:
    return {"variant": "sim"} if answers.model == SIMULATION else {}


def _model(answers: Answers) -> dict[str, Any]:
    kind, _, place = answers.weights.partition(":")
    match kind:
        case "":
            return {"name": answers.model}
        case "pvc" if place:
            return {"name": answers.model, "volume": {"pvc": {"claimName": place}}}
        case "hostpath" if place.startswith("/"):
            return {"name": answers.model, "volume": {"hostPath": {"path": place}}}
        case "image" if place:
            return {"name": answers.model, "volume": {"image": {"reference": place}}}
    raise ConfigError(f"weights come from pvc:CLAIM, hostpath:/FOLDER or image:REFERENCE, not {answers.weights!r}")


def _workers(answers: Answers, facts: ModelFacts | None) -> dict[str, Any]:
    workers: dict[str, Any] = _gpu_workers(answers) if answers.gpus_per_worker else _cpu_workers(answers)
    if answers.rdma:
        workers["rdma"] = {"enabled": True, "count": max(1, answers.gpus_per_worker), "require": True}
    memory = _memory_gib(answers, facts)
    if memory is not None:
        request, limit = memory
        workers["resources"] = {"requests": {"memory": f"{request}Gi"}, "limits": {"memory": f"{limit}Gi"}}
    return workers


def _gpu_workers(answers: Answers) -> dict[str, Any]:
    workers: dict[str, Any] = {"gpu": {"count": answers.gpus_per_worker}}
    if answers.gpus_per_worker > 1:
        workers["options"] = {"tp": answers.gpus_per_worker}
    return workers | {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}


def _cpu_workers(answers: Answers) -> dict[str, Any]:
    device = {"device": "sim"} if answers.model == SIMULATION else {}
    return {"options": {**device, "kvCacheMib": round(answers.kv_gib * 1024)}}


def _memory_gib(answers: Answers, facts: ModelFacts | None) -> tuple[int, int] | None:
    """Return request and limit; None where the chart's own will do.

    On GPUs files of weights pass through the host's page cache, which counts for the limit only.
    """
    weights_gib = math.ceil(facts.weights_bytes / GIB) if facts else UNKNOWN_GIB
    if answers.gpus_per_worker:
        request = HOST_GIB * answers.gpus_per_worker
        return request, request + weights_gib
    if facts is None:
        return None
    request = math.ceil(weights_gib + answers.kv_gib + OVERHEAD_GIB)
    return request, request


def yaml_text(value: Mapping[str, Value]) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Value) -> Iterator[str]:
    """Yield the lines of a map or list that is not empty."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _entry(f"{_scalar(name)}:", each)
    elif isinstance(value, Sequence):
        for each in value:
            first, *others = [_scalar(each)] if _is_scalar(each) else _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)


def _entry(name: str, value: Value) -> Iterator[str]:
    if _is_scalar(value):
        yield f"{name} {_scalar(value)}"
        return
    yield name
    yield from (f"  {line}" for line in _lines(value))


def _is_scalar(value: Value) -> bool:
    return isinstance(value, str) or not isinstance(value, Mapping | Sequence) or not value


def _scalar(value: Value) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return "{}" if isinstance(value, Mapping) else "[]"
    return json.dumps(value)
