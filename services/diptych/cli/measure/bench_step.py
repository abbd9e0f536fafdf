"""Measure what a step costs by batch and context, without any server: `diptych bench step --batch 1,8,32`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from diptych.cli.load.asked import as_tokens, random_calls
from diptych.cli.measure.bench_batch import options_of, together
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions

if TYPE_CHECKING:
    from diptych.embedded.engine import Engine


@dataclass(frozen=True, slots=True)
class BenchStepConfig(EngineOptions):
    """Measure steps of one embedded engine: how fast prompts are computed, and how long a step of a batch takes.

    A step is the difference between a long and a short output of the same prompts, whose KV is cached, by its steps.
    """

    batch: tuple[int, ...] = option((1, 4, 16), help="requests that are continued in a step", group="load")
    context: tuple[int, ...] = option((128, 512), help="tokens of each before it", group="load")
    steps: int = option(32, help="steps that are measured", group="load")
    rounds: int = option(3, help="times that each is measured; the best counts", group="load")
    json: bool = option(False, help="print JSON, for programs", group="results")

    def validate(self) -> None:
        EngineOptions.validate(self)
        if not self.batch or not self.context or min(*self.batch, *self.context, self.steps, self.rounds) < 1:
            raise ConfigError("--batch and --context need a size, and all of these must be at least 1")


class Cost(NamedTuple):
    """What was measured of one batch."""

    batch: int
    context: int
    prompt_tokens_per_s: float
    step_ms: float

    @property
    def output_tokens_per_s(self) -> float:
        return 1000 * self.batch / self.step_ms


def main(config: BenchStepConfig) -> int:
    from diptych.embedded.engine import Engine

    costs = []
    with Engine(config.model, options_of(config)) as engine:
        if max(config.context) + config.steps + 1 > engine.context_len:
            raise ConfigError(f"--context and --steps have no room in a context of {engine.context_len} tokens")
        together(engine, [[1]], [2])
        for context in config.context:
            for batch in config.batch:
                costs.append(cost_of(engine, batch, context, config.steps, config.rounds))
                if not config.json:
                    print(line(costs[-1], has_head=len(costs) == 1), flush=True)
    if config.json:
        rows = [{**cost._asdict(), "output_tokens_per_s": cost.output_tokens_per_s} for cost in costs]
        print(json.dumps(rows, indent=2))
    return 0


def cost_of(engine: Engine, batch: int, context: int, steps: int, rounds: int) -> Cost:
    """Return the best of several rounds, each with prompts of its own."""
    prompt_s, step_s = [], []
    for number in range(rounds):
        calls = random_calls(batch, context, 1, 0.0, 0.0, seed=number * 1_000_003 + batch * 1009 + context)
        prompts = [as_tokens(call, engine.tokenizer.vocab_size) for call in calls]
        prompt_s.append(_seconds(engine, prompts, 1))
        short_s, long_s = (_seconds(engine, prompts, 1 + extra) for extra in (0, steps))
        step_s.append(max(1e-9, long_s - short_s) / steps)
    return Cost(batch, context, batch * context / min(prompt_s), 1000 * min(step_s))


def _seconds(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    begun_s = time.perf_counter()
    together(engine, prompts, [num_tokens] * len(prompts))
    return time.perf_counter() - begun_s


def line(cost: Cost, *, has_head: bool) -> str:
    """Return a row of the table, the first one below its head."""
    head = f"{'batch':>6}{'context':>9}{'prompt tok/s':>14}{'step ms':>10}{'output tok/s':>14}\n" if has_head else ""
    return (
        f"{head}{cost.batch:>6}{cost.context:>9}{cost.prompt_tokens_per_s:>14.0f}{cost.step_ms:>10.2f}"
        f"{cost.output_tokens_per_s:>14.1f}"
    )
