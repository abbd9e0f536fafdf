"""Benchmarks of an embedded engine, on a model that takes no time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.cli.measure.bench_batch import BenchBatchConfig
from diptych.cli.measure.bench_batch import main as bench_batch
from diptych.cli.measure.bench_step import BenchStepConfig, Cost, cost_of, line
from diptych.common.errors import ConfigError


@pytest.mark.integration
def test_offline_throughput_counts_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"model": "sim", "device": "sim", "sim_timing": ("none",), "kv_cache_mib": 16}
    assert bench_batch(BenchBatchConfig(**options, calls=6, input_len=20, output_len=5, json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["calls"], found["prompt_tokens"], found["output_tokens"]) == (6, 120, 30)
    assert found["tokens_per_s"] == pytest.approx(150 / found["seconds"])


class Clocked:
    """An engine whose prompts and steps take as long as is said, on a clock that it moves."""

    context_len = 4096

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cached: set[tuple[int, ...]] = set()
        self.tokenizer = self
        self.vocab_size = 5000

    def together(self, engine: Any, prompts: Any, lengths: Any) -> None:
        for prompt in prompts:
            if tuple(prompt) not in self.cached:
                self.now_s += len(prompt) / 1000
                self.cached.add(tuple(prompt))
        self.now_s += 0.5 + 0.02 * max(lengths)


def test_a_step_is_what_a_longer_output_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Clocked()
    monkeypatch.setattr("diptych.cli.measure.bench_step.together", engine.together)
    monkeypatch.setattr("diptych.cli.measure.bench_step.time.perf_counter", lambda: engine.now_s)
    cost = cost_of(engine, batch=4, context=100, steps=10, rounds=2)
    assert cost.step_ms == pytest.approx(20.0)
    assert cost.prompt_tokens_per_s == pytest.approx(400 / (0.4 + 0.52))
    assert cost.output_tokens_per_s == pytest.approx(200.0)


def test_the_first_row_has_a_head() -> None:
    cost = Cost(4, 128, 1000.0, 20.0)
    assert [len(line(cost, has_head=head).splitlines()) for head in (True, False)] == [2, 1]
    assert line(cost, has_head=False).split() == ["4", "128", "1000", "20.00", "200.0"]


@pytest.mark.parametrize(
    "config",
    [BenchBatchConfig(calls=0), BenchBatchConfig(spread=2.0), BenchStepConfig(batch=()), BenchStepConfig(steps=0)],
)
def test_wrong_options_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError):
        config.validate()
