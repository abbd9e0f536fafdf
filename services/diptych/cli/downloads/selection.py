"""Which files of a source are fetched. Pure.

Of a folder: its descriptions (configuration, tokenizer, templates), and its weights in the one format that is served:
safetensors where there are any, else GGUF. Weights in other formats, copies for other programs and pictures are left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final, Literal

from diptych.common.errors import ConfigError

Part = Literal["all", "tokenizer"]

DESCRIBING: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken")
MODULE: Final = re.compile(r"(\d+_\w+|additional_chat_templates)")  # folders that belong to a model
TWICE: Final = "consolidated"  # Mistral's own names for what the other files hold, too


def select(names: Sequence[str], part: Part, include: Sequence[str]) -> list[str]:
    """Return the names to fetch, sorted. `include`: patterns of the weights that are meant.

    Raises `ConfigError` where there is nothing to serve, or it is not said which of several.
    """
    ours = [name for name in names if _is_safe(name) and _belongs(name)]
    describing = [name for name in ours if name.endswith(DESCRIBING)]
    weights = _weights(names if include else ours, include)
    if part == "all":
        return sorted({*describing, *weights})
    has_tokenizer = any(name.endswith(("tokenizer.json", ".model", ".tiktoken", "vocab.json")) for name in describing)
    inside = [] if has_tokenizer else [name for name in weights if name.endswith(".gguf")]
    if not (describing or inside):
        raise ConfigError("the source has no tokenizer")
    return sorted({*describing, *inside})


def _is_safe(name: str) -> bool:
    """Whether a name leads nowhere but below the folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not name.startswith(".")


def _belongs(name: str) -> bool:
    folder, slash, rest = name.partition("/")
    return not slash or ("/" not in rest and MODULE.fullmatch(folder) is not None)


def _weights(names: Sequence[str], include: Sequence[str]) -> list[str]:
    if include:
        return _included(names, include)
    found = [name for name in names if name.endswith(".safetensors")]
    others = [name for name in found if not name.startswith(TWICE)]
    if found:
        return others or found
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) > 1:
        raise ConfigError(f"the source has {len(found)} GGUF files: say by --include which, as {found[0]}")
    if not found:
        raise ConfigError("the source has neither *.safetensors nor a *.gguf: nothing of it could be served")
    return found


def _included(names: Sequence[str], include: Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in include:
        matching = [name for name in names if _is_safe(name) and fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"--include {pattern} is no file of the source: it has {', '.join(sorted(names)[:8])}")
        found += matching
    return found
