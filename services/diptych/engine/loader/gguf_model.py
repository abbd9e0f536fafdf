"""Presents a GGUF file as a `ModelSource`: names and row order become Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.engine.loader import gguf_tokenizer
from diptych.engine.loader.fingerprint import fingerprint
from diptych.engine.loader.gguf import GgufFile
from diptych.engine.loader.gguf_config import ROPE_DIVISORS, read_config
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.quantization.weight import Stored
from diptych.kernels.quantized import QuantizedArray

TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PERMUTED: Final = ("llama",)  # architectures whose rows GGUF orders in another way


class GgufModel:
    """A `ModelSource` over one GGUF file."""

    def __init__(self, path: Path, model_id: str | None = None) -> None:
        self._file = GgufFile(path)
        self.config = read_config(self._file, model_id or path.stem)
        self.weights_id = fingerprint([path], self._file.header)

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer.build(self._file.metadata, self.config.eos_ids)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name in self._file.tensors:
            if name != ROPE_DIVISORS:
                yield _hf_name(name), self._unpermuted(name)

    def _unpermuted(self, name: str) -> Stored:
        """GGUF pairs the two halves of a head's rotation row by row; Hugging Face keeps them apart."""
        tensor = self._file.read(name)
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        num_heads = heads.get(name.split(".")[-2])
        if num_heads is None or self.config.architecture not in PERMUTED:
            return tensor
        order = np.arange(tensor.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
        return tensor.rows(order) if isinstance(tensor, QuantizedArray) else tensor[order]


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP_LEVEL:
        return f"{TOP_LEVEL[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
    raise ConfigError(f"GGUF tensor {name!r} has no place in this model")
