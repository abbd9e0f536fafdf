"""Sparse attention by Triton kernels gives what references give, and leaves the same pool behind, step after step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from tiny_config import tiny_config
from torch import Tensor

from diptych.architectures.config import Indexer, Latent, Rope
from diptych.engine.attention.backend import AttentionBackend, PhasedAttention
from diptych.engine.attention.cpu_sparse_backend import CpuSparseAttention
from diptych.engine.attention.sparse_attention import SparseAttention
from diptych.engine.attention.staged_batch import StagedBatch, stage
from diptych.engine.runner.gpu.ladder import pad
from diptych.engine.runner.kv_pool import KV_DTYPES, region_views
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.kv_regions import kv_regions

CONFIG: Final = tiny_config(
    num_layers=3,
    num_heads=5,
    num_kv_heads=1,
    head_dim=48,
    rope=Rope(1e4, 16, start=32),
    query_scale=0.2,
    context_len=128,
    latent=Latent(8, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6),
    indexer=Indexer(6, 24, 3, interleaved=False, layers=(0, 2)),
)
PAGE_SIZE, NUM_PAGES = 4, 40


class Pool:
    """A pool of both regions, and what is computed on it."""

    def __init__(self, kind: str, device: torch.device, kv_dtype: str) -> None:
        from diptych.engine.attention.triton_sparse_backend import TritonSparseAttention

        regions = kv_regions(CONFIG, kv_dtype)
        cells = sum(int(np.prod(region.shape(PAGE_SIZE))) for region in regions)
        self.device = torch.device("cpu") if kind == "C" else device
        self.kv = torch.zeros(NUM_PAGES, cells, device=self.device).to(KV_DTYPES[kv_dtype])
        kept, index_keys = region_views(self.kv, regions)
        self.backend: AttentionBackend
        match kind:
            case "triton":
                self.backend = TritonSparseAttention(CONFIG, kept, index_keys)
            case "C":
                self.backend = CpuSparseAttention(CONFIG, kept, index_keys)
            case _:
                self.backend = SparseAttention(CONFIG, kept, index_keys, torch.float32)

    def run(self, host: ForwardBatch, states: list[Tensor]) -> list[Tensor]:
        """Compute all layers; `states`: `qkv` of each."""
        attention, outs = PhasedAttention(self.backend, self.backend), []
        attention.init_forward_metadata(stage(host, self.device))
        for layer, qkv in enumerate(states):
            out = torch.full((len(qkv), CONFIG.num_heads * CONFIG.value_dim), torch.nan, device=self.device)
            attention.attend(qkv.clone().to(self.device), layer, out)
            outs.append(out.cpu())
        return outs


class Requests:
    """They grow, on pages that lie anywhere."""

    def __init__(self) -> None:
        self._free = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()
        self._pages: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(self, new_tokens: Mapping[str, int], mode: ForwardMode) -> ForwardBatch:
        spans = [self._grow(request, count) for request, count in new_tokens.items()]
        width = max(len(self._pages[request]) for request in new_tokens)
        tables = np.array([self._pages[request] + [0] * (width - len(self._pages[request])) for request in new_tokens])
        positions = [np.arange(*span) for span in spans]
        slots = [
            table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for table, at in zip(tables, positions, strict=True)
        ]
        return ForwardBatch(
            mode=mode,
            input_ids=np.zeros(sum(new_tokens.values()), np.int64),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            page_table=tables.astype(np.int32),
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


def states_of(num_tokens: int) -> list[Tensor]:
    return [torch.randn(num_tokens, CONFIG.qkv_size) for _ in range(CONFIG.num_layers)]


def steps() -> Iterator[ForwardBatch]:
    """Some see no more than is kept, some are longer; a prompt crosses that."""
    requests = Requests()
    yield requests.step({"a": 5, "b": 2}, ForwardMode.EXTEND)
    yield requests.step({"b": 1, "a": 2, "c": 4}, ForwardMode.MIXED)
    yield requests.step({"a": 1, "b": 1, "c": 1}, ForwardMode.DECODE)
    yield requests.step({"c": 1}, ForwardMode.DECODE)


@pytest.mark.parametrize(("reference", "kv_dtype"), [("torch", "float32"), ("C", "fp8_e4m3")])
def test_prompts_in_parts_mixed_steps_and_single_tokens_are_as_in_the_reference(
    reference: str, kv_dtype: str, device: torch.device
) -> None:
    ours, theirs = Pool("triton", device, kv_dtype), Pool(reference, device, kv_dtype)
    for host in steps():
        states = states_of(len(host.positions))
        for found, expected in zip(ours.run(host, states), theirs.run(host, states), strict=True):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert torch.equal(ours.kv.cpu().view(torch.uint8), theirs.kv.cpu().view(torch.uint8))


def test_a_step_has_the_same_bits_when_scores_are_made_of_few_rows_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diptych.engine.attention.triton_sparse_backend as module

    whole = Pool("triton", device, "float32")
    monkeypatch.setattr(module, "SCORES", 2 * 128)  # of two rows
    cut = Pool("triton", device, "float32")
    for host in itertools.islice(steps(), 1):
        states = states_of(len(host.positions))
        for found, expected in zip(cut.run(host, states), whole.run(host, states), strict=True):
            assert torch.equal(found, expected)


def test_a_token_of_a_prompt_has_the_same_bits_however_it_is_cut(device: torch.device) -> None:
    states = states_of(7)
    pools, outs = [Pool("triton", device, "float32") for _ in range(2)], []
    for pool, chunks in zip(pools, [(7,), (2, 1, 4)], strict=True):
        requests, at, found = Requests(), 0, []
        for chunk in chunks:
            host = requests.step({"a": chunk}, ForwardMode.EXTEND)
            found.append(torch.stack(pool.run(host, [qkv[at : at + chunk] for qkv in states])))
            at += chunk
        outs.append(torch.cat(found, dim=1))
    assert torch.equal(*outs)


def padded(host: ForwardBatch, rows: int, device: torch.device) -> StagedBatch:
    return stage(pad(host, rows), device)


def test_recorded_steps_keep_their_room_while_larger_ones_come(device: torch.device) -> None:
    """What a graph reads lies where it lay, and a step of fewer rows may use what was made for more."""
    from diptych.engine.attention.triton_sparse_backend import TritonSparseAttention

    pool, requests = Pool("triton", device, "float32"), Requests()
    assert isinstance(pool.backend, TritonSparseAttention)
    host = requests.step({"a": 1}, ForwardMode.DECODE)
    found = []
    for rows in (1, 4, 2):
        pool.backend.capture_metadata(padded(host, rows, device))
        assert pool.backend._step is not None
        found.append((pool.backend._step.chosen, pool.backend._step.rows.requests))
    small, large, within = ([each.data_ptr() for each in pair] for pair in found)
    assert small != large == within
    assert [len(room.requests) for room in pool.backend._decode_rows] == [1, 4]


def test_rows_of_padding_read_and_store_nothing_and_give_zeros(device: torch.device) -> None:
    from diptych.engine.attention.triton_sparse_backend import TritonSparseAttention

    pool, requests = Pool("triton", device, "float32"), Requests()
    assert isinstance(pool.backend, TritonSparseAttention)
    host = requests.step({"a": 5}, ForwardMode.EXTEND)
    pool.run(host, states_of(5))
    host = requests.step({"a": 1}, ForwardMode.DECODE)
    batch, before = padded(host, 2, device), pool.kv.clone()
    pool.backend.capture_metadata(batch)
    pool.backend.replay_metadata(batch)
    out = torch.full((2, CONFIG.num_heads * CONFIG.value_dim), torch.nan, device=device)
    pool.backend.forward_decode(torch.randn(2, CONFIG.qkv_size, device=device), 0, out)
    assert not out[1].any()
    assert out[0].isfinite().all()
    changed = (pool.kv != before).nonzero()
    assert {*changed[:, 0].tolist()} == {int(host.page_table[0, -1])}
    assert len(changed) == CONFIG.head_dim + 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("device")
def test_a_recorded_step_computes_what_is_there_when_it_is_replayed() -> None:
    from diptych.engine.attention.triton_sparse_backend import TritonSparseAttention

    device = torch.device("cuda")
    pool, requests = Pool("triton", device, "float32"), Requests()
    assert isinstance(pool.backend, TritonSparseAttention)
    pool.run(requests.step({"a": 19, "b": 2}, ForwardMode.EXTEND), states_of(21))
    table = torch.zeros(2, 5, dtype=torch.int32, device=device)  # as wide as "a" has become
    batch = replace(padded(requests.step({"b": 1}, ForwardMode.DECODE), 2, device), page_table=table)
    qkv, out = (torch.zeros(2, size, device=device) for size in (CONFIG.qkv_size, CONFIG.num_heads * CONFIG.value_dim))
    pool.backend.capture_metadata(batch)
    pool.backend.forward_decode(qkv.clone(), 0, out)
    graph, states = torch.cuda.CUDAGraph(), qkv.clone()
    with torch.cuda.graph(graph):
        pool.backend.forward_decode(states, 0, out)
    later = padded(requests.step({"a": 1, "b": 1}, ForwardMode.DECODE), 2, device)
    for name in ("positions", "out_slots", "seq_lens"):
        getattr(batch, name).copy_(getattr(later, name))
    table.copy_(later.page_table)
    new = torch.randn_like(qkv)
    states.copy_(new)
    before = pool.kv.clone()
    graph.replay()
    replayed = out.clone()
    pool.kv.copy_(before)
    pool.backend.forward_decode(new.clone(), 0, out)
    assert torch.equal(replayed, out)
