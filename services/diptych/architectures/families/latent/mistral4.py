"""Mistral Small 4: attention by latents and experts as in DeepSeek V3, chosen by a softmax; queries grow.

A checkpoint keeps all experts of a layer in one tensor, each one's gates before its ups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.families.dense.ministral3 import read_query_growth
from diptych.architectures.families.latent.deepseek_v3 import latent_placement, read_moe, with_latents
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Named
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

STACKED: Final = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<name>gate_up|down)_proj")


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,)})
    hf.ignore("qk_head_dim")
    growth = read_query_growth(hf)
    _check_part(hf, hf.pop_from_rope("partial_rotary_factor"))
    config = hf.shared("mistral4")
    moe = replace(read_moe(hf, config.num_layers), scoring="softmax", choice_bias=False)
    return replace(with_latents(config, hf), moe=moe, query_growth=growth)


def _check_part(hf: HfConfig, part: float | None) -> None:
    """What rotates is said by `qk_rope_head_dim`; raise `ConfigError` where its part of a head is another."""
    rotated, others = hf["qk_rope_head_dim"], hf["qk_nope_head_dim"]
    if part is not None and not math.isclose(part * (rotated + others), rotated):
        raise ConfigError(f"{hf.model_id}: partial_rotary_factor {part} is not qk_rope_head_dim's part of a head")


def unstack(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield the gates, ups and downs of each expert; other tensors as they are."""
    name, tensor = named
    match = STACKED.fullmatch(name)
    if match is None:
        yield named
        return
    assert config.moe is not None
    if isinstance(tensor, QuantizedArray) or tensor.ndim != 3 or len(tensor) != config.moe.num_experts:
        raise ConfigError(f"{config.model_id}: {name} is not the plain tensor of {config.moe.num_experts} experts")
    parts = ("down",) if match["name"] == "down" else ("gate", "up")
    for i, expert in enumerate(tensor):
        num_rows = len(expert) // len(parts)
        for at, part in enumerate(parts):
            yield f"{match['block']}{i}.{part}_proj.weight", expert[at * num_rows : (at + 1) * num_rows]


MISTRAL4 = Family("Mistral4ForCausalLM", _read, latent_placement, unstack=unstack)
