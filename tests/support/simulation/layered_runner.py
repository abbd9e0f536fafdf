"""The null runner over pages of several layers: it tells when each layer is computed, and attends to all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from null_runner import NullRunner, entries, next_token

from diptych.common.arrays import U64
from diptych.engine.values.batch import ForwardBatch, OnLayer
from simulation.requests import LAYERS, VOCAB


class LayeredRunner(NullRunner):
    """Over `[num_pages, LAYERS, page_size]`. Layer `i` of a token's KV is its entry plus `i`.

    `meanwhile` is called before each layer: what others do while a step runs.
    """

    def __init__(
        self,
        kv: U64,
        layer_listener: Callable[[], OnLayer | None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(kv[:, 0], VOCAB)
        self._meanwhile = meanwhile
        self._kv = kv
        self._layer_listener = layer_listener

    def logits(self, batch: ForwardBatch) -> list[int]:
        pages, offsets = np.divmod(batch.out_slots, self._kv.shape[-1])
        fresh, on_layer = entries(batch.input_ids, batch.positions), self._layer_listener()
        for layer in range(LAYERS):
            self._meanwhile()
            self._kv[pages, layer, offsets] = fresh + np.uint64(layer)
            if on_layer is not None:
                on_layer(layer)
        return self._next_tokens(batch)

    def _next_token(self, pages: np.ndarray[tuple[int], np.dtype[np.int32]], seq_len: int) -> int:
        positions = np.arange(seq_len)
        size = self._kv.shape[-1]
        kv = self._kv[pages[positions // size], :, positions % size]
        wrong = (kv - kv[:, :1] - np.arange(LAYERS, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        return next_token(kv[:, 0] + wrong, VOCAB)
