"""What an operator may say of the served model: the format of its weights, its names, how long a request may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from diptych.common.errors import ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
MAX_NAME_CHARS: Final = 256
SHORTEST: Final = 2  # tokens: one of a prompt, one of output


def check_names(names: Sequence[str]) -> None:
    """Raise `ConfigError` for what no client should have to write as the name of a model."""
    for name in names:
        if len(name) > MAX_NAME_CHARS or not name.isprintable() or " " in name:
            words = f"at most {MAX_NAME_CHARS} printable characters without spaces"
            raise ConfigError(f"--served-model-name takes names of {words}, not {name[:40]!r}")


def check_max_model_len(max_model_len: int) -> None:
    """Raise `ConfigError` for what no model can be bounded to."""
    if max_model_len and max_model_len < SHORTEST:
        raise ConfigError(f"--max-model-len must be 0 or at least {SHORTEST}, not {max_model_len}")
