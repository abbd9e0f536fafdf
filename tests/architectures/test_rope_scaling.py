"""Stretched rotary embeddings against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from diptych.architectures.config import Rope
from diptych.architectures.hf_config import read_rope, stretched_len
from diptych.common.errors import ConfigError

THETA = 500_000.0
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": np.linspace(1, 2, 64).tolist(),
    "long_factor": np.linspace(1, 60, 64).tolist(),
    "original_max_position_embeddings": 4096,
}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 8.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    YARN,
    YARN | {"truncate": False},
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    LONG,
    LONG | {"factor": 16.0},
    LONG | {"attention_factor": 1.1},
]


def read(parameters: dict[str, Any], context_len: int = 131072, dim: int = 128) -> Rope:
    return read_rope(
        parameters, theta=THETA, dim=dim, context_len=context_len, original_len=context_len, model_id="tiny"
    )


@pytest.mark.parametrize("parameters", KINDS, ids=str)
def test_frequencies_and_scale_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    given = parameters | {"rope_theta": THETA}
    config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=given)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, scale = compute(config, torch.device("cpu"), seq_len=131072)
    ours = read(parameters)
    divisors = np.array(ours.divisors or (1.0,) * 64)
    np.testing.assert_allclose(1 / (THETA ** (np.arange(0, 128, 2) / 128)) / divisors, frequencies.numpy(), rtol=2e-6)
    assert ours.scale == pytest.approx(scale)


def test_longrope_serves_models_of_the_original_length_with_the_short_list() -> None:
    assert read(LONG, context_len=4096) == Rope(THETA, 128, tuple(LONG["short_factor"]), 1.0)


def test_longrope_has_an_older_name() -> None:
    assert read({**LONG, "rope_type": None, "type": "su"}) == read(LONG)


def test_yarn_may_state_the_length_before_or_after_stretching() -> None:
    assert stretched_len(YARN, 32768) == stretched_len(YARN, 131072) == 131072
    assert stretched_len({}, 4096) == 4096


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope scaling 'ntk' is not supported; default, linear"),
        ({"rope_type": "default", "mrope_section": [16, 24]}, "mrope_section of rope scaling 'default'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(parameters)
