"""Other weights in place, part by part: the bits of a model that is loaded anew, and never two sets in memory."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from diptych.checkpoints.given_tensors import GivenTensors
from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.models.adapters.lora_host import LoraHost
from diptych.engine.models.matrices.matrix import TorchMatrix
from diptych.engine.runner.in_place import PartsInPlace
from diptych.engine.runner.model_loader import ModelInPlace
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.scheduler.weights import trial_of
from diptych.engine.tensor_parallel.weight_change import Change
from diptych.engine.tensor_parallel.weight_sets import RankWeights, WeightLoader

NewDriver = Callable[..., Any]
FAMILIES = (  # states, sinks and stacked experts, an output that is the embedding, latents, inputs of each layer
    *("qwen3 next", "gpt oss", "llama, tied, one KV head", "deepseek v3.2"),
    "gemma4, borrowed keys, wide networks, inputs of each layer",
)
TEXTS = {0: [3, 1, 4, 1, 5], 1: [9, 2], 2: list(range(5, 60))}


def changed(folder: Path, to: Path) -> ModelSource:
    """Return the model with every tensor changed a little."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        safetensors.torch.save_file({name: t.roll(1, 0).contiguous() * 0.9 for name, t in tensors.items()}, file)
    return open_model(str(to))


def logits(driver: Any) -> torch.Tensor:
    found = torch.cat([driver.extend(TEXTS), driver.decode(dict.fromkeys(TEXTS, 7))])
    for request in TEXTS:
        driver.forget(request)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family_model", FAMILIES, indirect=True)
def test_a_model_whose_parts_were_replaced_has_the_bits_of_one_that_was_loaded(
    family_model: Any, new_driver: NewDriver, on_ranks: Callable[..., Any], tmp_path: Path, num_ranks: int
) -> None:
    before, after = open_model(str(family_model.folder)), changed(family_model.folder, tmp_path / "after")

    def compute(ranks: Any) -> bool:
        driver, fresh = (new_driver(source, communicator=ranks) for source in (before, after))
        first, expected = logits(driver), logits(fresh)
        parts = PartsInPlace(driver.runner.model)
        parts.take(ModelPart.of(after, ranks).tensors)
        assert parts.lacking() == []
        parts.settle()
        tried = driver.runner.logits(trial_of(after.config))
        found = logits(driver)
        assert ranks is not None or tried.isfinite().all()
        return torch.equal(found, expected) and not torch.equal(found, first)

    assert on_ranks(num_ranks, compute) if num_ranks > 1 else compute(None)


def test_beside_the_model_lie_two_layers_at_most(tiny_folder: Path, new_driver: NewDriver, tmp_path: Path) -> None:
    driver, after = new_driver(open_model(str(tiny_folder)), "torch"), changed(tiny_folder, tmp_path / "after")
    gc.collect()
    num_before, most = num_matrices(), 0
    assert num_before == 2 + 2 * 4, "ends and layers"

    def watched() -> Iterator[Any]:
        nonlocal most
        for named in after.tensors():
            most = max(most, num_matrices())
            yield named

    parts = PartsInPlace(driver.runner.model)
    parts.take(watched())
    assert parts.lacking() == []
    parts.settle()
    assert num_before < most < 2 * num_before - 2
    assert num_matrices() == num_before


def num_matrices() -> int:
    return sum(type(each) is TorchMatrix for each in gc.get_objects())


def given(folder: Path, source: ModelSource, *starts: str) -> GivenTensors:
    """Tensors of a checkpoint, whose names begin so, in a file of their own."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    file = folder / f"given-{len(list(folder.iterdir()))}"
    safetensors.torch.save_file({name: t for name, t in tensors.items() if name.startswith(starts)}, file)
    return GivenTensors(source, [file])


def test_tensors_come_in_any_portions_and_what_is_lacking_is_named(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path
) -> None:
    before, after = open_model(str(tiny_folder)), changed(tiny_folder, tmp_path / "after")
    driver, expected = new_driver(before), logits(new_driver(after))
    parts, layer = PartsInPlace(driver.runner.model), "model.layers.1."
    parts.take(given(tmp_path / "after", before, "lm_head", f"{layer}mlp.up", f"{layer}self_attn").tensors())
    lacking = ["model.embed_tokens.weight", f"{layer}mlp.down_proj.weight", f"{layer}mlp.gate_proj.weight"]
    assert parts.lacking() == lacking
    parts.take(given(tmp_path / "after", before, "model.embed", f"{layer}mlp.down", f"{layer}mlp.gate").tensors())
    assert parts.lacking() == []
    parts.settle()
    assert not torch.equal(logits(driver), expected), "norms and the first layer are the old ones"
    rest = PartsInPlace(driver.runner.model)
    rest.take(given(tmp_path / "after", before, "").tensors())
    assert rest.lacking() == []
    rest.settle()
    assert torch.equal(logits(driver), expected)


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.gate_proj"])
def test_of_a_matrix_of_which_a_piece_came_the_rest_is_lacking(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path, name: str
) -> None:
    before, after = open_model(str(tiny_folder)), changed(tiny_folder, tmp_path / "after")
    driver, layer = new_driver(before), "model.layers.1."
    parts = PartsInPlace(driver.runner.model)
    parts.take(given(tmp_path / "after", before, layer + name).tensors())
    matrices = [n for n, _ in after.tensors() if n.startswith(layer) and n.endswith("proj.weight")]
    assert parts.lacking() == sorted(set(matrices) - {f"{layer}{name}.weight"})
    wanted = parts.lacking()
    parts.take((n, array) for n, array in after.tensors() if n in wanted)
    assert parts.lacking() == []


def test_of_a_bias_of_which_a_piece_came_the_rest_is_lacking(tmp_path: Path, new_driver: NewDriver) -> None:
    source = with_biases(tmp_path / "biased")
    parts, bias = PartsInPlace(new_driver(source).runner.model), "model.layers.0.self_attn.k_proj.bias"
    parts.take((name, array) for name, array in source.tensors() if name != bias)
    assert parts.lacking() == [bias]
    parts.take((name, array) for name, array in source.tensors() if name == bias)
    assert parts.lacking() == []


def with_biases(folder: Path) -> ModelSource:
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return open_model(str(folder))


def test_a_worker_that_was_given_a_piece_of_a_matrix_says_what_is_lacking_and_keeps_no_norms_of_it(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path
) -> None:
    after = changed(tiny_folder, tmp_path / "after")
    driver = new_driver(open_model(str(tiny_folder)))
    expected = logits(driver)

    def in_place(runner: Any) -> ModelInPlace:
        return ModelInPlace(runner, None, lambda runner: runner)

    loader: WeightLoader[Any] = WeightLoader(open_model, lambda source: driver.runner, in_place, lambda new, old: None)
    weights = RankWeights(str(tiny_folder), open_model(str(tiny_folder)), loader)
    tensors = safetensors.torch.load_file(tmp_path / "after" / "model.safetensors")
    few = ("model.norm.weight", "model.layers.1.self_attn.v_proj.weight")
    safetensors.torch.save_file({name: tensors[name] for name in few}, tmp_path / "few")
    safetensors.torch.save_file({name: t for name, t in tensors.items() if "norm" not in name}, tmp_path / "matrices")
    assert "model.layers.1.self_attn.q_proj.weight" in weights.replace(Change(files=(str(tmp_path / "few"),)))
    weights.release()
    lacking = weights.replace(Change(files=(str(tmp_path / "matrices"),)))
    assert lacking == sorted(name for name, _ in after.tensors() if "norm" in name)
    assert weights.replace(Change(model=str(tiny_folder))) == []
    assert torch.equal(logits(driver), expected)


def test_vectors_of_a_change_that_never_ended_are_not_kept(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path
) -> None:
    before = open_model(str(tiny_folder))
    changed(tiny_folder, tmp_path / "after")
    driver = new_driver(before)
    PartsInPlace(driver.runner.model).take(given(tmp_path / "after", before, "model.norm").tensors())
    parts = PartsInPlace(driver.runner.model)
    parts.want_all()
    parts.release()
    parts.take((name, array) for name, array in before.tensors() if "norm" not in name)
    assert parts.lacking() == sorted(name for name, _ in before.tensors() if "norm" in name)
    parts.take((name, array) for name, array in before.tensors() if "norm" in name)
    assert parts.lacking() == []
    parts.settle()
    assert torch.equal(logits(driver), logits(new_driver(before)))


def test_tensors_that_have_no_place_are_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    source = open_model(str(tiny_folder))
    safetensors.torch.save_file({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, tmp_path / "codes")
    with pytest.raises(ConfigError, match=r"model.norm.weight is of int32"):
        list(GivenTensors(source, [tmp_path / "codes"]).tensors())
    with pytest.raises(ConfigError, match="can't be read"):
        GivenTensors(source, [tmp_path / "nowhere"])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_whoever_gave_tensors_in_a_file_may_write_it_anew_at_once(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path, backend: str
) -> None:
    """A trainer has one file in shared memory for all its steps: nothing of it may be looked at later."""
    source = changed(tiny_folder, tmp_path / "after")
    tensors = safetensors.torch.load_file(tmp_path / "after" / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    safetensors.torch.save_file(narrow, tmp_path / "given")
    driver = new_driver(source, backend)
    parts = PartsInPlace(driver.runner.model)
    parts.take(GivenTensors(source, [tmp_path / "given"]).tensors())
    assert parts.lacking() == []
    parts.settle()
    expected = logits(driver)
    with (tmp_path / "given").open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(bytes(sum(tensor.nbytes for tensor in narrow.values())))
    assert torch.equal(logits(driver), expected)


def test_adapters_stay_beside_matrices_that_were_replaced(
    tiny_folder: Path, new_driver: NewDriver, write_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    before, after = open_model(str(tiny_folder)), changed(tiny_folder, tmp_path / "after")
    write_adapter(tmp_path / "ada", {"model.layers.1.self_attn.o_proj": (64, 64), "lm_head": (321, 64)})
    drivers = [new_driver(source, max_loras=2) for source in (before, after)]
    for driver in drivers:
        host = LoraHost(before.config, Shard(0, 1), partial(getattr, driver.runner, "loras"))
        host.install(1, host.read(tmp_path / "ada").weights)
        driver.adapters = {1: 1}
    plain = logits(new_driver(after))
    logits(drivers[0])
    parts = PartsInPlace(drivers[0].runner.model)
    parts.take(after.tensors())
    assert parts.lacking() == []
    parts.settle()
    found, expected = map(logits, drivers)
    assert torch.equal(found, expected)
    assert not torch.isclose(found[1], plain[1], atol=1e-3).all(), "the adapter adds something"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_replaced_parts_have_the_bits_of_loaded_ones(
    tiny_folder: Path, new_driver: NewDriver, tmp_path: Path
) -> None:
    before, after = open_model(str(tiny_folder)), changed(tiny_folder, tmp_path / "after")
    driver, fresh = (new_driver(source, "triton", device="cuda") for source in (before, after))
    first, expected = logits(driver), logits(fresh)
    parts = PartsInPlace(driver.runner.model)
    parts.take(after.tensors())
    assert parts.lacking() == []
    parts.settle()
    found = logits(driver)
    assert torch.equal(found, expected)
    assert not torch.equal(found, first)
