"""Adapters of tiny models: random ones of any modules, and transformers' models that they are merged into."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

WriteAdapter = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter as PEFT saves it, and transformers' model with `W + scale * B A` in place of each `W`."""

    folder: Path
    model: Any

    def continues(self, prompt: list[int], output: list[int]) -> bool:
        """Whether the model continues the prompt greedily so: one pass over all of it shows that."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *output]])).logits[0]
        return bool(logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output)


def merged_adapter(
    base: Path, folder: Path, modules: str, write_adapter: WriteAdapter, **options: Any
) -> MergedAdapter:
    """Write a random adapter of all modules of the checkpoint `base` whose names end with what `modules` matches."""
    tensors = {name: tensor for path in base.glob("*.safetensors") for name, tensor in load_file(path).items()}
    ends = re.compile(rf".*\.(?:{modules})\.weight")
    shapes = {name.removesuffix(".weight"): tensors[name].shape for name in sorted(tensors) if ends.fullmatch(name)}
    deltas = write_adapter(folder / "adapter", shapes, **options)
    tensors |= {f"{module}.weight": tensors[f"{module}.weight"] + delta for module, delta in deltas.items()}
    (folder / "merged").mkdir()
    save_file(tensors, folder / "merged/model.safetensors", {"format": "pt"})
    config = (base / "config.json").read_text()
    (folder / "merged/config.json").write_text(config)
    kind = getattr(transformers, json.loads(config)["architectures"][0])
    return MergedAdapter(
        folder / "adapter", kind.from_pretrained(folder / "merged", attn_implementation="eager").eval()
    )
