"""The formats that `--load-format` names."""

from __future__ import annotations

from typing import Literal

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
