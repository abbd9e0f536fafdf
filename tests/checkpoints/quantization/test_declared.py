"""What is known of weights from `quantization_config` alone."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.checkpoints.quantization.declared import Declared, declared


def compressed(format_name: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, Declared("int8", has_half_scales=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Declared("int4", 64, has_mins=True)),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Declared("fp8", 64)),
        (compressed("pack-quantized", num_bits=4, group_size=32), Declared("int4", 32, left_out=("lm_head",))),
        (compressed("int-quantized", num_bits=8), Declared("int8", left_out=("lm_head",))),
        (compressed("float-quantized", block_structure=[128, 128]), Declared("fp8", 128, left_out=("lm_head",))),
        (compressed("float-quantized", block_structure=None), Declared("fp8", left_out=("lm_head",))),
        ({"quant_method": "mxfp4"}, Declared("fp4", 32)),
    ],
)
def test_codes_and_columns_of_a_scale_are_known(said: dict[str, Any], expected: Declared | None) -> None:
    assert declared(said) == expected


def test_matrices_of_layers_are_stored_so_but_those_that_are_left_out() -> None:
    stored = Declared("int4", 128, left_out=("lm_head", "layers.3.mlp", r"re:.*vision"))
    assert stored.holds("model.layers.2.mlp.down_proj.weight", "2.down")
    assert not stored.holds("model.layers.3.mlp.down_proj.weight", "3.down")
    assert not stored.holds("a.vision.layers.2.mlp.down_proj.weight", "2.down")
    assert not stored.holds("model.embed_tokens.weight", "embed")
    experts = Declared("fp4", 32)
    assert experts.holds("model.layers.0.mlp.experts.down_proj", "0.experts.1.down")
    assert not experts.holds("model.layers.0.self_attn.o_proj.weight", "0.o")


def test_one_group_of_integers_may_be_parted_between_its_bytes() -> None:
    assert [Declared("int4", 128).unit(columns) for columns in (256, 128)] == [128, 8]
    assert [Declared(code, 0).unit(256) for code in ("int4", "int8", "fp8")] == [8, 1, 1]
    assert Declared("fp8", 128).unit(128) == 128
