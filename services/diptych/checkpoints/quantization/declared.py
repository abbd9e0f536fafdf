"""What `quantization_config` says of a checkpoint's weights, before any of them is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import placement_of
from diptych.architectures.placement import Piece, Split
from diptych.architectures.size import EXPERT, LINEAR
from diptych.checkpoints.quantization.float8 import stores_fp8
from diptych.checkpoints.quantization.scheme import code_of
from diptych.checkpoints.quantization.units import Units
from diptych.checkpoints.shard import Shard
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import FOUR_BITS, MXFP4_GROUP, NIBBLES, Code

USUAL_GROUP: Final = 128  # columns of a scale, where AWQ and GPTQ do not say it


@dataclass(frozen=True, slots=True)
class Declared:
    """How matrices of layers are stored; in "fp4" the experts' alone."""

    code: Code
    group: int = 0  # columns of a scale; 0: all
    has_half_scales: bool = False
    has_mins: bool = False
    left_out: tuple[str, ...] = ()  # names of modules, or parts of them, that are stored in floats; "re:": patterns

    def holds(self, name: str, target: str) -> bool:
        """Whether the checkpoint's tensor of this name, for the matrix `target` of a model, is stored so."""
        if not (EXPERT.match(target) if self.code == "fp4" else LINEAR.fullmatch(target)):
            return False
        return not any(re.match(each[3:], name) if each.startswith("re:") else each in name for each in self.left_out)

    def unit(self, num_columns: int) -> int:
        """Return how many of the columns of a matrix cannot be parted; integers with one group have no groups."""
        if self.group and (self.code == "fp8" or self.group != num_columns):
            return self.group
        return NIBBLES if self.code in FOUR_BITS else 1

    def unit_of(self, name: str, piece: Piece) -> int:
        """See `Units`."""
        return self.unit(piece.shape[-1]) if self.holds(name, piece.target) else 1


def declared(said: Mapping[str, Any]) -> Declared | None:
    """Return None for weights that are floats, or become floats when they are read: columns in no order of groups."""
    left_out = tuple(said.get("modules_to_not_convert") or said.get("ignore") or ())
    if said.get("quant_method") == "mxfp4":
        return Declared("fp4", MXFP4_GROUP, left_out=left_out)
    if stores_fp8(said):
        return Declared("fp8", _block_columns(said), left_out=left_out)
    found = _bits_and_group(said)
    if found is None or said.get("desc_act") or not 0 < found[0] <= 8:
        return None
    method = said["quant_method"]
    has_mins = method == "awq" or (method == "gptq" and not said.get("sym"))
    has_half = method == "gptq" and not has_mins  # zero points and bfloat16 are kept in float32
    return Declared(code_of(found[0]), found[1], has_half, has_mins, left_out)


def check_groups(model: ModelConfig, shard: Shard, units: Units) -> None:
    """Raise `ConfigError` where ranks such as `shard` would divide columns that share a scale, or a byte."""
    options = f"--tp {shard.size}"
    if shard.network is not None:
        options += f" with --dp-attention {shard.network.size // shard.size}"
    for name, cuts in shard.placement(model, placement_of(model)):
        for cut in cuts:
            num_columns, is_cut = cut.local.shape[-1], cut.full.split is Split.COLUMNS and cut.full != cut.local
            if is_cut and num_columns % (unit := units(name, cut.full)):
                raise ConfigError(
                    f"{options} leaves a rank {num_columns} of the {cut.full.shape[-1]} columns of {name}, which "
                    f"divide a group of {unit} codes that share a scale, or a byte: give a smaller --tp, or "
                    "--quantization none"
                )


def _block_columns(said: Mapping[str, Any]) -> int:
    blocks = said.get("weight_block_size")
    if said.get("quant_method") == "compressed-tensors":
        blocks = _weights(said).get("block_structure")
    return blocks[1] if blocks else 0


def _bits_and_group(said: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the bits of integers, and the columns of a scale, 0 for all; None if there are no integers."""
    bits = said.get("bits", said.get("w_bit", 4))
    group = said.get("group_size", said.get("q_group_size", USUAL_GROUP))
    method, is_packed = said.get("quant_method"), said.get("format") == "pack-quantized"
    if method == "compressed-tensors" and (is_packed or said.get("format") == "int-quantized"):
        weights = _weights(said)
        bits, group = weights["num_bits"], weights.get("group_size") if is_packed else None
    elif method not in ("awq", "gptq"):
        return None
    return bits, max(0, group or 0)  # -1: all columns


def _weights(said: Mapping[str, Any]) -> Mapping[str, Any]:
    weights: Mapping[str, Any] = next(iter(said["config_groups"].values()))["weights"]
    return weights
