"""Kimi K2.5: DeepSeek V3 with images, as its publisher and transformers write it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from diptych.architectures.families.latent.kimi_k25 import KIMI_K25
from diptych.architectures.registry import from_hf
from diptych.checkpoints.hf_folder import HfFolder
from diptych.common.errors import ConfigError

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
OUTER: dict[str, Any] = {
    "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True,
    "vision_config": {"vt_hidden_size": 1152},
}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("KimiK25ForConditionalGeneration", "kimi_k2"), ("Kimi_K25ForConditionalGeneration", "deepseek_v3")],
)
def test_it_is_read_for_text_as_deepseek_v3(architecture: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    values = OUTER | {"architectures": [architecture], "text_config": TEXT | {"model_type": kind}, "eos_token_id": 7}
    expected = replace(from_hf(TEXT, {}, "tiny"), architecture="kimi_k25", eos_ids=(7,))
    assert from_hf(values, {}, "tiny") == expected
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: images are not supported; the model is served for text"
    ]


def test_another_text_is_refused() -> None:
    values = OUTER | {"architectures": [KIMI_K25.architecture], "text_config": TEXT | {"model_type": "kimi_k3"}}
    with pytest.raises(ConfigError, match="text_config of model_type kimi_k3 is not supported"):
        from_hf(values, {}, "tiny")


def test_how_it_is_quantised_may_be_said_of_its_text(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fancy"}}
    values = OUTER | {"architectures": [KIMI_K25.architecture], "text_config": TEXT | quantised}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"language_model.model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="quant_method 'fancy' is not supported"):
        HfFolder(tmp_path)
