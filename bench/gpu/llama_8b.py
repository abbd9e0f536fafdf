"""The model that GPUs are measured with: Llama-3-8B by shape, with made-up weights in bfloat16."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from model_cost import decode_flops, kv_numbers, layer_weights, output_weights
from roofline import Roofline

from diptych.architectures.config import ModelConfig

CONTEXT_LEN: Final = 16384
PROMPT_LEN: Final = 4096  # of prefill
DECODE_CASES: Final = ((1, 1024), (8, 1024), (64, 4096))  # requests, tokens of each
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": CONTEXT_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}


@contextmanager
def model_folder(config: dict[str, Any] = CONFIG) -> Iterator[Path]:
    """Yield a folder that `--load-format dummy` takes. It has no tokenizer: a token is its number, written out."""
    with tempfile.TemporaryDirectory(prefix="llama-8b-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def decode_limit_s(
    limits: Roofline, config: ModelConfig, batch_size: int, context: int, kv_nbytes: int = 2, weight_nbytes: float = 2
) -> float:
    """How long a decode step must take: weights and KV read once, or its arithmetic; `weight_nbytes`: of layers."""
    cached = batch_size * context
    weights = weight_nbytes * layer_weights(config) + 2 * output_weights(config)
    nbytes = weights + kv_nbytes * kv_numbers(config, cached)
    return limits.seconds(nbytes, decode_flops(config, batch_size, cached))
