"""Measure how many tokens a second one process makes offline: `diptych bench batch --model ./model --calls 200`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from diptych.cli.load.asked import as_tokens, random_calls
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.generation.sampling_params import SamplingParams
from diptych.simulator.traces.call import Call

if TYPE_CHECKING:
    from diptych.embedded.engine import Engine, Generation


@dataclass(frozen=True, slots=True)
class BenchBatchConfig(EngineOptions):
    """Measure offline throughput: all prompts are given to an embedded engine at once, without any server.

    Prompts are random tokens that share nothing; outputs are as long as is said. What is measured begins when the
    model is loaded and one prompt has been served.
    """

    calls: int = option(64, help="prompts", group="load")
    input_len: int = option(256, help="tokens of a prompt", group="load")
    output_len: int = option(64, help="tokens of an output", group="load")
    spread: float = option(0.0, help="by which share lengths differ, 0 to 1", group="load")
    seed: int = option(0, help="of lengths and prompts", group="load")
    json: bool = option(False, help="print JSON, for programs", group="results")

    def validate(self) -> None:
        EngineOptions.validate(self)
        if min(self.calls, self.input_len, self.output_len) < 1 or not 0 <= self.spread <= 1:
            raise ConfigError("--calls, --input-len and --output-len must be at least 1, --spread from 0 to 1")


def main(config: BenchBatchConfig) -> int:
    from diptych.embedded.engine import Engine

    calls = random_calls(config.calls, config.input_len, config.output_len, config.spread, 0.0, config.seed)
    with Engine(config.model, options_of(config)) as engine:
        found = measured(engine, calls)
    print(json.dumps(found) if config.json else words(found))
    return 0


def options_of(config: EngineOptions) -> EngineOptions:
    """Return the options of the engine alone, of a command that has more."""
    return EngineOptions(**{field.name: getattr(config, field.name) for field in fields(EngineOptions)})


def measured(engine: Engine, calls: Sequence[Call]) -> dict[str, Any]:
    """Return what came of all calls at once, which were warmed up for by one."""
    vocab = engine.tokenizer.vocab_size
    prompts = [as_tokens(call, vocab) for call in calls]
    engine.generate(prompts[0][:1], exactly(2))
    begun_s = time.perf_counter()
    outputs = together(engine, prompts, [call.output_len for call in calls])
    took_s = time.perf_counter() - begun_s
    num_prompt, num_output = sum(map(len, prompts)), sum(len(each.token_ids) for each in outputs)
    return {
        "model": engine.model_id,
        "calls": len(calls),
        "seconds": took_s,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / took_s,
        "tokens_per_s": (num_prompt + num_output) / took_s,
        "calls_per_s": len(calls) / took_s,
    }


def together(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Generation]:
    """Return outputs of these lengths, computed together."""
    import asyncio

    async def gathered() -> list[Generation]:
        pairs = zip(prompts, lengths, strict=True)
        return await asyncio.gather(*(engine.async_generate(prompt, exactly(length)) for prompt, length in pairs))

    return asyncio.run(gathered())


def exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def words(found: dict[str, Any]) -> str:
    return (
        f"{found['calls']} prompts of {found['prompt_tokens']} tokens to {found['model']}, {found['output_tokens']} of "
        f"outputs, in {found['seconds']:.2f} s\n{found['output_tokens_per_s']:.1f} tokens of outputs a second, "
        f"{found['tokens_per_s']:.1f} of both, {found['calls_per_s']:.2f} prompts a second"
    )
