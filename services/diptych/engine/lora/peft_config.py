"""Reads PEFT's `adapter_config.json`: which modules an adapter changes, and its scale on each.

Rule: what changes the result in a way that is not computed here is refused by name; nothing is silently ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.engine.lora.adapter import InvalidAdapter

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
