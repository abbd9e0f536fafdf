"""What a model name may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct"])
def test_the_small_model_has_two_names_and_one_identity(small_model: ModelSource, name: str) -> None:
    opened = open_model(name)
    assert (opened.config, opened.weights_id) == (small_model.config, small_model.weights_id)


@pytest.mark.model
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
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`" in str(caught.value)
    for path in ("./Qwen/x", "../x", "a/b/c", "~/x", "models/x.gguf"):
        with pytest.raises(ConfigError, match="give 'smollm2', a"):
            open_model(path)
