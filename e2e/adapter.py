"""An adapter of the small model, as a ConfigMap: of rank 1 and so strong that no answer stays what it was."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import numpy as np

MODULE: Final = "model.layers.29.mlp.down_proj"  # of the last layer: 1536 columns, 576 rows
ROWS, COLUMNS, ALPHA = 576, 1536, 8


def config_map(name: str) -> dict[str, Any]:
    """Return a ConfigMap whose keys are the files of a folder as PEFT writes it."""
    settings = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": ALPHA,
        "target_modules": [MODULE.rpartition(".")[2]],
        "bias": "none",
    }
    files = {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": _tensors()}
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "binaryData": data}


def _tensors() -> bytes:
    rng, header, parts, offset = np.random.default_rng(0), {}, [], 0
    for side, shape in (("A", (1, COLUMNS)), ("B", (ROWS, 1))):
        data = rng.standard_normal(shape, dtype=np.float32).tobytes()
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": (offset, offset + len(data))}
        header[f"base_model.model.{MODULE}.lora_{side}.weight"] = tensor
        parts.append(data)
        offset += len(data)
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + b"".join(parts)
