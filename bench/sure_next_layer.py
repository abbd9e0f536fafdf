"""Writes a model that knows which token comes behind another one, and a layer that knows which comes behind that.

Nothing that its layers compute is added to a token's direction, so it costs what any model of its size does and says
`SUCCESSOR` words further each time: greedy guesses of its next layer are right, if made of what they should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import next_layer, placement_of
from diptych.architectures.registry import from_hf
from diptych.kernels.quantized import Array

SUCCESSOR: Final = 91  # behind word `t` comes `t + SUCCESSOR`, in a circle
ADD_NOTHING: Final = ("o_proj.weight", "down_proj.weight")
ZEROS: Final = (*ADD_NOTHING, ".bias", "e_score_correction_bias")

Joined = Callable[[Array, Array], Array]


def by_rows(one: Array, succeeded: Array) -> Array:
    """Have the layer look at the hidden row before a token alone: what came behind it is the token."""
    return np.concatenate([np.zeros_like(one), succeeded], axis=1)


def by_tokens(one: Array, succeeded: Array) -> Array:
    """Have it look at the token alone."""
    return np.concatenate([one, np.zeros_like(one)], axis=1)


def write(folder: Path, joined: Joined, num_words: int = 321, **sizes: Any) -> Path:
    """Write it as GLM-4.5 is written, in float32; tokens are directions, so there are as many as a row has numbers.

    `joined` makes `eh_proj` of the identity and of what turns a token's row into that of its successor.
    """
    values = {**_config(num_words), **sizes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    model = from_hf(values, {}, folder.name)
    tensors = dict(_tensors(model, lambda name: name))
    last = f"model.layers.{model.num_layers}."
    names = {"model.norm.weight": f"{last}shared_head.norm.weight"}
    behind = _tensors(next_layer(model), lambda name: names.get(name, name.replace("model.layers.0.", last)))
    one = np.eye(num_words, dtype=np.float32)
    succeeded = np.roll(one, SUCCESSOR, axis=0)
    known = {"model.embed_tokens.weight": one, "lm_head.weight": succeeded}
    save_file(
        {**tensors, **dict(behind), **known, f"{last}eh_proj.weight": joined(one, succeeded)},
        folder / "model.safetensors",
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder


def _tensors(config: ModelConfig, named: Callable[[str], str]) -> Iterator[tuple[str, Array]]:
    random = np.random.default_rng(0)
    for name, pieces in placement_of(config)(config):
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        if name.endswith(ZEROS):
            yield named(name), np.zeros(shape, np.float32)
        elif len(shape) == 1:
            yield named(name), np.ones(shape, np.float32)
        else:
            yield named(name), random.standard_normal(shape, np.float32) * np.float32(0.1)


def _config(num_words: int) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": num_words,
        "hidden_size": num_words,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
