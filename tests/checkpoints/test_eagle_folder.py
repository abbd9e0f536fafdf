"""Heads that are not those of a model are refused in words, before a weight is read; and what a head reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import torch
from eagle_heads import Folders
from safetensors.torch import load_file
from torch import Tensor

from diptych.architectures.eagle import TAPS, read_head
from diptych.checkpoints.eagle_folder import EagleFolder
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import pool_layout
from diptych.engine.options.served_model import as_served
from diptych.engine.scheduler.terms import worker_terms
from diptych.engine.values.transfer_rules import TransferRules

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Folders:
    return eagle_heads.random_folders(tmp_path_factory.mktemp("models"), tiny_folder)


@pytest.fixture
def opened(both: Folders, tmp_path: Path) -> Callable[..., EagleFolder]:
    """Opens the head with changes of its configuration and of its tensors."""

    def open_changed(
        config: Mapping[str, Any] = {}, change: Callable[[Tensors], object] = lambda tensors: None
    ) -> EagleFolder:
        values = json.loads((both.head / "config.json").read_text()) | config
        tensors = load_file(both.head / "model.safetensors")
        change(tensors)
        return EagleFolder(eagle_heads.write(tmp_path / "changed", values, tensors), open_model(str(both.model)))

    return open_changed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "changed is LlamaForCausalLM, and heads of LlamaForCausalLMEagle3"),
        ({"architectures": 5}, "the configuration makes no sense"),
        ({"eagle_config": 5}, "the configuration makes no sense"),
        ({"hidden_size": 32}, "changed is no head of model: its hidden_size is 32, the model's 64"),
        ({"vocab_size": 400}, "changed is no head of model: its vocab_size is 400, the model's 321"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 in config.json is not supported"),
        ({"norm_before_residual": True}, "norm_before_residual=True in config.json is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "heads that read three layers are"),
        ({"eagle_config": {TAPS: [0, 1, 3]}}, r"layers \[0, 1, 3\], but three of the first 3"),
        ({"eagle_config": None}, r"it reads what comes out of layers \[0, 1\]"),
        ({"draft_vocab_size": 400}, "draft_vocab_size must be a whole number up to 321, not 400"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"intermediate_size": 128}, r"midlayer.mlp.\w+.weight is \([0-9, ]+\), the configuration says"),
        ({"quantization_config": {"quant_method": "fp8"}}, "changed is quantised"),
    ],
)
def test_a_configuration_that_fits_no_model_is_refused(opened: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "the checkpoint lacks fc.weight"),
        (lambda tensors: tensors.pop("d2t"), "the checkpoint lacks d2t, and says 100 tokens of its own"),
        (lambda tensors: tensors.pop("lm_head.weight"), "the checkpoint lacks lm_head.weight, and says 100 tokens"),
        (lambda tensors: tensors["d2t"].fill_(300), "by d2t it says tokens from 300 to 399, and the model has 321"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), "tensor 'other' has no place in an EAGLE-3 head"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "norm.weight is of int8, which a head does not have",
        ),
    ],
)
def test_tensors_that_make_no_head_are_refused(opened: Any, change: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened({}, change)


def test_a_folder_that_is_none_is_refused(both: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a head: it lacks"):
        EagleFolder(tmp_path, open_model(str(both.model)))


def test_a_head_is_no_model(both: Folders) -> None:
    with pytest.raises(ConfigError, match="head is no model: it guesses for one, which takes it by --speculate eagle"):
        open_model(str(both.head))


def test_names_that_other_servers_read_are_read(opened: Any) -> None:
    """And an embedding of its own, and a head that says all words by the model's output projection."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "model.layers.0.")] = tensors.pop(name)
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]
        tensors["embed_tokens.weight"] = torch.zeros(321, 64)

    head = opened({"draft_vocab_size": None}, change).config.eagle
    assert (head.num_words, head.has_words, head.has_embed, head.has_output) == (321, False, True, False)


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({"eagle_config": {TAPS: [1, 15, 28]}}, (1, 15, 28)),
        ({TAPS: [2, 16, 29], "eagle_config": None}, (1, 15, 28)),
        ({"eagle_config": {}}, (1, 15, 28)),
    ],
    ids=["outputs, as SGLang counts", "inputs, as vLLM counts", "nothing: 2, n / 2 and n - 3"],
)
def test_which_layers_it_reads(both: Folders, said: dict[str, Any], layers: tuple[int, ...]) -> None:
    model = replace(open_model(str(both.model)).config, num_layers=32)
    values = json.loads((both.head / "config.json").read_text()) | said
    config = read_head(values, load_file(both.head / "model.safetensors"), model, "head")
    assert config.eagle is not None
    assert config.eagle.taps == layers
    assert config.context_len == model.context_len > values["max_position_embeddings"]


def test_who_has_another_head_does_not_pair(both: Folders, tmp_path: Path) -> None:
    tensors = {name: each + (name != "d2t") for name, each in load_file(both.head / "model.safetensors").items()}
    tensors["t2d"] = tensors["t2d"] > 1
    other = eagle_heads.write(tmp_path / "other", json.loads((both.head / "config.json").read_text()), tensors)
    found = set()
    for speculate in ("off", f"eagle:{both.head}", f"eagle:{other}"):
        given = EngineOptions(speculate=speculate).on("cpu")
        source = as_served(open_model(str(both.model)), given)
        terms = worker_terms(source, "ucx", pool_layout(source.config, given), TransferRules(), given, "")
        found.add(terms.kv_shape)
    assert len(found) == 3
    assert sum("draft layers: 1 layers, 2 KV heads of 16, of " in shape for shape in found) == 2
