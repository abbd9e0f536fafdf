"""What the model asks of attention: rotate, store, attend, one layer at a time.

Rotary embedding is the backend's work because rotating and storing a key is one pass over it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from diptych.engine.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Owns no memory but its tables; reads and writes the KV pool it was built on."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of the step share."""
        ...

    def attend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """Rotate queries and keys, write keys and values to their slots, attend to what the layer sees of the past.

        `qkv`: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, queries, keys, values; it may be overwritten.
        `out`: `[num_tokens, num_heads * head_dim]`.
        """
        ...
