"""Scales of FP8 keys and values in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from diptych.checkpoints.hf_folder import is_kv_scale, read_kv_scales
from diptych.common.errors import ConfigError

KEY, VALUE = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"
PROJECTED = "model.layers.0.self_attn.k_proj.k_scale"


def read(scales: Mapping[str, float | list[float]], num_layers: int = 1) -> tuple[tuple[float, float], ...]:
    return read_kv_scales([(name, np.array(scale, np.float32)) for name, scale in scales.items()], num_layers, "tiny")


@pytest.mark.parametrize("suffix", ["{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale"])
def test_all_names_in_use_are_read(suffix: str) -> None:
    of_layers = ((0.5, 0.25), (2.0, [1.0]))
    names = [f"model.layers.{layer}.self_attn.{suffix.format(kind)}" for layer in (0, 1) for kind in "kv"]
    scales = dict(zip(names, (scale for layer in of_layers for scale in layer), strict=True))
    assert read(scales, 2) == ((0.5, 0.25), (2.0, 1.0))
    assert all(map(is_kv_scale, names))


def test_scales_of_queries_and_probabilities_are_left_out_and_those_of_weights_are_no_such_scales() -> None:
    unused = ("model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.prob_scale")
    assert read(dict.fromkeys(unused, 3.0)) == ()
    assert all(map(is_kv_scale, unused))
    assert not is_kv_scale("model.layers.0.self_attn.k_proj.weight_scale")
    assert not is_kv_scale("model.layers.0.self_attn.k_proj.input_scale")


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        ({KEY: 1.0}, "see v of layer 0"),
        ({KEY: 0.0, VALUE: 1.0}, "above 0"),
        ({KEY: float("nan"), VALUE: 1.0}, "above 0"),
        ({KEY: [1.0, 2.0], VALUE: 1.0}, "has 2 scales"),
        ({KEY: 1.0, VALUE: 1.0, PROJECTED: 2.0}, "another such scale"),
    ],
)
def test_what_cannot_be_used_is_named(scales: Mapping[str, float | list[float]], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(scales)
