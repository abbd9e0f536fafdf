"""Reads the tokenizer and the chat template of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from diptych.common.errors import ConfigError
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.json_file import read_json
from diptych.engine.loader.tokenizer import Tokenizer


def read_tokenizer(folder: Path, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Read `tokenizer.json`, and the template beside it. Raises `ConfigError` without one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; slow tokenizers are not supported")
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()  # a file may ask for either, as it was trained; a prompt is tokenised as it is
    backend.no_padding()
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=_read_chat_template(folder))


def _read_chat_template(folder: Path) -> ChatTemplate | None:
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template_file = folder / "chat_template.jinja"
    source = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}
