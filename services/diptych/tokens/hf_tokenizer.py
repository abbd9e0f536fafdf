"""Reads the tokenizer and the chat template of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json
from diptych.tokens.tokenizer import Tokenizer

MAX_BYTES: Final = 256 << 20  # of tokenizer.json; the largest known take a sixth of it


def read_tokenizer(folder: Path, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Read `tokenizer.json`, and the template beside it. Raises `ConfigError` without one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; slow tokenizers are not supported")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library's errors have no class of their own
        raise ConfigError(f"{path} is not a readable tokenizer: {error!s:.500}") from None
    backend.no_truncation()  # a file may ask for either, as it was trained; a prompt is tokenised as it is
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template = _read_chat_template(folder, config)
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=template, special_tokens=_special_tokens(config))


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    template_file = folder / "chat_template.jinja"
    source = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}
