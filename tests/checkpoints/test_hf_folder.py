"""Hugging Face folders that transformers saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.scheduler.terms import file_terms, worker_terms
from diptych.engine.tiers.page_format import terms_digest
from diptych.engine.values.kv_regions import kv_layout
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.layout import PoolLayout

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save(
    folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", tied: bool = False, seed: int = 0
) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=tied, eos_token_id=[2, 3])
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_is_the_one_that_was_saved(tmp_path: Path, dtype: torch.dtype, tied: bool, shard: str) -> None:
    model = save(tmp_path, dtype=dtype, shard=shard, tied=tied)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    read = {name: as_torch(array) for name, array in open_model(str(tmp_path)).tensors()}
    expected = dict(model.named_parameters())
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_the_configuration_is_the_one_that_was_saved(tmp_path: Path) -> None:
    save(tmp_path / "tiny", tied=True)
    config = open_model(str(tmp_path / "tiny")).config
    assert (config.model_id, config.head_dim, config.tie_embeddings, config.eos_ids) == ("tiny", 8, True, (2, 3))


def test_the_weights_id_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("copy", 0), ("finetune", 1)):
        save(tmp_path / name, seed=seed)
    ids = [open_model(str(tmp_path / name)).weights_id for name in ("first", "copy", "finetune")]
    assert ids[0] == ids[1] != ids[2]


def tier_terms(folder: Path) -> bytes:
    """Return the terms of what a worker of this model keeps in files and stores."""
    source = open_model(str(folder))
    layout = kv_layout(source.config, 8, 4, "float32")
    return terms_digest(file_terms(source, layout, EngineOptions(dtype="float32"), "CPU"))


def test_two_fine_tunes_of_one_name_have_no_page_in_common(tmp_path: Path) -> None:
    for place, seed in (("one", 0), ("other", 1)):
        save(tmp_path / place / "tiny", seed=seed)
    one, other = (tmp_path / place / "tiny" for place in ("one", "other"))
    assert open_model(str(one)).config.model_id == open_model(str(other)).config.model_id
    assert tier_terms(one) != tier_terms(other)


def test_pages_in_files_are_those_of_files_of_weights_that_were_not_touched_since(tmp_path: Path) -> None:
    save(tmp_path)
    source = open_model(str(tmp_path))
    before = tier_terms(tmp_path)
    assert tier_terms(tmp_path) == before
    (path,) = source.weight_files
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # an edit between two samples
    assert open_model(str(tmp_path)).weights_id == source.weights_id
    assert tier_terms(tmp_path) != before


CHAT = [{"role": "user", "content": "hi"}]


def test_tokenizer_and_chat_template_are_read_from_the_folder(tmp_path: Path) -> None:
    save(tmp_path)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_model(str(tmp_path)).tokenizer()
    assert tokenizer.encode("b a c") == [1, 0, 2]
    assert tokenizer.apply_chat_template(CHAT) == "<s>hi"
    other = tokenizer.with_chat_template("{{ bos_token }}!")
    assert (other.apply_chat_template([]), tokenizer.apply_chat_template(CHAT)) == ("<s>!", "<s>hi")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert open_model(str(tmp_path)).tokenizer().apply_chat_template([]) == "from the file"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    save(tmp_path)
    (tmp_path / missing).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=missing):
        open_model(str(tmp_path)).tokenizer()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, shard="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        open_model(str(tmp_path))


def test_a_shard_that_is_cut_off_is_an_error_and_not_garbage(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cut off"):
        list(open_model(str(tmp_path)).tensors())


def test_a_folder_s_scales_are_part_of_its_configuration_and_no_weights(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    plain = {name for name, _ in open_model(str(tmp_path)).tensors()}
    for layer in range(2):
        for kind, scale in (("k", 0.5), ("v", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(scale, dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, path)
    source = open_model(str(tmp_path))
    assert source.config.kv_scales == ((0.5, 0.25), (0.5, 0.25))
    assert {name for name, _ in source.tensors()} == plain
    pools = [PoolLayout.kv(1, 2, 16, 2, 16, kv_dtype) for kv_dtype in ("fp8_e4m3", "bfloat16")]
    shapes = {worker_terms(source, "ucx", pool, TransferRules(), EngineOptions(), "").kv_shape for pool in pools}
    assert len(shapes) == 2  # such pages are not converted on their way


def as_torch(tensor: Stored) -> torch.Tensor:
    assert isinstance(tensor, np.ndarray)
    read = torch.from_numpy(tensor)
    return read.view(torch.bfloat16) if read.dtype == torch.uint16 else read


def test_a_model_without_a_template_gets_one(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = open_model(str(tmp_path)).tokenizer()
    assert tokenizer.chat_template is None
    assert tokenizer.with_chat_template("{{ bos_token }}!").apply_chat_template([]) == "<s>!"
