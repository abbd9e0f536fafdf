"""Qwen3.5 with a mixture of experts in every layer, and a gated network beside them that every token passes.

A checkpoint keeps all experts of a layer in one tensor, each one's gates before its ups, or each in its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.latent.mistral4 import unstack as unstack_experts
from diptych.architectures.families.recurrent.qwen3_5 import (
    next_name_with_images,
    not_read_with_images,
    placement_with_images,
    read_text,
    read_with_images,
)
from diptych.architectures.families.recurrent.qwen3_next import (
    NOT_READ,
    delta_placement,
    next_name,
    shared_moe,
    unstack_gates,
)
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Named


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"mlp_only_layers": ([],), "norm_topk_prob": (True,)})
    hf.ignore("intermediate_size")  # no layer is without experts
    config = read_text(hf, "qwen3_5_moe_text", ffn_key="moe_intermediate_size")
    return replace(config, moe=shared_moe(hf, frozenset()))


def _unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    for each in unstack_experts(config, named):
        yield from unstack_gates(config, each)


QWEN3_5_MOE_TEXT = Family(
    "Qwen3_5MoeForCausalLM",
    _read,
    delta_placement,
    not_read=lambda _: NOT_READ,
    unstack=_unstack,
    next_name=next_name,
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForConditionalGeneration",
    lambda hf: read_with_images(hf, _read, "qwen3_5_moe"),
    placement_with_images,
    not_read=not_read_with_images,
    unstack=_unstack,
    next_name=next_name_with_images,
)
