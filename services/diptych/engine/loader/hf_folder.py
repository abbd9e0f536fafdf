"""Presents a Hugging Face folder (config.json, safetensors sharded or not, tokenizer.json) as a `ModelSource`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from diptych.common.errors import ConfigError
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.fingerprint import fingerprint
from diptych.engine.loader.gguf import Array
from diptych.engine.loader.json_file import read_json
from diptych.engine.loader.safetensors import read_header, read_tensors
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.models.registry import from_hf

DERIVED: Final = "rotary_emb.inv_freq"  # saved by old versions; computed from the configuration instead


class HfFolder:
    """A `ModelSource` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.config = from_hf(config, read_json(generation) if generation.exists() else {}, folder.resolve().name)
        self._shards = _shards(folder)
        header = (folder / "config.json").read_bytes() + b"".join(read_header(shard)[0] for shard in self._shards)
        self.weights_id = fingerprint(self._shards, header)

    def tokenizer(self) -> Tokenizer:
        path = self._folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{self._folder} has no tokenizer.json; slow tokenizers are not supported")
        backend = tokenizers.Tokenizer.from_file(str(path))
        return Tokenizer(backend, eos_ids=self.config.eos_ids, chat_template=_chat_template(self._folder))

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for shard in self._shards:
            for name, tensor in read_tensors(shard):
                if not name.endswith(DERIVED) and not (name == "lm_head.weight" and self.config.tie_embeddings):
                    yield name, tensor


def _shards(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    shards = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ConfigError(f"{folder} lacks the shards {', '.join(missing)}")
    return shards


def _chat_template(folder: Path) -> ChatTemplate | None:
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
