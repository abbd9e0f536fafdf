"""Every model family against transformers: random weights, saved by transformers, read from the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from diptych.engine.loader.source import open_model

NewDriver = Callable[..., Any]
LENGTHS = [1, 2, 15, 16, 17, 40, 65, 150]
NUM_OUTPUTS = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that neighbouring logits are far apart
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [1.5, 2, 3, 4, 5, 6]}
MOE = {"num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 64}),
    "llama, tied, one KV head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, linear rope": ("Llama", {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 32}),
    "llama, yarn with mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama, yarn not truncated": ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16}}),
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 64}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with late windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "gemma2": ("Gemma2", {"head_dim": 96, "sliding_window": 24, "query_pre_attn_scalar": 50}),
    "gemma2 without caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"head_dim": 256, "sliding_window": 33, "query_pre_attn_scalar": 64}),
    "gemma3, pattern and stretched": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": PLAIN,
            },
        },
    ),
    "phi3": ("Phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}, "sliding_window": 40}),
    "phi3, short": ("Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75}, "original_len": 256}),
    "mixtral": ("Mixtral", {"num_local_experts": 4} | MOE),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 48, "head_dim": 16} | MOE),
    "qwen3 moe, normalised, some layers dense": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1]} | MOE,
    ),
}


def save(folder: Path, case: str, shard: str = "5GB") -> Any:
    """Save a random model; norms and biases are random as well. Return it."""
    family, changes = CASES[case]
    torch.manual_seed(0)
    original_len = changes.get("original_len")
    settings = SHAPE | {key: value for key, value in changes.items() if key != "original_len"}
    if original_len:
        settings |= {"original_max_position_embeddings": original_len}
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, SHAPE["vocab_size"], length).tolist() for length in LENGTHS]


def continued(model: Any, text: list[int]) -> tuple[list[int], Tensor]:
    """Return the prompt with its greedy continuation, and the logits of all tokens."""
    tokens = list(text)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUTS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens, model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_each_family_has_the_logits_and_the_tokens_of_transformers(
    new_driver: NewDriver, tmp_path: Path, case: str
) -> None:
    """Whole prompts, then decode; prompts in chunks after a prefix; several requests a step. Both backends."""
    model = save(tmp_path, case, "100KB")
    source, texts = open_model(str(tmp_path)), prompts()
    expected = [continued(model, text) for text in texts]
    for backend in ("cpu", "torch"):
        driver = new_driver(source, backend)
        logits = driver.extend(dict(enumerate(texts)))
        for step in range(NUM_OUTPUTS):
            at = [length + step for length in LENGTHS]
            torch.testing.assert_close(
                logits, torch.stack([e[1][i - 1] for e, i in zip(expected, at, strict=True)]), atol=1e-3, rtol=1e-4
            )
            chosen = logits.argmax(-1).tolist()
            assert chosen == [tokens[i] for (tokens, _), i in zip(expected, at, strict=True)]
            logits = driver.decode(dict(enumerate(chosen)))
        long = range(3, len(texts))
        chunked = new_driver(source, backend)
        for start, end in ((0, 7), (7, 8), (8, 15), (15, None)):
            logits = chunked.extend({i: expected[i][0][start:end] for i in long})
        torch.testing.assert_close(logits, torch.stack([expected[i][1][-1] for i in long]), atol=1e-3, rtol=1e-4)
