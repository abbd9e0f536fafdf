"""Scales of FP8 keys and values that a checkpoint brings: a number stands for what is stored times its layer's scale.

Names in use are `self_attn.k_scale` (vLLM, SGLang), `self_attn.k_proj.k_scale` (ModelOpt) and
`self_attn.k_proj.output_scale` (compressed-tensors, Quark), and those of v. Scales of queries and of probabilities are
for products of FP8, which there are none of: they are left out. Rule: one number a layer for keys and one for values,
for all layers or for none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

from diptych.checkpoints.quantization.weight import as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array

KvScales = tuple[tuple[float, float], ...]  # [num_layers]: of keys, of values

NAME: Final = re.compile(
    r"\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<of>q|k|v|prob)_scale|[qkv]_proj\.(?P<of_product>[qkv])_scale|(?P<of_output>[qkv])_proj\.output_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is such a scale, one of those that are left out included."""
    return NAME.search(name) is not None


def read_kv_scales(tensors: Iterable[tuple[str, Array]], num_layers: int, model_id: str) -> KvScales:
    """Return the scales among `tensors`; empty where there are none. Raises `ConfigError` for what can't be used."""
    found: dict[tuple[int, str], float] = {}
    for name, tensor in tensors:
        match = NAME.search(name)
        kind = match and (match["of"] or match["of_product"] or match["of_output"])
        if match is None or kind not in ("k", "v"):
            continue
        place, scale = (int(match["layer"]), kind), _number(name, tensor, model_id)
        if found.setdefault(place, scale) != scale:
            raise ConfigError(f"{model_id}: {name} is {scale}, but the layer has another such scale, {found[place]}")
    if not found:
        return ()
    odd = sorted({*found} ^ {(layer, kind) for layer in range(num_layers) for kind in ("k", "v")})
    if odd:
        layer, kind = odd[0]
        raise ConfigError(f"{model_id}: FP8 keys and values need two scales in all layers: see {kind} of layer {layer}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _number(name: str, tensor: Array, model_id: str) -> float:
    if tensor.size != 1:
        raise ConfigError(f"{model_id}: {name} has {tensor.size} scales; one a layer is supported")
    scale = float(as_floats(tensor).reshape(()))
    if not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(f"{model_id}: {name} is {scale}, but a scale is above 0")
    return scale
