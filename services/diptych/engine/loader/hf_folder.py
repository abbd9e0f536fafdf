"""Presents a Hugging Face folder (config.json, safetensors sharded or not, tokenizer.json) as a `ModelSource`.

safetensors: 8 bytes of header length, a JSON header, the data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from diptych.common.errors import ConfigError
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.fingerprint import fingerprint
from diptych.engine.loader.gguf import Array
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.models.registry import from_hf

DTYPES: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
DERIVED: Final = "rotary_emb.inv_freq"  # saved by old versions; computed from the configuration instead


class HfFolder:
    """A `ModelSource` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = _json(folder / "config.json")
        generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
        self.config = from_hf(config, generation, folder.resolve().name)
        self._shards = _shards(folder)
        header = (folder / "config.json").read_bytes() + b"".join(_header(shard)[0] for shard in self._shards)
        self.weights_id = fingerprint(self._shards, header)

    def tokenizer(self) -> Tokenizer:
        path = self._folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{self._folder} has no tokenizer.json; slow tokenizers are not supported")
        backend = tokenizers.Tokenizer.from_file(str(path))
        return Tokenizer(backend, eos_ids=self.config.eos_ids, chat_template=_chat_template(self._folder))

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for shard in self._shards:
            for name, tensor in _read_shard(shard):
                if not name.endswith(DERIVED) and not (name == "lm_head.weight" and self.config.tie_embeddings):
                    yield name, tensor


def _shards(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    shards = [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ConfigError(f"{folder} lacks the shards {', '.join(missing)}")
    return shards


def _header(shard: Path) -> tuple[bytes, int]:
    """Return the JSON header and where the data starts."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > shard.stat().st_size:
            raise ConfigError(f"{shard} is not a safetensors file, or is cut off")
        return file.read(length), 8 + length


def _read_shard(shard: Path) -> Iterator[tuple[str, Array]]:
    header, start = _header(shard)
    with shard.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ConfigError(f"{shard}: {name} is {entry['dtype']}; readable are {', '.join(DTYPES)}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > len(data):
            raise ConfigError(f"{shard} is cut off: {name} ends after the file does")
        raw = np.frombuffer(data, np.uint8, end - begin, begin)
        yield name, raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _chat_template(folder: Path) -> ChatTemplate | None:
    config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template_file = folder / "chat_template.jinja"
    source = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each["template"] for each in source if each["name"] == "default"), None)
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return value
