"""Which models may guess for which."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
import tokenizers
from safetensors.numpy import load_file, save_file

from diptych.architectures.pooling import Pooling
from diptych.checkpoints.quantization.weight import without_scales
from diptych.checkpoints.source import ChangedModel, ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import pool_layout
from diptych.engine.options.served_model import as_served
from diptych.engine.scheduler.terms import file_terms, worker_terms
from diptych.engine.values.kv_regions import kv_shape
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kernels.quantized import QuantizedArray

Change = Callable[[ModelSource], ModelSource]


def options(draft: Path, **changes: object) -> EngineOptions:
    return replace(EngineOptions(speculate=f"draft:{draft}").on("cpu"), **changes)  # type: ignore[arg-type]


@pytest.fixture
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


def test_pages_have_its_layers_too(source: ModelSource, tiny_folder: Path) -> None:
    served = as_served(source, options(tiny_folder, max_model_len=100))
    assert served.config.draft is not None
    assert served.config.draft.model.context_len == served.config.context_len == 100
    own, behind = pool_layout(served.config, options(tiny_folder)).regions
    assert (own.layers, behind.layers) == ((0, 1), (2, 3))
    assert replace(behind, layers=own.layers) == own


def test_who_has_other_draft_layers_does_not_pair(source: ModelSource, tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    found = set()
    for given in (EngineOptions().on("cpu"), options(tiny_folder), options(other)):
        served = as_served(source, given)
        terms = worker_terms(served, "ucx", pool_layout(served.config, given), TransferRules(), given, "")
        found.add(terms.kv_shape)
    assert len(found) == 3
    assert "2 layers, 2 KV heads of 16" in found
    assert sum("draft layers: 2 layers, 2 KV heads of 16" in shape for shape in found) == 2


def test_who_has_draft_layers_in_fp8_without_scales_does_not_pair_with_who_has_them_with_scales(
    source: ModelSource, tiny_folder: Path
) -> None:
    """Neither has scales for its own layers."""
    given = options(tiny_folder, kv_cache_dtype="fp8_e4m3")
    served = as_served(source, given)
    draft = served.config.draft
    assert draft is not None
    with_scales = replace(draft, model=replace(draft.model, kv_scales=((0.5, 2.0),) * 2))
    scaled = ChangedModel(source, replace(served.config, draft=with_scales))
    layout = pool_layout(served.config, given)
    shapes = [worker_terms(each, "ucx", layout, TransferRules(), given, "").kv_shape for each in (served, scaled)]
    assert ["FP8 with scales" in shape for shape in shapes] == [False, True]


def test_files_outlive_other_names_of_both_models(source: ModelSource, tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    found = []
    for model, given in ((source, options(tiny_folder)), (open_model(str(other)), options(other))):
        served = as_served(model, given)
        terms = file_terms(served, pool_layout(served.config, given), given, "CPU")
        assert terms["model"]["draft"]["model"]["num_layers"] == 2
        found.append(terms)
    assert found[0] == found[1]


def test_another_tokenizer_is_refused(source: ModelSource, tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    words = tokenizers.models.WordLevel({f"v{i}": i for i in range(321)}, unk_token="v0")
    tokenizers.Tokenizer(words).save(str(other / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"other has another tokenizer than tiny .*: give a model that has the same"):
        as_served(source, options(other))


def test_a_context_that_is_too_short_is_refused(source: ModelSource, tiny_folder: Path) -> None:
    longer = ChangedModel(source, replace(source.config, context_len=4096))
    with pytest.raises(ConfigError, match=r"takes 512 tokens .*: give --max-model-len 512, or another draft model"):
        as_served(longer, options(tiny_folder))


def test_its_layers_lie_behind_those_of_groups_that_take_turns_in_a_page(
    source: ModelSource, tiny_folder: Path
) -> None:
    windowed = ChangedModel(source, replace(source.config, windows=(0, 8)))
    served = as_served(windowed, options(tiny_folder))
    assert len(served.config.page_groups) == 2
    own, behind = pool_layout(served.config, options(tiny_folder)).regions
    assert (own.layers, behind.layers) == ((0,), (2, 3)), "one place of the first or the second layer"


def test_a_model_with_states_may_be_guessed_for_and_does_not_guess(
    source: ModelSource, tiny_folder: Path, tiny_recurrent_folder: Path
) -> None:
    served = as_served(open_model(str(tiny_recurrent_folder)), options(tiny_folder, max_model_len=512))
    assert served.config.draft is not None
    with pytest.raises(ConfigError, match=r"has recurrent layers.*: give a model without them, or --speculate suffix"):
        as_served(source, options(tiny_recurrent_folder))


def test_steps_of_recurrent_layers_have_no_halves(tiny_experts_folder: Path, tiny_recurrent_folder: Path) -> None:
    experts, recurrent = open_model(str(tiny_experts_folder)), open_model(str(tiny_recurrent_folder)).config.recurrent
    source = ChangedModel(experts, replace(experts.config, recurrent=recurrent))
    given = EngineOptions(dp=2, dp_attention=True)
    as_served(source, given)
    with pytest.raises(ConfigError, match="--overlap-batches is not for recurrent layers"):
        as_served(source, replace(given, overlap_batches=8))


def test_rules_of_torch_that_know_no_rows_have_no_guesses_on_gpus(
    source: ModelSource, tiny_recurrent_folder: Path
) -> None:
    given = EngineOptions(speculate="suffix", attention_backend="torch").on("cuda")
    recurrent = open_model(str(tiny_recurrent_folder))
    with pytest.raises(ConfigError, match=r"'torch' has no guesses for recurrent layers on GPUs.*: give --attention-"):
        as_served(recurrent, given)
    for other in (
        replace(given, speculate="off"),
        replace(given, decode_attention_backend="triton"),
        replace(given, attention_backend="auto"),
        replace(given, device="cpu"),
    ):
        as_served(recurrent, other)
    as_served(source, given)


def test_a_vector_of_all_rows_is_refused_where_schedulers_share_experts(tiny_experts_folder: Path) -> None:
    """What they tell each other of a step are the rows of its last tokens."""
    experts = open_model(str(tiny_experts_folder))
    shared = EngineOptions(dp=2, dp_attention=True).on("cpu")
    for pooling in (Pooling("embed", "mean"), Pooling("embed", "last", sees_all=True)):
        pooled = ChangedModel(experts, replace(experts.config, pooling=pooling))
        assert as_served(pooled, EngineOptions().on("cpu")).config.pooling == pooling
        with pytest.raises(ConfigError, match="--dp-attention is not for"):
            as_served(pooled, shared)
    as_served(ChangedModel(experts, replace(experts.config, pooling=Pooling("embed", "last"))), shared)


def test_networks_are_shared_where_there_are_no_experts_to_move_or_copy(source: ModelSource) -> None:
    shared = EngineOptions(dp=2, dp_attention=True).on("cpu")
    assert as_served(source, shared).config == source.config
    for given in (replace(shared, redundant_experts=1), replace(shared, rebalance_experts=1)):
        with pytest.raises(ConfigError, match=r"tiny has no experts: leave out --re.*-experts"):
            as_served(source, given)
    with pytest.raises(ConfigError, match="tiny has no experts: leave out --expert-parallel"):
        as_served(source, replace(shared, expert_parallel=True))
    with pytest.raises(ConfigError, match="5 ranks do not divide the 96 feed-forward columns of tiny"):
        as_served(source, replace(shared, dp=5))


def test_ranks_that_cannot_share_it_are_refused(source: ModelSource, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tp 8 does not divide the 4 attention heads of tiny"):
        as_served(source, options(tiny_folder, tp=8))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculate": "eagle"}, "suffix, ngram, draft:PATH, mtp, eagle:PATH and off are served"),
        ({"speculate": "mtp:x"}, "suffix, ngram, draft:PATH, mtp, eagle:PATH and off are served"),
        ({"speculate": "draft"}, "suffix, ngram, draft:PATH, mtp, eagle:PATH and off are served"),
        ({"speculate": "suffix:x"}, "suffix, ngram, draft:PATH, mtp, eagle:PATH and off are served"),
        ({"speculate": "mtp", "device": "sim"}, "give --speculate suffix or ngram"),
        ({"speculate": "draft:x", "device": "sim"}, "give --speculate suffix or ngram"),
        ({"speculate": "draft:x", "overlap": "on", "device": "cpu"}, "leave it out"),
    ],
)
def test_what_is_not_served_is_refused_in_words(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions(**given).validate()  # type: ignore[arg-type]


def test_what_a_device_cannot_do_is_refused_when_it_is_known() -> None:
    anywhere = EngineOptions(speculate="draft:x", overlap="on")
    anywhere.validate()
    assert anywhere.on("cuda").speculate == "draft:x"
    with pytest.raises(ConfigError, match="--overlap on is not for a draft model on CPUs"):
        anywhere.on("cpu")


def test_pages_have_the_layer_that_predicts_one_token_more(tmp_path: Path) -> None:
    source = open_model(str(sure_next_layer.write(tmp_path / "sure", sure_next_layer.by_rows)))
    served = as_served(source, EngineOptions(speculate="mtp", max_model_len=256))
    assert served.config.draft is not None
    layer = served.config.draft.model
    assert (layer.num_layers, layer.joins_rows, layer.context_len) == (1, True, 256)
    shape = "2 KV heads of 16"
    assert kv_shape(served.config) == f"2 layers, {shape}, draft layers: 1 layers, {shape}"  # peers without it are none
    assert kv_shape(source.config) == f"2 layers, {shape}"


def test_models_without_such_a_layer_are_refused_in_words(source: ModelSource, tmp_path: Path) -> None:
    mtp = EngineOptions(speculate="mtp")
    with pytest.raises(ConfigError, match="the layers of tiny that predict more tokens are not read yet"):
        as_served(source, mtp)
    folder = sure_next_layer.write(tmp_path / "sure", sure_next_layer.by_rows, num_nextn_predict_layers=1)
    plain = {name: array for name, array in load_file(folder / "model.safetensors").items() if ".layers.2." not in name}
    save_file(plain, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="sure's files lack the layer that predicts one token more"):
        as_served(open_model(str(folder)), mtp)
    values = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="sure has no layer that predicts"):
        as_served(open_model(str(folder)), mtp)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 32]}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("changes", [{"tp": 2}, {"dp": 2, "dp_attention": True}, {"tp": 2, "pp": 2}])
def test_ranks_that_would_divide_columns_of_one_scale_are_refused_before_a_weight_is_read(
    changes: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """No file here has weights, but for their names."""
    source = open_model(str(folder_of_blocks(tiny_folder, tmp_path)))
    given = replace(EngineOptions().on("cpu"), **changes)
    wanted = f"leaves a rank 48 of the 96 columns of {DOWN}, which divide a group of 32 codes that share a scale"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        as_served(source, given)
    assert as_served(source, EngineOptions().on("cpu")).config.ffn_size == 96
    assert as_served(source, replace(given, quantization="none")).config.ffn_size == 96


def test_a_matrix_that_the_files_have_in_floats_is_cut_anywhere_whatever_the_configuration_says(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = folder_of_blocks(tiny_folder, tmp_path, in_floats=("layers.0.", "layers.1."))
    assert as_served(open_model(str(folder)), replace(EngineOptions().on("cpu"), tp=2)).config.ffn_size == 96


def folder_of_blocks(tiny_folder: Path, folder: Path, in_floats: tuple[str, ...] = ()) -> Path:
    """A checkpoint whose layers are in FP8 by blocks, as headers and configuration say; others are in floats."""
    values = json.loads((tiny_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": FP8}))
    names = load_file(tiny_folder / "model.safetensors")
    held = [name for name in names if name.endswith("_proj.weight") and not any(each in name for each in in_floats)]
    empty = np.zeros(0, np.float32)
    save_file(dict.fromkeys([*names, *(f"{name}_scale_inv" for name in held)], empty), folder / "model.safetensors")
    return folder


def test_columns_of_what_has_scales_may_be_parted_once_it_is_expanded() -> None:
    groups = QuantizedArray("int8", np.ones((2, 4), np.int8), np.ones((2, 1), np.float32), group=4)
    floats = np.zeros((2, 4), np.uint16)
    expanded = dict(without_scales([("a", groups), ("b", floats)]))
    assert isinstance(expanded["a"], np.ndarray)
    assert expanded["a"].tolist() == [[1.0] * 4] * 2
    assert expanded["b"] is floats
