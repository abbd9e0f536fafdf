"""`diptych values` asks for what it is not told, and what it prints is a values file of the chart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from diptych.cli.plans.chart_values import GIB, Answers, ModelFacts, chart_values, kv_tokens, split, yaml_text
from diptych.cli.setup.values import ValuesConfig, answers_of
from diptych.common.errors import ConfigError

yaml: Any = pytest.importorskip("yaml")

SCHEMA = json.loads((Path(__file__).parents[3] / "helm/diptych/values.schema.json").read_text())
SMALL = Answers("smollm2", "", 0, 1, 1, 0, rdma=False, kv_gib=1.0, gpu_memory_gib=0.0)
LARGE = Answers("/models/70b", "pvc:models", 4, 2, 3, 0, rdma=True, kv_gib=1.0, gpu_memory_gib=80.0)
FACTS_70B = ModelFacts(140 * GIB, 320 * 1024)


@pytest.mark.parametrize(
    ("answers", "facts"),
    [
        (SMALL, None),
        (replace(SMALL, kv_gib=4.5), ModelFacts(6 * GIB, 1024)),
        (replace(SMALL, model="sim"), None),
        (LARGE, FACTS_70B),
        (LARGE, None),
        (replace(LARGE, weights="hostpath:/var/models", num_prefill=0, num_decode=0, num_unified=2), None),
        (replace(LARGE, weights="image:registry/llama:v1", gpus_per_worker=1, rdma=False), None),
    ],
)
def test_what_is_printed_is_yaml_that_the_chart_takes(answers: Answers, facts: ModelFacts | None) -> None:
    values = chart_values(answers, facts)
    assert yaml.safe_load(yaml_text(values)) == values
    jsonschema.validate(values, SCHEMA)


def test_a_large_model_gets_its_gpus_its_volume_rdma_and_memory_for_loading() -> None:
    values = chart_values(LARGE, FACTS_70B)
    assert values["model"] == {"name": "/models/70b", "volume": {"pvc": {"claimName": "models"}}}
    assert values["workers"]["options"] == {"tp": 4}
    assert values["workers"]["rdma"] == {"enabled": True, "count": 4, "require": True}
    assert values["workers"]["resources"] == {"requests": {"memory": "32Gi"}, "limits": {"memory": "172Gi"}}
    assert values["decode"] == {"pools": [{"name": "default", "replicas": 3}]}
    assert kv_tokens(LARGE, FACTS_70B) == int((4 * 80 * 0.9 - 140) * GIB / (320 * 1024))


def test_a_simulation_has_its_device_and_its_image() -> None:
    values = chart_values(replace(SMALL, model="sim"))
    assert (values["image"], values["workers"]["options"]["device"]) == ({"variant": "sim"}, "sim")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (replace(LARGE, gpus_per_worker=1), "140 GiB of weights leave no room for KV in 80 GiB"),
        (replace(SMALL, num_decode=0), "needs a prefill and a decode worker"),
        (replace(SMALL, weights="s3:bucket"), "pvc:CLAIM"),
        (replace(SMALL, kv_gib=0.0), "more than 0 GiB"),
        (replace(SMALL, model="sim", gpus_per_worker=1), "sim runs on CPUs"),
        (replace(SMALL, gpus_per_worker=1), "smollm2 runs on CPUs"),
    ],
)
def test_what_can_not_work_is_refused(answers: Answers, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chart_values(answers, FACTS_70B)


def test_gpus_are_shared_by_halves_and_one_worker_does_both() -> None:
    assert [split(number) for number in (1, 2, 5)] == [(0, 0, 1), (1, 1, 0), (2, 3, 0)]


def test_only_what_is_not_given_is_asked_for() -> None:
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split()[0])
        return {"Its": "pvc:models", "KV": "yes"}.get(question.split()[0], default)

    answers = answers_of(ValuesConfig(model="llama", gpus=16, gpus_per_worker=4), ask)
    assert asked == ["Its", "KV"]
    assert answers == Answers("/models/llama", "pvc:models", 4, 2, 2, 0, rdma=True, kv_gib=1.0, gpu_memory_gib=0.0)


def test_words_that_yaml_would_take_for_something_else_are_quoted() -> None:
    tricky: Any = {"a": "no", "b": "1e3", "c": "x: y", "d": [], "e": [{"f": [1, {"g": ""}]}, "h"], "i": {}, "on": True}
    assert yaml.safe_load(yaml_text(tricky)) == tricky
