"""Weights change places only when nothing stands in the way. The models here are names; their runner is a hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError, InvalidRequest, Unavailable
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.engine.scheduler.weights import Host, Weights
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1.admin_pb2 import (
    AdminAnswer,
    AdminCommand,
    DropWeights,
    PrepareWeights,
    SwitchWeights,
    SwitchWeightsResult,
)


@dataclass
class Source:
    config: ModelConfig
    words: Tokenizer
    weights_id: str = "id"
    weight_files: Sequence[Path] = ()

    def tokenizer(self) -> Tokenizer:
        return self.words

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def blanks(self) -> Iterator[Any]:
        return self.tensors()

    def next_layer(self) -> NoReturn:
        raise AssertionError("nobody guesses")


class NamedRunner:
    """Samples the token that its model's name stands for; "nan" computes nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return StepResult(np.array([NO_TOKEN if self.name == "nan" else 1]))

    def logits(self, batch: ForwardBatch) -> Any:
        return None

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return lambda: self.execute(batch, sampling)


@dataclass
class World:
    """What a scheduler would say, and what was done to it."""

    sources: dict[str, ModelSource]
    is_idle: bool = True
    obstacle: str | None = None
    num_clears: int = 0
    weights: Weights[NamedRunner] = field(init=False)

    def __post_init__(self) -> None:
        host = Host(
            open=self.open,
            load=lambda source: NamedRunner(source.config.model_id),
            terms=lambda source: Terms(weights=source.config.model_id),
            is_idle=lambda: self.is_idle,
            clear_cache=self.clear,
            obstacle=lambda: self.obstacle,
        )
        self.weights = Weights("old", self.sources["old"], host)

    def open(self, model: str) -> ModelSource:
        if model not in self.sources:
            raise ConfigError(f"no model {model!r}")
        return self.sources[model]

    def clear(self, source: ModelSource) -> None:
        assert source is self.sources[source.config.model_id]
        self.num_clears += 1

    def prepare(self, model: str) -> AdminAnswer:
        return self._do(AdminCommand(prepare_weights=PrepareWeights(model=model)))

    def switch(self) -> AdminAnswer:
        return self._do(AdminCommand(switch_weights=SwitchWeights()))

    def drop(self) -> AdminAnswer:
        return self._do(AdminCommand(drop_weights=DropWeights()))

    def _do(self, command: AdminCommand) -> AdminAnswer:
        return self.weights.handlers[str(command.WhichOneof("command"))](command)()


@pytest.fixture
def world(small_model: ModelSource, byte_tokenizer: Tokenizer) -> World:
    config = replace(small_model.config, model_id="old")
    sources: dict[str, ModelSource] = {
        name: Source(replace(config, model_id=name), byte_tokenizer) for name in ("old", "new", "nan")
    }
    sources["wide"] = Source(replace(config, model_id="wide", hidden_size=9, ffn_size=9), byte_tokenizer)
    sources["words"] = Source(replace(config, model_id="words"), small_model.tokenizer())
    return World(sources)


def test_prepared_weights_are_served_after_the_switch_with_an_empty_cache(world: World) -> None:
    assert world.prepare("new") == AdminAnswer()
    assert (world.weights.runner.name, world.num_clears) == ("old", 0)
    assert world.switch().switch_weights == SwitchWeightsResult(
        model_id="new", terms=terms_to_wire(Terms(weights="new")), previous_model_id="old", previous_model="old"
    )
    assert (world.weights.runner.name, world.num_clears) == ("new", 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("missing", "no model 'missing'"),
        ("wide", "differs in hidden_size, ffn_size"),
        ("words", "another tokenizer"),
    ],
)
def test_what_does_not_fit_is_not_loaded(world: World, model: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        world.prepare(model)
    with pytest.raises(ConfigError, match="no weights are loaded"):
        world.switch()


def test_while_a_request_holds_kv_the_switch_waits(world: World) -> None:
    world.prepare("new")
    world.is_idle = False
    with pytest.raises(Unavailable):
        world.switch()
    world.is_idle = True
    world.switch()
    assert world.weights.runner.name == "new"


def test_weights_that_compute_nothing_are_not_served(world: World) -> None:
    world.prepare("nan")
    with pytest.raises(InvalidRequest, match="not a number"):
        world.switch()
    assert (world.weights.runner.name, world.num_clears) == ("old", 0)


def test_dropped_weights_cannot_be_switched_to(world: World) -> None:
    world.prepare("new")
    world.drop()
    with pytest.raises(ConfigError, match="no weights are loaded"):
        world.switch()


def test_an_obstacle_is_named_before_anything_is_loaded_and_before_the_switch(world: World) -> None:
    world.prepare("new")
    world.obstacle = "adapters are loaded"
    with pytest.raises(ConfigError, match="adapters are loaded"):
        world.prepare("new")
    with pytest.raises(ConfigError, match="adapters are loaded"):
        world.switch()
    assert world.weights.runner.name == "old"
