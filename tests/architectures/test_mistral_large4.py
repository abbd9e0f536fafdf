"""Mistral Large 4: how its configuration is read, and completed by what its checkpoint has learned of rotation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from diptych.architectures.config import Indexer, Latent, ModelConfig, Moe, Rope
from diptych.architectures.families.latent.mistral_large4 import MISTRAL_LARGE4
from diptych.architectures.registry import from_hf
from diptych.checkpoints.hf_folder import HfFolder
from diptych.common.errors import ConfigError

TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def with_images(**text: Any) -> dict[str, Any]:
    outer = {"architectures": ["MistralLarge4ForConditionalGeneration"], "vision_config": {}, "image_token_index": 10}
    return outer | {"spatial_merge_size": 2, "text_config": TEXT | text}


def read(**text: Any) -> ModelConfig:
    return from_hf(with_images(**text), {}, "tiny")


def test_it_is_read_for_text(caplog: pytest.LogCaptureFixture) -> None:
    config = read()
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: images are not supported; the model is served for text"
    ]
    assert config.latent == Latent(0, 32, 24, 16, 20, interleaved=True, norm_eps=1e-5)
    assert config.indexer == Indexer(4, 32, 64, True, tuple(range(8)), own_queries=True)
    assert config.moe == Moe(
        8, 2, 24, normalize=True, dense_layers=frozenset({0}), wide_router=True, shared_ffn_size=24
    )
    assert config.rope == Rope(1e4, 16, start=32)
    assert (config.still_layers, config.sources) == (frozenset({3, 7}), ())
    assert (config.logits_softcap, config.learned_growth, config.eos_ids) == (30.0, True, (2,))


def test_a_still_layer_makes_all_that_a_query_meets_of_the_latent() -> None:
    config = read()
    assert config.latent_of(2) == config.latent
    assert config.latent_of(3) == Latent(0, 32, 40, 0, 20, interleaved=True, norm_eps=1e-5)
    assert config.rope_of(2) == config.rope
    assert (config.rope_of(3).is_still, config.rope_of(3).start) == (True, 32)


def test_layers_that_attend_to_the_latents_of_others_keep_none() -> None:
    config = read(kv_source_layers=[0, 1, 1, 3, 1, 5, 5, 3])
    assert [config.keeps(layer) for layer in range(8)] == [True, True, False, True, False, True, False, False]
    assert [config.place(layer) for layer in range(8)] == [0, 1, 1, 2, 1, 3, 3, 2]
    assert read(kv_source_layers=list(range(8))).sources == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": None}, "no rope_parameters"),
        ({"q_lora_rank": 16}, "q_lora_rank=16"),
        ({"layer_types": ["full_attention"] * 8}, "layer_types other than indexed_attention"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers of 8 layers"),
        ({"kv_source_layers": [0, 0]}, "attend to"),
        ({"kv_source_layers": [1, 1, 2, 3, 4, 5, 6, 7]}, "1 for layer 0, which is not the last one to share"),
        ({"kv_source_layers": [0, 1, 2, 2, 4, 5, 6, 7]}, "2 for layer 3, which is not the last one to share"),
        ({"kv_source_layers": [0, 1, 0, 3, 1, 0, 6, 7]}, "0 for layer 2, which is not the last one to share"),
        ({"indexer_types": ["shared"] * 8}, "the first layer must choose"),
    ],
    ids=str,
)
def test_what_no_layer_computes_is_refused(text: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**text)


def folder_with(path: Path, **tensors: Any) -> Path:
    (path / "config.json").write_text(json.dumps(with_images()))
    save_file({"norm.weight": np.ones(64, np.float32), **tensors}, path / "model.safetensors")
    return path


def test_its_checkpoint_stretches_the_frequencies(tmp_path: Path) -> None:
    alpha = np.linspace(-0.5, 0.5, 8, dtype=np.float32)
    config = HfFolder(folder_with(tmp_path, **{"lerope.alpha": alpha})).config
    assert config.rope.divisors == pytest.approx([math.exp(-each) for each in alpha])


@pytest.mark.parametrize("tensors", [{}, {"lerope.alpha": np.zeros(4, np.float32)}], ids=["none", "too few"])
def test_a_checkpoint_with_other_frequencies_is_refused(tensors: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lerope\.alpha"):
        HfFolder(folder_with(tmp_path, **tensors))


def test_tensors_have_the_names_of_its_publisher() -> None:
    names = {name for name, _ in MISTRAL_LARGE4.placement(read(kv_source_layers=[0, 1, 1, 3, 4, 5, 6, 7]))}
    assert {"tok_embeddings.weight", "norm.weight", "output.weight"} <= names
    assert {"layers.0.feed_forward.w1.weight", "layers.1.experts.7.w3.weight", "layers.1.gate.weight"} <= names
    assert {"layers.1.attention.wkv_a_with_mqa.weight", "layers.2.attention.indexer.ssmax_scaling.b"} <= names
    assert not {"layers.2.attention.wkv_a_with_mqa.weight", "layers.2.attention.kv_a_norm.weight"} & names
