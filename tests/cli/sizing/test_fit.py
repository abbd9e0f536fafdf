from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.plans.step_load import Bounds, rounds
from diptych.cli.reports.fit_report import as_text
from diptych.cli.requests.asking import Answer
from diptych.cli.sizing.fit import FitConfig, FitFailed, Whose, bounds_of, whose_steps
from diptych.common.errors import ConfigError
from diptych.engine.schedule.pace.step_fit import fit
from diptych.engine.values.step_model import H200_LLAMA_8B, Evidence, StepModel, StepShape
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL, Instance, KvLayout, TransferInfo, WorkerLoad
from diptych.v1.worker_pb2 import Computing, WorkerStatus


def answer(role: Any = ROLE_PREFILL, device: str = "H200", **fields: Any) -> Answer:
    transfer = TransferInfo(layout=KvLayout(page_size=16))
    member = Instance(instance_id=role, role=role, address="h:1", model_id="small", transfer=transfer, **fields)
    computing = Computing(device=device, kv_dtype="bfloat16", tp=1)
    return Answer(member, WorkerStatus(computing=computing, max_requests=8))


def test_workers_that_are_alike_are_learned_from_together() -> None:
    assert whose_steps([answer(), answer(ROLE_DECODE)]) == Whose("small", "H200", "bfloat16", 1)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([], "no worker is registered"),
        ([Answer(Instance(role=ROLE_PREFILL), problem="it is gone")], "it is gone"),
        ([answer(device="")], "does not tell what it computes on"),
        ([answer(), answer(ROLE_DECODE, device="CPU")], "small on H200: .*\n.*small on CPU: "),
    ],
)
def test_workers_that_can_not_be_learned_from_are_named(answers: list[Answer], words: str) -> None:
    with pytest.raises(FitFailed, match=words):
        whose_steps(answers)


def test_the_load_keeps_to_what_every_worker_takes() -> None:
    answers = [
        answer(context_len=4096, load=WorkerLoad(total_pages=1000)),
        answer(ROLE_DECODE, context_len=2048, load=WorkerLoad(total_pages=600)),
    ]
    assert bounds_of(answers, FitConfig()) == Bounds(2048, 9600, 2048, 8)


@pytest.mark.parametrize(
    "bounds", [Bounds(4096, 9600, 2048, 16), Bounds(100, 400, 2048, 4), Bounds(8192, 1 << 20, 16, 1)]
)
def test_no_round_is_too_large(bounds: Bounds) -> None:
    for each in rounds(bounds):
        assert each.num_clients <= bounds.max_clients
        assert all(0 < ask.prompt_len + ask.output_len <= bounds.context_len for ask in each.asks)
        longest = sorted(ask.prompt_len + ask.output_len for ask in each.asks)[-each.num_clients :]
        assert sum(longest) <= bounds.pool_tokens


def test_the_load_tells_every_term() -> None:
    """As one worker would run it, each request alone or beside others that are as far."""
    model = StepModel(8e-3, 1e-3, 2e-6, 6e-3, 4e-4, 3e-8, 5e-4)
    steps = []
    for each in rounds(Bounds(8192, 1 << 20, 2048, 16)):
        for first in range(0, len(each.asks), each.num_clients):
            asks = each.asks[first : first + each.num_clients]
            tokens = sum(ask.prompt_len for ask in asks)
            pairs = sum(ask.prompt_len**2 / 2 for ask in asks)
            steps.append(StepShape(0, 0, tokens, pairs, len(asks)))
            for token in range(1, max(ask.output_len for ask in asks)):
                going = [ask for ask in asks if ask.output_len > token]
                steps.append(StepShape(len(going), sum(ask.prompt_len + token for ask in going), 0, 0.0, 0))
    found = fit((shape, model.seconds(shape)) for shape in steps)
    assert found is not None
    assert set(found.evidence.unidentified) <= {"prompt", "prompt_step"}
    assert found.row == pytest.approx(model.row, rel=0.01)
    assert found.context == pytest.approx(model.context, rel=0.01)
    assert found.prompt_pair == pytest.approx(model.prompt_pair, rel=0.05)


def test_the_report_marks_what_is_not_identified() -> None:
    evidence = Evidence(500, 0.02, 0.06, 1.01, ("row", "prompt"), (1.0, 64.0, 262_144.0, 1.0, 4096.0, 8e6, 2.0))
    text = as_text(replace(H200_LLAMA_8B, evidence=evidence, tp=2))
    assert text.startswith("Llama-3-8B on H200, KV in bfloat16, tp 2\n")
    assert "500 steps; error of a step: median 2.0%, p90 6.0%" in text
    assert "not identified by what was seen: row, prompt." in text
    assert [line.split()[1] for line in text.splitlines()[2:5]] == ["4480", "0?", "0.0339"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"watch_s": -1.0}, "--watch-s"),
        ({"max_clients": 0}, "--max-clients"),
        ({"out": "/nowhere/at/all.json"}, "--out is in a folder that is not there"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        FitConfig(**options).validate()
