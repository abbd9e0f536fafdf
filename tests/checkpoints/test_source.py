"""What a model name may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from diptych.checkpoints import demo, simulated
from diptych.checkpoints.source import DEMO_NAMES, SIMULATED, ModelSource, open_described, open_model
from diptych.common.errors import ConfigError


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct"])
def test_the_small_model_has_two_names_and_one_identity(small_model: ModelSource, name: str) -> None:
    opened = open_model(name)
    assert (opened.config, opened.weights_id) == (small_model.config, small_model.weights_id)


def test_a_gguf_path_opens_the_same_weights_under_the_files_name(
    small_model: ModelSource, small_model_path: Path
) -> None:
    opened = open_model(str(small_model_path))
    assert opened.weights_id == small_model.weights_id
    assert opened.config.model_id == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.parametrize("name", ["", "no-such-model", "/no/such/model.gguf"])
def test_an_unknown_name_says_what_a_name_may_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"smollm2.*\.gguf.*config\.json"):
        open_model(name)


def test_a_name_of_a_hub_is_told_that_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="models of a hub are not downloaded") as caught:
        open_model("Qwen/Qwen2.5-0.5B")
    assert "`diptych download Qwen/Qwen2.5-0.5B Qwen2.5-0.5B`" in str(caught.value)
    for path in ("./Qwen/x", "../x", "a/b/c", "~/x", "models/x.gguf"):
        with pytest.raises(ConfigError, match="give 'smollm2', a"):
            open_model(path)


def test_a_router_opens_a_folder_that_has_no_weights(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 32}
    heads = {"rms_norm_eps": 1e-5, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        open_described(str(tmp_path))
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    described = open_described(str(tmp_path))
    assert (described.config.vocab_size, described.config.context_len) == (64, 32)
    assert described.tokenizer().encode("a") == [0]
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        open_model(str(tmp_path))


def test_names_are_those_of_the_models_that_they_open() -> None:
    assert simulated.NAME == SIMULATED
    assert demo.MODEL_ID.lower() in DEMO_NAMES
