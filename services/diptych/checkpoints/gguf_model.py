"""Presents a GGUF file as a `ModelSource`: names and row order become Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from diptych.architectures.gguf_architectures import ARCHITECTURES
from diptych.checkpoints.fingerprint import fingerprint
from diptych.checkpoints.gguf import GgufFile
from diptych.checkpoints.gguf_config import NOT_WEIGHTS, read_config
from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray
from diptych.tokens import gguf_tokenizer
from diptych.tokens.tokenizer import Tokenizer

TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class GgufModel:
    """A `ModelSource` over one GGUF file."""

    def __init__(self, path: Path, model_id: str | None = None) -> None:
        self._file = GgufFile(path)
        self.config = read_config(self._file, model_id or path.stem)
        self._architecture = ARCHITECTURES[self._file.metadata["general.architecture"]]
        self.weights_id = fingerprint([path], self._file.header)

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer.build(self._file.metadata, self.config.eos_ids)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name in self._file.tensors:
            if name not in NOT_WEIGHTS:
                yield self._hf_name(name), self._unpaired(name)

    def _unpaired(self, name: str) -> Stored:
        """GGUF pairs the two halves of a head's rotation row by row; Hugging Face keeps them apart."""
        tensor = self._file.read(name)
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        num_heads = heads.get(name.split(".")[-2])
        if num_heads is None or not self._architecture.is_paired:
            return tensor
        order = np.arange(tensor.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
        return tensor.rows(order) if isinstance(tensor, QuantizedArray) else tensor[order]

    def _hf_name(self, name: str) -> str:
        parts, in_layer = name.split("."), self._architecture.tensors
        if len(parts) == 2 and parts[0] in TOP_LEVEL:
            return f"{TOP_LEVEL[parts[0]]}.{parts[1]}"
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in in_layer:
            return f"model.layers.{parts[1]}.{in_layer[parts[2]]}.{parts[3]}"
        raise ConfigError(f"GGUF tensor {name!r} has no place in this model")
