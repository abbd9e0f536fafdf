"""Whether so many ranks can share a model evenly: its heads and columns, its experts, or its networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig


def check_experts(model: ModelConfig, size: int) -> None:
    """Raise `ConfigError` unless each of `size` ranks gets experts of the model."""
    if model.moe is None:
        raise ConfigError(f"{model.model_id} has no experts: leave out --expert-parallel")
    if model.moe.num_experts < size:
        words = f"{model.moe.num_experts} experts of {model.model_id} are fewer than the {size} ranks that share them"
        raise ConfigError(f"the {words}: leave out --expert-parallel and --dp-attention, or give fewer")


def check_shared(model: ModelConfig, num_ranks: int) -> None:
    """Raise `ConfigError` unless the ranks of schedulers with attention of their own can share all else.

    That is experts, or in a model without them the columns of its feed-forward networks.
    """
    if model.encoder is not None:
        raise ConfigError(f"--dp-attention is not for encoders, and {model.model_id} is one: leave it out")
    if model.has_experts:
        check_experts(model, num_ranks)
        return
    for number in (model.ffn_size, model.borrowing_ffn_size):
        if number % num_ranks:
            words = f"{num_ranks} ranks do not divide the {number} feed-forward columns of {model.model_id}"
            raise ConfigError(f"{words}, which --dp-attention shares: give another --dp or --tp, or leave it out")


def check_divides(model: ModelConfig, size: int) -> None:
    """Raise `ConfigError` unless `size` ranks can share the model evenly."""
    if model.encoder is not None and size > 1:
        raise ConfigError(f"--tp {size} is not for encoders, and {model.model_id} is one: give --tp 1 and more workers")
    parts = {"attention heads": model.num_heads, "feed-forward columns": model.ffn_size}
    if model.moe is not None:
        parts["columns of an expert"] = model.moe.ffn_size
        parts["columns of a shared expert"] = model.moe.shared_ffn_size
    if model.recurrent is not None:
        parts |= model.recurrent.mixer.heads
    for what, number in parts.items():
        if number % size:
            raise ConfigError(f"--tp {size} does not divide the {number} {what} of {model.model_id}")
    for kv_heads in (model.num_kv_heads, *([model.wide.num_kv_heads] if model.wide else [])):
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"--tp {size} neither divides the {kv_heads} KV heads of {model.model_id} nor is a multiple of them"
            )
