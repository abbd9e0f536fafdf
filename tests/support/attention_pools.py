"""Pools of two attention backends beside each other: what both compute and leave behind, step after step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import GraphAttention, PhasedAttention
from diptych.engine.attention.layer_constants import new_sinks
from diptych.engine.attention.staged_batch import stage
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.values.batch import ForwardBatch, ForwardMode

PAGE_SIZE = 4
NUM_PAGES = 64


class Pools:
    """One pool of a backend, one of the reference, with equal pages; requests grow in both."""

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        device: torch.device,
        new: Callable[[ModelConfig, Tensor, Tensor | None], GraphAttention],
        dtype: torch.dtype = torch.float32,
        tolerance: float = 2e-5,
    ) -> None:
        shape = (NUM_PAGES, config.num_layers, config.num_planes, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self._config = config
        self._device = device
        self.kv = [torch.zeros(shape, device=device).to(kv_dtype) for _ in range(2)]
        sinks = new_sinks(config, device)
        self.backend = new(config, self.kv[0], sinks)
        self._torch = TorchAttention(config, self.kv[1], dtype, sinks)
        if sinks is not None:  # as weights are: filled when backends have been built
            sinks.copy_(torch.linspace(-2.0, 4.0, sinks.numel()).view(sinks.shape))
        self._dtype = dtype
        self._tolerance = tolerance
        self._free = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()
        self._pages: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def extend(self, new_tokens: Mapping[str, int], mode: ForwardMode = ForwardMode.EXTEND) -> None:
        """Compare all layers of a step in which requests get so many tokens."""
        self.compare(self.batch(new_tokens, mode))

    def decode(self, requests: Sequence[str]) -> None:
        self.compare(self.batch(dict.fromkeys(requests, 1), ForwardMode.DECODE))

    def compare(self, host: ForwardBatch) -> None:
        batch = stage(host, self._device)
        backends = [PhasedAttention(backend, backend) for backend in (self.backend, self._torch)]
        for backend in backends:
            backend.init_forward_metadata(batch)
        for layer in range(self._config.num_layers):
            both = self.states(len(host.input_ids))
            for backend, (qkv, out) in zip(backends, both, strict=True):
                backend.attend(qkv, layer, out)
            torch.testing.assert_close(both[0][1], both[1][1], atol=self._tolerance, rtol=self._tolerance)
        assert torch.equal(*(kv.view(torch.uint8) for kv in self.kv))

    def states(self, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Twice the same random queries, keys and values, and a place for results."""
        out_size = self._config.num_heads * self._config.value_dim
        qkv = torch.randn(num_tokens, self._config.qkv_size, device=self._device).to(self._dtype)
        return [(qkv.clone(), qkv.new_full((num_tokens, out_size), torch.nan)) for _ in range(2)]

    def batch(self, new_tokens: Mapping[str, int], mode: ForwardMode) -> ForwardBatch:
        spans = [self._grow(request, count) for request, count in new_tokens.items()]
        width = max(len(self._pages[request]) for request in new_tokens)
        tables = [self._pages[request] + [0] * (width - len(self._pages[request])) for request in new_tokens]
        positions = [np.arange(*span) for span in spans]
        slots = [
            np.array(table)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for table, at in zip(tables, positions, strict=True)
        ]
        return ForwardBatch(
            mode=mode,
            input_ids=np.zeros(sum(new_tokens.values()), np.int64),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            page_table=np.array(tables, np.int32),
            seq_lens=np.array([end for _, end in spans]),
            extend_lens=np.array(list(new_tokens.values())),
            num_sampled=np.ones(len(spans), np.int64),
        )

    def _grow(self, request: str, count: int) -> tuple[int, int]:
        start = self._lens.get(request, 0)
        self._lens[request] = start + count
        pages = self._pages.setdefault(request, [])
        while len(pages) * PAGE_SIZE < start + count:
            pages.append(self._free.pop())
        return start, start + count
