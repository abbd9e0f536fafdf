"""Weights change places only when nothing stands in the way. The models here are names; their runner is a hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError, InvalidRequest, Unavailable
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.engine.scheduler.weights import _GREEDY, _TRIAL, Host, Weights, misfit
from diptych.engine.tensor_parallel.weight_sets import RankWeights, WeightLoader
from diptych.engine.values.batch import NO_TOKEN, DraftModel, ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1.admin_pb2 import (
    AdminAnswer,
    AdminCommand,
    CloseWeights,
    DropWeights,
    OpenWeights,
    PrepareWeights,
    ReleaseWeights,
    SwitchWeights,
    SwitchWeightsResult,
    WeightsChange,
)


@dataclass
class Source:
    config: ModelConfig
    words: Tokenizer
    weights_id: str = "id"
    weight_files: Sequence[Path] = ()
    lacks: str = ""  # a tensor

    def tokenizer(self) -> Tokenizer:
        return self.words

    def tensors(self) -> Iterator[Any]:
        """Yield tensors that take no memory, whatever their shape."""
        for name, pieces in FAMILIES[self.config.architecture].placement(self.config):
            if name != self.lacks:
                shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
                yield name, np.broadcast_to(np.float32(0), shape)

    def blanks(self) -> Iterator[Any]:
        return self.tensors()

    def units(self) -> Units:
        return apart

    def next_layer(self) -> NoReturn:
        raise AssertionError("nobody guesses")


class NamedRunner:
    """Samples the token that its model's name stands for; "nan" computes nothing."""

    draft_model: DraftModel | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return StepResult(np.array([NO_TOKEN if self.name == "nan" else 1]))

    def logits(self, batch: ForwardBatch) -> Any:
        return None

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        return lambda: self.execute(batch, sampling)


class InPlace:
    """A model of which only the name is replaced. "broken" breaks on its way; of "half" something is lacking."""

    def __init__(self, runner: NamedRunner) -> None:
        if runner.name == "vectors":
            raise ConfigError("it makes vectors: restart it")
        self._runner = runner

    def release(self) -> None:
        self._runner.name = "nan"

    def take(self, source: ModelSource) -> None:
        self._runner.name = source.config.model_id
        if self._runner.name == "broken":
            raise ConfigError("the file ends")

    def want_all(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def lacking(self) -> list[str]:
        return ["model.norm.weight"] if self._runner.name == "half" else []

    def runner(self) -> NamedRunner:
        return NamedRunner(self._runner.name)


@dataclass
class World:
    """What a scheduler would say, and what was done to it."""

    sources: dict[str, ModelSource]
    is_idle: bool = True
    obstacle: str | None = None
    num_clears: int = 0
    placed_in: list[str] = field(default_factory=list)  # adapters
    sets: RankWeights[NamedRunner] = field(init=False)
    weights: Weights[NamedRunner] = field(init=False)

    def __post_init__(self) -> None:
        loader = WeightLoader(self.open, lambda source: NamedRunner(source.config.model_id), InPlace, misfit)
        self.sets = RankWeights("old", self.sources["old"], loader)
        host = Host(
            lead=lambda runner: runner,
            terms=lambda source: Terms(weights=source.config.model_id),
            is_idle=lambda: self.is_idle,
            clear_cache=self.clear,
            place_adapters=self.place,
            obstacle=lambda: self.obstacle,
        )
        self.weights = Weights(self.sets, host)

    def open(self, model: str) -> ModelSource:
        if model not in self.sources:
            raise ConfigError(f"no model {model!r}")
        return self.sources[model]

    def clear(self, source: ModelSource) -> None:
        assert source is self.sources[source.config.model_id]
        self.num_clears += 1

    def place(self) -> None:
        self.placed_in.append(self.sets.served.runner.name)

    def prepare(self, model: str) -> AdminAnswer:
        return self.do(AdminCommand(prepare_weights=PrepareWeights(model=model)))

    def switch(self) -> AdminAnswer:
        return self.do(AdminCommand(switch_weights=SwitchWeights()))

    def drop(self) -> AdminAnswer:
        return self.do(AdminCommand(drop_weights=DropWeights()))

    def do(self, command: AdminCommand) -> AdminAnswer:
        return self.weights.handlers[str(command.WhichOneof("command"))](command)()


@pytest.fixture
def world(small_model: ModelSource, byte_tokenizer: Tokenizer) -> World:
    config = replace(small_model.config, model_id="old")
    sources: dict[str, ModelSource] = {
        name: Source(replace(config, model_id=name), byte_tokenizer) for name in ("old", "new", "nan", "broken", "half")
    }
    sources["short"] = Source(replace(config, model_id="short"), byte_tokenizer, lacks="model.norm.weight")
    sources["wide"] = Source(replace(config, model_id="wide", hidden_size=9, ffn_size=9), byte_tokenizer)
    sources["words"] = Source(replace(config, model_id="words"), small_model.tokenizer())
    return World(sources)


def test_prepared_weights_are_served_after_the_switch_with_an_empty_cache(world: World) -> None:
    assert world.prepare("new") == AdminAnswer()
    assert (world.weights.runner.name, world.num_clears) == ("old", 0)
    assert world.switch().switch_weights == SwitchWeightsResult(
        model_id="new",
        terms=terms_to_wire(Terms(weights="new")),
        previous_model_id="old",
        previous_model="old",
        version="new",
    )
    assert world.placed_in == ["new"], "adapters come along"
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


CLOSE, OPEN = AdminCommand(close_weights=CloseWeights()), AdminCommand(open_weights=OpenWeights())


def change(command: str, model: str, **fields: Any) -> AdminCommand:
    wanted: dict[str, Any] = {command: WeightsChange(model=model, **fields)}
    return AdminCommand(**wanted)


def test_weights_are_replaced_in_place_while_they_are_closed(world: World) -> None:
    with pytest.raises(ConfigError, match="close them first"):
        world.do(change("replace_weights", "new"))
    assert world.do(change("check_weights", "new")) == AdminAnswer()
    world.is_idle = False
    with pytest.raises(Unavailable, match="still hold KV"):
        world.do(CLOSE)
    world.is_idle = True
    world.do(CLOSE)
    with pytest.raises(AssertionError, match="nothing runs"):
        world.weights.logits(_TRIAL)
    found = world.do(change("replace_weights", "new", version="step 7")).switch_weights
    assert (found.model_id, found.version, found.previous_model, found.terms.weights) == ("new", "step 7", "old", "new")
    assert (world.weights.runner.name, world.num_clears, world.placed_in) == ("new", 1, [])
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("model", "words"),
    [("missing", "no model"), ("wide", "differs in"), ("words", "tokenizer"), ("short", "lacks model.norm.weight")],
)
def test_what_does_not_fit_is_refused_before_anything_is_closed(world: World, model: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        world.do(change("check_weights", model))
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]


@pytest.mark.parametrize(("model", "words"), [("broken", "the file ends"), ("nan", "not a number")])
def test_what_fails_on_its_way_leaves_weights_closed_until_others_have_come(
    world: World, model: str, words: str
) -> None:
    world.do(CLOSE)
    with pytest.raises((ConfigError, InvalidRequest), match=words):
        world.do(change("replace_weights", model))
    with pytest.raises(AssertionError, match="nothing runs"):
        world.weights.logits(_TRIAL)
    assert world.num_clears == 0
    assert world.do(change("replace_weights", "old")).switch_weights.model_id == "old"
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]


def test_half_of_the_weights_is_told_what_is_lacking_and_serves_nothing(world: World) -> None:
    world.do(CLOSE)
    found = world.do(change("replace_weights", "half")).switch_weights
    assert found == SwitchWeightsResult(lacking=["model.norm.weight"])
    with pytest.raises(AssertionError, match="nothing runs"):
        world.weights.logits(_TRIAL)


def test_weights_of_which_nothing_was_replaced_open_again(world: World) -> None:
    world.do(CLOSE)
    world.do(OPEN)
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]


def test_released_weights_stay_closed_with_an_empty_cache_until_others_come(world: World) -> None:
    release = AdminCommand(release_weights=ReleaseWeights())
    with pytest.raises(ConfigError, match="close them first"):
        world.do(release)
    assert world.do(CLOSE).switch_weights.previous_model == "old"
    world.do(release)
    assert world.num_clears == 1
    with pytest.raises(AssertionError, match="nothing runs"):
        world.weights.logits(_TRIAL)
    assert world.do(change("replace_weights", "old")).switch_weights.model_id == "old"
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]


def test_a_model_that_can_not_change_in_place_is_refused_before_it_is_closed(world: World) -> None:
    old = world.sources["old"]
    world.sources["vectors"] = Source(replace(old.config, model_id="vectors"), old.tokenizer())
    world.prepare("vectors")
    world.switch()
    for command in (change("check_weights", "new"), CLOSE):
        with pytest.raises(ConfigError, match="makes vectors: restart it"):
            world.do(command)
    assert world.weights.execute(_TRIAL, _GREEDY).token_ids.tolist() == [1]
    world.prepare("new")
    world.switch()
    assert world.weights.runner.name == "new", "beside it may be changed"
