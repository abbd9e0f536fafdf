"""How GGUF writes down model families: names of tensors, keys of metadata, and what it takes for known.

Source: llama.cpp's `convert_hf_to_gguf.py` and `src/llama-model.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
_GEMMA: Final = (
    _ATTENTION
    | _FFN
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
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
