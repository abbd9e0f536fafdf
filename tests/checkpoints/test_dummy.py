"""Models without weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from diptych.checkpoints.quantization.weight import as_floats
from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError


def save_config(folder: Path, hidden_size: int = 32) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def test_a_configuration_is_enough_and_gives_the_same_weights_everywhere(tmp_path: Path) -> None:
    for name in ("here", "there"):
        save_config(tmp_path / name)
    here, there = (open_model(str(tmp_path / name), "dummy") for name in ("here", "there"))
    assert here.weights_id == there.weights_id
    for (name, ours), (other, theirs) in zip(here.tensors(), there.tensors(), strict=True):
        assert name == other
        assert isinstance(ours, np.ndarray)
        np.testing.assert_array_equal(ours, theirs)
        assert 0.01 < ours.std() < 0.03 or (ours == 1).all(), name


def test_no_two_tensors_are_alike(tmp_path: Path) -> None:
    """A model whose output projection were its embedding would repeat the last token."""
    save_config(tmp_path)
    arrays = [as_floats(array) for _, array in open_model(str(tmp_path), "dummy").tensors()]
    matrices = [array for array in arrays if array.ndim == 2]
    assert len({array.ravel()[:8].tobytes() for array in matrices}) == len(matrices)


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    save_config(tmp_path / "small")
    save_config(tmp_path / "large", hidden_size=64)
    assert len({open_model(str(tmp_path / name), "dummy").weights_id for name in ("small", "large")}) == 2


def test_without_a_tokenizer_a_token_is_its_number(tmp_path: Path) -> None:
    save_config(tmp_path)
    tokenizer = open_model(str(tmp_path), "dummy").tokenizer()
    assert tokenizer.encode("5 17 299") == [5, 17, 299]
    assert tokenizer.decode([5, 17, 299]) == "5 17 299"


def test_the_folders_tokenizer_comes_first(tmp_path: Path) -> None:
    save_config(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 7}, unk_token="hi")).save(str(tmp_path / "tokenizer.json"))
    assert open_model(str(tmp_path), "dummy").tokenizer().encode("hi") == [7]


@pytest.mark.parametrize(
    ("load_format", "named"),
    [("dummy", "a folder with config.json"), ("safetensors", r"\*\.safetensors"), ("gguf", "a GGUF file")],
)
def test_a_format_says_what_it_takes(load_format: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"--load-format {load_format} takes .*{named}"):
        open_model("smollm2", load_format)  # type: ignore[arg-type]


def test_a_dummy_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError, match="MambaForCausalLM is not supported; BertModel"):
        open_model(str(tmp_path), "dummy")
