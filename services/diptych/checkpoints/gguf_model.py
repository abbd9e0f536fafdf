"""Presents a GGUF file as a `ModelSource`: names and row order become Hugging Face's.

`read_config` reads the file's metadata as the `config.json` it was made from; from there on a family is one thing.
Rule: a key of the architecture that has no place there is refused by name.

`ARCHITECTURES` says how GGUF writes down model families: names of tensors, keys of metadata, and what it takes for
known. Source: llama.cpp's `convert_hf_to_gguf.py` and `src/llama-model.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import NONSENSE, from_hf
from diptych.checkpoints.fingerprint import fingerprint
from diptych.checkpoints.gguf import GgufFile
from diptych.checkpoints.quantization.gguf_blocks import TYPES
from diptych.checkpoints.quantization.units import Units
from diptych.checkpoints.quantization.weight import Stored, as_floats
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray
from diptych.tokens import gguf_tokenizer
from diptych.tokens.tokenizer import Tokenizer

TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
KEYS: Final = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
ROPE_KEYS: Final = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
}
IMPLIED: Final = {"attention.value_length", "rope.dimension_count", "rope.scaling.finetuned", "vocab_size"}
ROPE_DIVISORS: Final = "rope_freqs.weight"  # Llama 3.1's frequency scaling, as a tensor
ROPE_FACTORS: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
NOT_WEIGHTS: Final = frozenset({ROPE_DIVISORS, *ROPE_FACTORS.values()})
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One `general.architecture`."""

    hf_name: str  # of the architecture in `config.json`
    tensors: Mapping[str, str]  # of a layer: their Hugging Face names
    keys: Mapping[str, str] = field(default_factory=dict)  # of the architecture: their names in `config.json`
    known: Callable[[Values], dict[str, Any]] = lambda own: {}  # what no key says, by the keys there are
    is_paired: bool = False  # the two halves of a head's rotation are paired row by row in queries and keys
    has_whole_norms: bool = False  # norms are stored with the offset that Hugging Face adds


_ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FFN: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA: Final = _ATTENTION | _FFN | {"ffn_norm": "post_attention_layernorm"}
_PHI: Final = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GEMMA: Final = {
    **_ATTENTION,
    **_FFN,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW: Final = {"attention.sliding_window": "sliding_window"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _gemma_scale(layers_of_the_odd_one: int) -> Callable[[Values], dict[str, Any]]:
    """Queries are scaled by the size of a head, in the model of 27B by another, which is told by its layers."""

    def scale(own: Values) -> dict[str, Any]:
        if own["block_count"] == layers_of_the_odd_one:
            return {"query_pre_attn_scalar": own["embedding_length"] // own["attention.head_count"]}
        return {"query_pre_attn_scalar": own["attention.key_length"]}

    return scale


ARCHITECTURES: Final = {
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _GEMMA, _WINDOW | _CAPS, _gemma_scale(46), has_whole_norms=True),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        _GEMMA,
        _WINDOW | _CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _gemma_scale(62),
        has_whole_norms=True,
    ),
    "llama": GgufArchitecture("LlamaForCausalLM", _LLAMA, is_paired=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _PHI, _WINDOW),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _LLAMA),
}


class GgufModel:
    """A `ModelSource` over one GGUF file."""

    def __init__(self, path: Path, model_id: str | None = None) -> None:
        self._file = GgufFile(path)
        self.config = read_config(self._file, model_id or path.stem)
        self._architecture = ARCHITECTURES[self._file.metadata["general.architecture"]]
        self.weight_files: Sequence[Path] = [path]
        self.weights_id = fingerprint(self.weight_files, self._file.header)

    def tokenizer(self) -> Tokenizer:
        return gguf_tokenizer.build(self._file.metadata, self.config.eos_ids)

    def next_layer(self) -> NoReturn:
        """Raises `ConfigError`: there is none."""
        raise ConfigError(f"--speculate mtp: {self.config.model_id} has no layer that predicts one token more")

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name in self._file.tensors:
            if name not in NOT_WEIGHTS:
                yield self._hf_name(name), self._unpaired(name)

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        """Reads the header alone."""
        for name, sample in self.samples():
            yield name, _spread(sample, self._shapes[name])

    def samples(self) -> Iterator[tuple[str, Stored]]:
        """Yield a block of zeros for each weight, as it is stored. Reads nothing."""
        for name, info in self._file.tensors.items():
            if name not in NOT_WEIGHTS and info.type_id in TYPES:
                kind = TYPES[info.type_id]
                yield self._hf_name(name), kind.unpack(np.zeros((1, 1, kind.block_bytes), np.uint8))

    def units(self) -> Units:
        """A block has a scale, so all that is in integers has groups."""
        stored = {name: each for name, each in self.samples() if isinstance(each, QuantizedArray)}
        return lambda name, piece: stored[name].unit if name in stored else 1

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        infos = self._file.tensors.items()
        return {self._hf_name(name): info.shape for name, info in infos if name not in NOT_WEIGHTS}

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


def read_config(file: GgufFile, model_id: str) -> ModelConfig:
    """Raise `ConfigError` for what is not supported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{model_id}: GGUF architecture {name!r} is not supported; {known} are")
    architecture, start = ARCHITECTURES[name], f"{name}."
    own = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    unknown = [key for key in own if key not in KEYS.keys() | ROPE_KEYS.keys() | IMPLIED | architecture.keys.keys()]
    if unknown:
        raise ConfigError(f"{model_id}: {start}{unknown[0]} in the GGUF metadata is not supported")
    try:
        values = _as_hf(architecture, own, file)
    except KeyError as error:
        raise ConfigError(f"{model_id}: the GGUF metadata has no {error}") from None
    except NONSENSE as error:
        raise ConfigError(f"{model_id}: the GGUF metadata makes no sense: {error}") from None
    config = from_hf(values, {}, model_id)
    if architecture.is_paired and config.rope.dim != config.head_dim:
        raise ConfigError(f"{model_id}: heads of {config.head_dim} of which fewer dimensions rotate are not supported")
    return _as_stored(architecture, config, file)


def _as_hf(architecture: GgufArchitecture, own: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    values = {name: own[key] for key, name in {**KEYS, **architecture.keys}.items() if key in own}
    head_dim = own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    return {
        **values,
        **architecture.known(own),
        "architectures": [architecture.hf_name],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(own, file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_scaling(own: Mapping[str, Any], file: GgufFile) -> dict[str, Any] | None:
    rope = {name: own[key] for key, name in ROPE_KEYS.items() if key in own}
    if all(tensor in file.tensors for tensor in ROPE_FACTORS.values()):
        factors = {name: as_floats(file.read(tensor)).tolist() for name, tensor in ROPE_FACTORS.items()}
        return rope | factors | {"rope_type": "longrope"}
    return None if rope.get("rope_type", "none") == "none" else rope


def _as_stored(architecture: GgufArchitecture, config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Return the configuration for weights as they are in the file."""
    if architecture.has_whole_norms:
        config = replace(config, norm_offset=0.0)
    if ROPE_DIVISORS in file.tensors:
        divisors = tuple(as_floats(file.read(ROPE_DIVISORS)).tolist())
        config = replace(config, rope=replace(config.rope, divisors=divisors))
    return config


def _spread(sample: Stored, shape: tuple[int, ...]) -> Stored:
    """Return zeros in the form of a block, as many as a tensor has; they take no memory."""
    if isinstance(sample, np.ndarray):
        return np.broadcast_to(np.zeros((), sample.dtype), shape)
    num_rows, num_columns = math.prod(shape[:-1]), shape[-1]
    num_groups = num_columns // sample.group if sample.group else 1
    scales, mins = (
        None if each is None else np.broadcast_to(np.zeros((), each.dtype), (num_rows, num_groups))
        for each in (sample.scales, sample.mins)
    )
    codes = np.broadcast_to(np.zeros((), sample.codes.dtype), (num_rows, num_columns))
    return QuantizedArray(sample.code, codes, scales, mins, sample.group)
