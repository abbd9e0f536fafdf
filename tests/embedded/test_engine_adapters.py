"""Adapters in an embedded engine: tokens are those of merged weights in transformers, whatever shares the batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diptych.common.errors import ConfigError, InvalidRequest, NotFound
from diptych.engine import Engine, EngineOptions, SamplingParams

DEEP = pytest.mark.skipif(
    not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="its steps are those of all other engines here"
)
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 + 7 * first)] for first in range(6)]  # some are chunked
ADAPTERS = ["ada", "", "bob", "ada", "bob", ""]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Outputs = Mapping[str, list[tuple[int, ...]]]


class Folders:
    """Adapters of the tiny model, and what transformers generates with each."""

    def __init__(self, root: Path, base: Path, write_adapter: Callable[..., Mapping[str, Any]]) -> None:
        self.root = root
        self.outputs: dict[str, list[tuple[int, ...]]] = {}
        for name, options in (("", {}), ("ada", {"seed": 1}), ("bob", {"seed": 2, "rank": 8, "use_rslora": False})):
            model: Any = transformers.LlamaForCausalLM.from_pretrained(base)
            if name:
                shapes = {n: tuple(m.weight.shape) for n, m in model.named_modules() if n.endswith(LINEAR)}
                for module, delta in write_adapter(root / name, shapes, **options).items():
                    model.get_submodule(module).weight.data += delta
            self.outputs[name] = [greedy(model, prompt) for prompt in PROMPTS]


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(PARAMS.max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, write_adapter: Callable[..., Mapping[str, Any]]
) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"), tiny_folder, write_adapter)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(kv_cache_mib=8, max_step_tokens=32, **changes)


@pytest.fixture(scope="module", params=["tp", "pp"])
def engine(tiny_folder: Path, folders: Folders, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Two ranks, each of which has its part of every adapter: of all layers, or what changes its own."""
    ranks = {request.param: 2}
    with Engine(str(tiny_folder), options(lora=(f"ada={folders.root / 'ada'}",), max_loras=2, **ranks)) as running:
        running.load_adapter("bob", folders.root / "bob")
        yield running


def test_a_batch_of_two_adapters_and_the_model_has_the_tokens_of_merged_weights(
    engine: Engine, folders: Folders
) -> None:
    made = engine.generate_batch(PROMPTS, PARAMS, adapters=ADAPTERS)
    expected = [folders.outputs[adapter][i] for i, adapter in enumerate(ADAPTERS)]
    assert [each.token_ids for each in made] == expected
    again = engine.generate_batch(PROMPTS, PARAMS, adapters=ADAPTERS)
    assert [each.token_ids for each in again] == expected
    assert all(each.cached_tokens > 0 for each in again)


def test_each_adapter_has_a_cache_of_its_own(engine: Engine, folders: Folders) -> None:
    prompt = list(range(200, 264))
    cached = [engine.generate(prompt, PARAMS, adapter=adapter).cached_tokens for adapter in ("", "ada", "", "ada")]
    assert cached == [0, 0, 64, 64]


def test_a_reloaded_name_never_sees_the_kv_of_its_old_weights(engine: Engine, folders: Folders) -> None:
    engine.generate(PROMPTS[5], PARAMS, adapter="bob")
    engine.unload_adapter("bob")
    with pytest.raises(NotFound):
        engine.generate(PROMPTS[5], PARAMS, adapter="bob")
    engine.load_adapter("bob", folders.root / "ada")
    assert engine.generate(PROMPTS[5], PARAMS, adapter="bob").token_ids == folders.outputs["ada"][5]
    engine.unload_adapter("bob")
    engine.load_adapter("bob", folders.root / "bob")
    assert engine.generate(PROMPTS[5], PARAMS, adapter="bob").token_ids == folders.outputs["bob"][5]


def test_an_adapter_that_is_unloaded_while_it_streams_stays_to_the_end(engine: Engine, folders: Folders) -> None:
    stream = engine.stream(PROMPTS[0], PARAMS, adapter="bob")
    tokens = [*next(stream).token_ids]
    engine.unload_adapter("bob")
    for delta in stream:
        tokens.extend(delta.token_ids)
    engine.load_adapter("bob", folders.root / "bob")
    assert tuple(tokens) == folders.outputs["bob"][0]


def test_what_cannot_be_loaded_is_refused_in_words_and_changes_nothing(engine: Engine, folders: Folders) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        engine.load_adapter("carl", folders.root / "nowhere")
    with pytest.raises(InvalidRequest, match="unload it first"):
        engine.load_adapter("ada", folders.root / "bob")
    with pytest.raises(NotFound, match="'carl'"):
        engine.unload_adapter("carl")
    assert engine.generate(PROMPTS[0], PARAMS, adapter="ada").token_ids == folders.outputs["ada"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": ("ada",)}, "name=folder"),
        ({"lora": ("ada=/nowhere",), "tp": 2}, "/nowhere"),  # as each of the ranks says
        ({"lora": ("a=/x", "b=/x"), "max_loras": 1}, "--max-loras 1"),
        ({"max_loras": -1}, "--max-loras"),
    ],
)
def test_options_that_cannot_work_end_in_words(tiny_folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words), Engine(str(tiny_folder), options(**changes)):
        pass


def test_several_schedulers_have_the_adapters_they_start_with(tiny_folder: Path, folders: Folders) -> None:
    with Engine(str(tiny_folder), options(lora=(f"ada={folders.root / 'ada'}",), dp=2)) as engine:
        made = engine.generate_batch(PROMPTS, PARAMS, adapters=["ada"] * len(PROMPTS))
        assert [each.token_ids for each in made] == folders.outputs["ada"]
        with pytest.raises(ConfigError, match="dp above 1"):
            engine.load_adapter("bob", folders.root / "bob")


def test_overlapped_steps_give_the_same_tokens(tiny_folder: Path, folders: Folders) -> None:
    """While an adapter is unloaded and its place taken, a step that was launched before may still run."""
    loaded = tuple(f"{name}={folders.root / name}" for name in ("ada", "bob"))
    with Engine(str(tiny_folder), options(lora=loaded, max_loras=2, overlap="on")) as engine:
        for _ in range(3):
            made = engine.generate_batch(PROMPTS, PARAMS, adapters=ADAPTERS)
            assert [each.token_ids for each in made] == [folders.outputs[a][i] for i, a in enumerate(ADAPTERS)]
            engine.unload_adapter("ada")
            engine.load_adapter("ada", folders.root / "ada")


@pytest.mark.parametrize("how", [pytest.param({"overlap": "off"}, marks=DEEP), {"overlap": "on"}, {"pp": 2}])
def test_more_adapters_than_places_are_all_answered_one_after_the_other(
    tiny_folder: Path, folders: Folders, how: dict[str, Any]
) -> None:
    """Two adapters and a copy of one, in one place: requests of each wait until nobody has the other."""
    loaded = [f"{name}={folders.root / name}" for name in ("ada", "bob")]
    names = ["ada", "bob", "", "again", "bob", "ada"]
    again = f"again={folders.root / 'ada'}"
    made = options(lora=(*loaded, again), max_loras=1, max_loaded_loras=3, **how)
    with Engine(str(tiny_folder), made) as engine:
        for _ in range(2):
            answers = engine.generate_batch(PROMPTS, PARAMS, adapters=names)
            expected = [folders.outputs["ada" if a == "again" else a][i] for i, a in enumerate(names)]
            assert [each.token_ids for each in answers] == expected
        engine.unload_adapter("bob")
        assert list(engine.generate(PROMPTS[0], PARAMS, adapter="again").token_ids) == list(folders.outputs["ada"][0])
