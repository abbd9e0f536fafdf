"""Drives a model runner as a scheduler would: requests on scattered pages, batches of chunks or of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import transformers
from kernel_device import device
from thread_ranks import Meeting, ThreadCommunicator
from torch import Tensor

from diptych.checkpoints.quantization.weight import expanded
from diptych.checkpoints.source import ModelSource
from diptych.common.arrays import I64
from diptych.engine.runner.kv_pool import KV_DTYPES
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, StateMoves, WindowGroups
from diptych.engine.values.kv_regions import pages_per_state, window_pages

__all__ = ["device"]

PAGE_SIZE = 16
MAX_REQUESTS = 128
MAX_ROW = 6


class Driver:
    """A runner with its pool. Requests are numbered; `tokens` holds what each has computed so far.

    Pages that no window sees any more are overwritten at once, and may be another request's next.
    """

    def __init__(
        self,
        source: ModelSource,
        backend: str,
        dtype: str,
        num_pages: int,
        max_loras: int,
        quantization: str,
        communicator: Communicator | None,
        kv_dtype: str,
        device: str,
        *,
        deterministic: bool = False,
        expert_parallel: bool = False,
    ) -> None:
        config = ModelPart.of(source, communicator).config
        self._windows, self._num_groups = window_pages(config, num_pages), len(config.page_groups)
        num_pages *= self._num_groups
        layout = ModelRunner.pool_layout(config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=kv_dtype)
        self.kv = torch.full(layout.shape, torch.nan, device=device).to(KV_DTYPES[kv_dtype])
        self._garbage = self.kv[0].clone()
        self.runner = ModelRunner(
            source,
            self.kv,
            dtype=dtype,
            quantization=quantization,
            attention_backend=backend,
            max_loras=max_loras,
            max_requests=MAX_REQUESTS,
            row_tokens=MAX_ROW,
            communicator=communicator,
            deterministic=deterministic,
            expert_parallel=expert_parallel,
        )
        self._pages_per_state = pages_per_state(source.config, communicator.size if communicator else 1, dtype, layout)
        self.adapters: dict[int, int] = {}  # slot of a request's adapter
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._pages: dict[int, list[list[int]]] = {}  # of each token page, one of each group
        self._num_freed: dict[int, int] = {}  # token pages
        self._lens: dict[int, int] = {}
        self._late: dict[int, int] = {}

    def extend(self, chunks: Mapping[int, list[int]]) -> Tensor:
        """Compute a chunk of each request; return the logits of the last token of each."""
        return self.runner.logits(self.batch(ForwardMode.EXTEND, chunks))

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """Compute one token of each request; return its logits."""
        return self.runner.logits(self.batch(ForwardMode.DECODE, {row: [token] for row, token in tokens.items()}))

    def verify(self, rows: Mapping[int, list[int]]) -> Tensor:
        """Compute a row of each request; return the logits behind each token. `keep` says then what came true."""
        batch = self.batch(ForwardMode.DECODE, rows)
        return self.runner.logits(replace(batch, num_sampled=batch.extend_lens))

    def keep(self, request: int, num_true: int, row: list[int]) -> None:
        """The first tokens of a request's row came true; the others were not said."""
        self._lens[request] -= len(row) - num_true
        if len(row) > 1:
            self._late[request] = num_true

    @staticmethod
    def greedy(num_samples: int) -> SamplingBatch:
        zeros = np.zeros(num_samples, np.int64)
        return SamplingBatch(
            temperature=np.zeros(num_samples, np.float32),
            top_p=np.ones(num_samples, np.float32),
            top_k=zeros,
            seeds=zeros.astype(np.uint64),
            positions=zeros,
        )

    def forget(self, request: int) -> None:
        num_freed, pages = self._num_freed.pop(request, 0), self._pages.pop(request)
        self._free += [each[0] for each in pages[:num_freed]] + [page for each in pages[num_freed:] for page in each]
        del self._lens[request]
        self._late.pop(request, None)

    def batch(self, mode: ForwardMode, chunks: Mapping[int, list[int]]) -> ForwardBatch:
        starts = {request: self._lens.get(request, 0) for request in chunks}
        for request, tokens in chunks.items():
            if self._num_groups > 1:
                self._free_windows(request, starts[request])
            self._grow(request, starts[request] + len(tokens))
        width = max(len(self._pages[request]) for request in chunks)
        tables = np.zeros((self._num_groups, len(chunks), width), np.int32)
        for row, request in enumerate(chunks):
            tables[:, row, : len(self._pages[request])] = self._table(request)
        spans = [(request, starts[request], self._lens[request]) for request in chunks]
        slots = np.ascontiguousarray(np.concatenate([self._slots(*span) for span in spans], axis=1))
        return ForwardBatch(
            mode=mode,
            input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in chunks.values()]),
            positions=np.concatenate([np.arange(start, end) for _, start, end in spans]),
            out_slots=slots[0],
            page_table=tables[0],
            seq_lens=np.array([end for _, _, end in spans]),
            extend_lens=np.array([end - start for _, start, end in spans]),
            num_sampled=np.ones(len(chunks), np.int64),
            states=self._states(starts) if self._pages_per_state else None,
            adapters=np.array([self.adapters.get(request, -1) for request in chunks]) if self.adapters else None,
            window_groups=WindowGroups(tables[1:], slots[1:]) if self._num_groups > 1 else None,
        )

    def _states(self, starts: Mapping[int, int]) -> StateMoves:
        """A request's slot has another number; those that begin are cleared."""
        slots = np.array([request + 1 for request in starts])
        none, pages = np.zeros(0, np.int64), np.zeros((0, self._pages_per_state), np.int32)
        late = np.array([self._late.pop(request, 0) for request in starts])
        return StateMoves(slots, slots[np.array(list(starts.values())) == 0], none, pages, none, pages, late)

    def _grow(self, request: int, num_tokens: int) -> None:
        pages = self._pages.setdefault(request, [])
        while len(pages) * PAGE_SIZE < num_tokens:
            pages.append([self._free.pop() for _ in range(self._num_groups)])
        self._lens[request] = num_tokens

    def _free_windows(self, request: int, num_tokens: int) -> None:
        begin, end = self._num_freed.get(request, 0), self._windows.live_from(num_tokens) // PAGE_SIZE
        for page in [page for each in self._pages.get(request, [])[begin:end] for page in each[1:]]:
            self.kv[page] = self._garbage
            self._free.insert(0, page)
        self._num_freed[request] = end

    def _table(self, request: int) -> I64:
        """Return `[num_groups, num_pages]`. For pages that are freed stands the newest one, which may not be full."""
        table = np.array(self._pages[request]).T.copy()
        table[1:, : self._num_freed.get(request, 0)] = table[1:, -1:]
        return table

    def _slots(self, request: int, start: int, end: int) -> I64:
        """Return `[num_groups, end - start]`."""
        positions = np.arange(start, end)
        return np.array(self._pages[request]).T[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


NewDriver = Callable[..., Driver]
T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Any], T], *sums: Any, **others: Any) -> T:
    """Run `work` on every rank, each in a thread; return what rank 0 returns. See `ThreadCommunicator`."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadCommunicator(rank, meeting, *sums, **others))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return next(iter(pool.map(run, range(size))))


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., Any]:
    """`on_ranks(size, work, rule=None, fuses=False)`."""
    return run_ranks


@pytest.fixture(scope="session")
def new_driver() -> NewDriver:
    """`new_driver(source, backend="cpu", dtype="float32", num_pages=64, max_loras=0, quantization="auto", ...)`."""

    def build(
        source: ModelSource,
        backend: str = "cpu",
        dtype: str = "float32",
        num_pages: int = 64,
        max_loras: int = 0,
        quantization: str = "auto",
        communicator: Communicator | None = None,
        kv_dtype: str | None = None,
        device: str = "cpu",
        *,
        deterministic: bool = False,
        expert_parallel: bool = False,
    ) -> Driver:
        where = kv_dtype or dtype, device
        sizes = num_pages, max_loras
        return Driver(
            source,
            backend,
            dtype,
            *sizes,
            quantization,
            communicator,
            *where,
            deterministic=deterministic,
            expert_parallel=expert_parallel,
        )

    return build


@pytest.fixture(scope="session")
def small_reference(small_model: ModelSource) -> Any:
    """The small model in transformers, float32."""
    config = small_model.config
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        max_position_embeddings=config.context_len,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(theirs)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    for name, array in expanded(small_model.tensors()):
        model.get_parameter(name).data.copy_(torch.from_numpy(array))
    model.tie_weights()
    return model.eval()
