"""Reads an adapter as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

A tensor `base_model.model.X.lora_A.weight` belongs to the weight `X.weight` of the checkpoint, so the model's own
placement says which rows of which matrix it changes, whatever the family.

`PeftConfig` reads PEFT's `adapter_config.json`: which modules an adapter changes, and its scale on each. Rule: what
changes the result in a way that is not computed here is refused by name; nothing is silently ignored.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.architectures.placement import Piece, Placed, with_output
from diptych.architectures.registry import NONSENSE
from diptych.checkpoints.safetensors import read_tensors
from diptych.common.arrays import F32
from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json
from diptych.engine.lora.registry import EMBEDDING, OUTPUT, TARGETS, Adapter, InvalidAdapter, Product
from diptych.kernels.quantized import Array

_TENSOR: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<of>embedding_)?(?P<side>[AB])(?(of)|\.weight)"
)
_BASE: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")  # which PEFT saves of embeddings
SUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {  # null is as good as these
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
}
CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to initialise


def read_adapter(folder: Path, placement: Iterable[Placed]) -> Adapter:
    """Read an adapter of the model whose checkpoint `placement` describes. Raises `InvalidAdapter`."""
    try:
        return _read(folder, dict(with_output(placement)))
    except InvalidAdapter as error:
        raise InvalidAdapter(f"{folder}: {error}") from None
    except ConfigError as error:  # names the file
        raise InvalidAdapter(str(error)) from None
    except (OSError, re.error, *NONSENSE) as error:  # a file that is not what its name says
        raise InvalidAdapter(f"{folder} can't be read as an adapter: {error!r}") from None


def _read(folder: Path, placement: Mapping[str, tuple[Piece, ...]]) -> Adapter:
    config = read_config(read_json(folder / "adapter_config.json"))
    sides = _sides(folder / "adapter_model.safetensors", placement)
    unmatched = config.unmatched(sides)
    if unmatched or not sides:
        raise InvalidAdapter(f"adapter_model.safetensors has no weights for {', '.join(unmatched) or 'any module'}")
    digest = hashlib.sha256()
    products: list[Product] = []
    for module, tensors in sorted(sides.items()):
        pieces = _pieces(module, config, placement)
        a, b = _checked(module, config, tensors, pieces)
        scale = config.scale_of(module)
        digest.update(repr((module, scale, a.shape, b.shape)).encode() + a.tobytes() + b.tobytes())
        products += _products(pieces, a, b * np.float32(scale))
    return Adapter(digest.hexdigest()[:32], tuple(products))


def _sides(path: Path, placement: Mapping[str, tuple[Piece, ...]]) -> dict[str, dict[str, Array]]:
    """Return the tensors A and B of each module, as views of the file; those of embeddings are named otherwise."""
    sides: dict[str, dict[str, Array]] = {}
    for name, array in read_tensors(path):
        if (base := _BASE.fullmatch(name)) is not None:
            _check_base(base["module"], array, placement)
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise InvalidAdapter(f"tensor {name!r} is not the A or B of a layer, which is all that is supported")
        if bool(match["of"]) != _is_embedding(match["module"], placement):
            raise InvalidAdapter(f"tensor {name!r} is not how the A or B of such a layer is called")
        sides.setdefault(match["module"], {})[match["side"]] = array
    return sides


def _is_embedding(module: str, placement: Mapping[str, tuple[Piece, ...]]) -> bool:
    return any(piece.target == EMBEDDING for piece in placement.get(f"{module}.weight", ()))


def _check_base(module: str, array: Array, placement: Mapping[str, tuple[Piece, ...]]) -> None:
    """PEFT saves the model's own embeddings beside what changes them: they are as in the model, or of other tokens."""
    pieces = placement.get(f"{module}.weight", ())
    if not pieces or {piece.target for piece in pieces} - {EMBEDDING, OUTPUT}:
        raise InvalidAdapter(f"there is a weight of {module!r} itself, which an adapter does not replace")
    if array.shape != pieces[0].shape:
        raise InvalidAdapter(f"{module!r} is {array.shape} there, and {pieces[0].shape} in the model")


def _float32(array: Array) -> F32:
    if array.dtype == np.uint16:  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _pieces(module: str, config: PeftConfig, placement: Mapping[str, tuple[Piece, ...]]) -> tuple[Piece, ...]:
    pieces = placement.get(f"{module}.weight")
    if pieces is None:
        raise InvalidAdapter(f"the model has no module {module!r}")
    if not all(TARGETS.fullmatch(piece.target) for piece in pieces):
        words = "the projections of attention and of dense feed-forward networks, embeddings and the output can"
        raise InvalidAdapter(f"{module!r} can't have an adapter; {words}")
    if not config.targets(module):
        raise InvalidAdapter(f"there are weights for {module!r}, which is not among its target_modules")
    return pieces


def _checked(
    module: str, config: PeftConfig, tensors: Mapping[str, Array], pieces: tuple[Piece, ...]
) -> tuple[F32, F32]:
    """Return A and B. Raises if one is missing, or not of the shape that the model and the rank say."""
    rank, num_rows, num_columns = config.rank_of(module), sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
    if pieces[0].target == EMBEDDING:  # from token to state, where others are from state to state
        num_rows, num_columns = num_columns, num_rows
    shapes = {"A": (rank, num_columns), "B": (num_rows, rank)}
    for side, shape in shapes.items():
        if side not in tensors:
            raise InvalidAdapter(f"{module!r} has no lora_{side}")
        if tensors[side].shape != shape:
            found = tensors[side].shape
            raise InvalidAdapter(f"lora_{side} of {module!r} is {found}; model and configuration say {shape}")
    return _float32(tensors["A"]), _float32(tensors["B"])


def _products(pieces: tuple[Piece, ...], a: F32, b: F32) -> Iterator[Product]:
    if pieces[0].target == EMBEDDING:
        yield Product(EMBEDDING, 0, a, b)
        return
    row = 0
    for piece in pieces:
        yield Product(piece.target, piece.start, a, b[row : row + piece.shape[0]])
        row += piece.shape[0]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What the file says. Modules are called as in the checkpoint: "model.layers.0.self_attn.q_proj"."""

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | Collection[str]  # a regular expression, "all-linear", or ends of names
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def targets(self, module: str) -> bool:
        """Whether the adapter may change the linear layer `module`."""
        if isinstance(self.target_modules, str):
            is_all = self.target_modules.lower() == "all-linear"
            return is_all or re.fullmatch(self.target_modules, module) is not None
        return any(_ends_with(module, name) for name in self.target_modules)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Return the listed targets that none of `modules` is."""
        if isinstance(self.target_modules, str):
            return []
        names = list(modules)
        return sorted(t for t in self.target_modules if not any(_ends_with(name, t) for name in names))

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(values: Mapping[str, Any]) -> PeftConfig:
    """Raises `InvalidAdapter`, naming the key, for what is missing or not supported."""
    for key, neutral in SUPPORTED.items():
        if values.get(key) is not None and values[key] not in neutral:
            raise InvalidAdapter(f"{key}={values[key]!r} in adapter_config.json is not supported")
    if str(values.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        how = values["init_lora_weights"]
        raise InvalidAdapter(f"init_lora_weights={how!r} changes the base model: convert the adapter to plain LoRA")
    try:
        return PeftConfig(
            rank=_positive("r", int(values["r"])),
            alpha=float(values["lora_alpha"]),
            use_rslora=bool(values.get("use_rslora")),
            target_modules=values["target_modules"],
            rank_pattern={key: _positive(key, int(rank)) for key, rank in (values.get("rank_pattern") or {}).items()},
            alpha_pattern={key: float(alpha) for key, alpha in (values.get("alpha_pattern") or {}).items()},
        )
    except KeyError as error:
        raise InvalidAdapter(f"adapter_config.json has no {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidAdapter(f"adapter_config.json: {error}") from None


def _positive(key: str, rank: int) -> int:
    if rank < 1:
        raise ValueError(f"the rank {key} must be at least 1, not {rank}")
    return rank


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """As PEFT's `get_pattern_key` does: the first key that matches the end of the name counts."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)
