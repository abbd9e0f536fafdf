"""What a model without experts must compute and read, whatever the implementation."""

from __future__ import annotations

from diptych.architectures.config import ModelConfig


def layer_weights(config: ModelConfig) -> int:
    """Entries of the layers' matrices."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    return config.num_layers * (attention + 3 * config.hidden_size * config.ffn_size)


def output_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def kv_numbers(config: ModelConfig, num_tokens: int) -> int:
    """Keys and values of so many tokens."""
    return 2 * num_tokens * config.num_layers * config.num_kv_heads * config.head_dim


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Multiplications and additions of the layers' matrices and of causal attention; one row of logits."""
    attention = 2 * num_tokens**2 * config.num_heads * config.head_dim * config.num_layers
    return 2 * num_tokens * layer_weights(config) + attention + 2 * output_weights(config)


def decode_flops(config: ModelConfig, batch_size: int, num_cached_tokens: int) -> float:
    """Count the operations of one new token a request; `num_cached_tokens` is that of all of them together."""
    attention = 4 * num_cached_tokens * config.num_heads * config.head_dim * config.num_layers
    return 2 * batch_size * (layer_weights(config) + output_weights(config)) + attention
