"""Presents a GGUF file of a Llama model as a `ModelSource`: names and row order become Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.engine.loader import gguf_tokenizer
from diptych.engine.loader.config import ModelConfig, Rope
from diptych.engine.loader.fingerprint import fingerprint
from diptych.engine.loader.gguf import GgufFile
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.quantization.weight import Stored, as_floats
from diptych.kernels.quantized import QuantizedArray

TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS: Final = "rope_freqs.weight"  # Llama 3.1's frequency scaling, as a tensor


class GgufModel:
    """A `ModelSource` over one GGUF file."""

    def __init__(self, path: Path, model_id: str | None = None) -> None:
        self._file = GgufFile(path)
        self.config = _config(self._file, model_id or path.stem)
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
        if num_heads is None:
            return tensor
        order = np.arange(tensor.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
        return tensor.rows(order) if isinstance(tensor, QuantizedArray) else tensor[order]


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP_LEVEL:
        return f"{TOP_LEVEL[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
    raise ConfigError(f"GGUF tensor {name!r} has no place in a Llama model")


def _config(file: GgufFile, model_id: str) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{model_id}: GGUF architecture {architecture!r} is not supported; llama is")
    if "llama.expert_count" in metadata or "llama.rope.scaling.type" in metadata:
        raise ConfigError(f"{model_id}: mixture of experts and YaRN/linear rope scaling in GGUF are not supported")
    try:
        config = _read(metadata, file, model_id)
    except KeyError as error:
        raise ConfigError(f"{model_id}: the GGUF metadata has no {error}") from None
    config.validate()
    return config


def _read(metadata: Mapping[str, Any], file: GgufFile, model_id: str) -> ModelConfig:
    num_heads, eos_id = metadata["llama.attention.head_count"], metadata.get("tokenizer.ggml.eos_token_id")
    vocab_size, hidden_size = file.tensors["token_embd.weight"].shape
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    divisors = tuple(as_floats(file.read(ROPE_DIVISORS)).tolist()) if ROPE_DIVISORS in file.tensors else ()
    return ModelConfig(
        model_id=model_id,
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=metadata["llama.block_count"],
        num_heads=num_heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=metadata["llama.feed_forward_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope=Rope(metadata.get("llama.rope.freq_base", 10_000.0), head_dim, divisors),
        context_len=metadata["llama.context_length"],
        tie_embeddings="output.weight" not in file.tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=() if eos_id is None else (eos_id,),
    )
