"""What the model asks of attention: rotate, store, attend, one layer at a time.

Rotary embedding is the backend's work because rotating and storing a key is one pass over it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.values.batch import ForwardMode


class LatentHeads(Protocol):
    """What the heads of a layer make of latents, `[num_keys, rank]`."""

    def keys_of(self, latents: Tensor, out: Tensor) -> None:
        """`out`: `[num_heads, num_keys, nope_dim]`, contiguous."""
        ...

    def values_of(self, latents: Tensor, out: Tensor) -> None:
        """`out`: `[num_heads, num_keys, value_dim]`, contiguous."""
        ...


class AttentionBackend(Protocol):
    """Owns no memory but its tables and workspaces; reads and writes the KV pool it was built on.

    Both passes rotate queries and keys, write keys and values to their slots, and attend to what the layer sees of the
    past. `qkv`: `[num_tokens, (num_heads + num_planes * num_kv_heads) * head_dim]`, queries, keys, values; it may be
    overwritten. A layer that borrows keys and values is given queries alone, stores nothing, and attends to what an
    earlier layer has stored. `out`: `[num_tokens, num_heads * value_dim]`. On a GPU they only queue work on the current
    stream.
    With one plane there are no values: they are the first `value_dim` dimensions of the keys, before those that rotate.
    """

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        """Prepare what all layers of the step share."""
        ...

    def forward_extend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """Requests have any number of new tokens."""
        ...

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """Each request has a row: one new token, and its drafts. A GPU is given rows of one token only: `single_rows`.

        Each token is computed as it would be alone, once the keys and values of all tokens of its row are stored.
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be recorded in CUDA graphs, one a batch size."""

    def capture_metadata(self, batch: StagedBatch) -> None:
        """In place of `init_forward_metadata`, before `forward_decode` is recorded for so many rows.

        The graph reads the tensors of `batch`, at the addresses that they have now, in every replay. `page_table` is
        as wide as a request can become; what the tensors hold now decides nothing.
        """
        ...

    def replay_metadata(self, batch: StagedBatch) -> None:
        """Before a replay: the recorded tensors, those of `batch`, hold the step that is to be computed."""
        ...


@runtime_checkable
class DecompressingAttention(AttentionBackend, Protocol):
    """A backend that can attend to keys and values which a layer makes of latents."""

    @property
    def decompresses(self) -> bool:
        """Whether that takes fewer operations in the step that was prepared last."""
        ...

    def forward_decompressed(self, qkv: Tensor, layer: int, out: Tensor, heads: LatentHeads) -> None:
        """Do as `forward_extend` does. Queries have their first `nope_dim` numbers as they were made.

        `out`: `[num_tokens, num_heads, value_dim]`, values in place of latents.
        """
        ...


class PhasedAttention:
    """Attends by one backend in decode steps, and by the same or another one in all others."""

    def __init__(
        self, extend: AttentionBackend, decode: AttentionBackend, graphs: GraphAttention | None = None
    ) -> None:
        """`graphs` is `decode` again, if its steps can be recorded."""
        self._extend = extend
        self._decode = decode
        self._graphs = graphs
        self._prompts = extend if isinstance(extend, DecompressingAttention) else None
        self._forward = extend.forward_extend
        self.decompresses = False  # `attend_decompressed` is better for the step that was prepared last

    @property
    def is_recordable(self) -> bool:
        """Whether decode steps can be recorded: `capture_metadata` and `replay_metadata` may be called."""
        return self._graphs is not None

    def of(self, mode: ForwardMode) -> AttentionBackend:
        """Return the backend of such steps."""
        return self._decode if mode is ForwardMode.DECODE else self._extend

    def init_forward_metadata(self, batch: StagedBatch) -> None:
        backend, is_decode = self.of(batch.host.mode), batch.host.mode is ForwardMode.DECODE
        backend.init_forward_metadata(batch)
        self._forward = backend.forward_decode if is_decode else backend.forward_extend
        self.decompresses = not is_decode and self._prompts is not None and self._prompts.decompresses

    def capture_metadata(self, batch: StagedBatch) -> None:
        """See `GraphAttention`."""
        assert self._graphs is not None, "not recordable"
        self._graphs.capture_metadata(batch)
        self.decompresses = False
        self._forward = self._graphs.forward_decode

    def replay_metadata(self, batch: StagedBatch) -> None:
        """See `GraphAttention`."""
        assert self._graphs is not None, "not recordable"
        self._graphs.replay_metadata(batch)

    def attend(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        """Compute a layer of the step that was prepared last."""
        self._forward(qkv, layer, out)

    def attend_decompressed(self, qkv: Tensor, layer: int, out: Tensor, heads: LatentHeads) -> None:
        """Compute a layer of a step that `decompresses`."""
        assert self._prompts is not None, "not of latents"
        self._prompts.forward_decompressed(qkv, layer, out, heads)
