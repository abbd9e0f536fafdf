"""Model configurations from Hugging Face's JSON: what is read, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from diptych.common.errors import ConfigError
from diptych.engine.loader.config import ModelConfig, Rope
from diptych.engine.models.registry import from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_plain_llama_config_is_read_with_the_defaults_of_its_format() -> None:
    assert from_hf(LLAMA, {}, "tiny") == ModelConfig(
        model_id="tiny",
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        rms_norm_eps=1e-5,
        rope=Rope(10_000.0, 16),
        context_len=256,
        tie_embeddings=False,
        bos_id=1,
        eos_ids=(2,),
    )


def test_the_generation_config_has_the_last_word_on_end_tokens() -> None:
    assert from_hf(LLAMA, {"eos_token_id": [2, 7]}, "tiny").eos_ids == (2, 7)
    assert from_hf(LLAMA | {"eos_token_id": None}, {}, "tiny").eos_ids == ()


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_gives_the_frequencies_of_transformers(layout: str) -> None:
    scaling = SCALING | {"rope_theta": 500_000.0}
    config = from_hf(LLAMA | {layout: scaling, "rope_theta": 500_000.0, "head_dim": 128}, {}, "tiny")
    theirs = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=scaling)
    reference, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    ours = 1 / (500_000.0 ** (np.arange(0, 128, 2) / 128)) / np.array(config.rope.divisors)
    np.testing.assert_allclose(ours, reference.numpy(), rtol=1e-6)


def test_linear_rope_scaling_divides_every_frequency_alike() -> None:
    config = from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, {}, "tiny")
    assert config.rope.divisors == (4.0,) * 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope scaling 'ntk' is not supported; default, linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
    ],
)
def test_what_the_model_code_does_not_compute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_hf(LLAMA | change, {}, "tiny")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="intermediate_size"):
        from_hf({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, {}, "tiny")


@pytest.mark.parametrize("change", [{"num_key_value_heads": 3}, {"head_dim": 15}, {"vocab_size": 0}])
def test_shapes_that_no_attention_can_have_do_not_validate(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        from_hf(LLAMA | change, {}, "tiny")
