"""Paged attention against float64, over page edges, head shapes and garbage in unused slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, PagedAttention, Tokens

I64 = npt.NDArray[np.int64]
NUM_LAYERS, LAYER = 3, 1
HEADS = [
    Heads(1, 1, 64),
    Heads(6, 3, 64),
    Heads(9, 3, 64),
    Heads(8, 1, 64),
    Heads(4, 2, 128),
    Heads(7, 1, 128),
    Heads(4, 2, 32),
    Heads(4, 4, 256),
    Heads(6, 2, 16),
    Heads(2, 1, 80),
    Heads(3, 1, 96),
    Heads(2, 2, 6),
    Heads(4, 1, 48, 32),
    Heads(9, 1, 576, 512),
    Heads(5, 1, 44, 30),
]
PAGE_SIZES = [1, 3, 16, 64, 100]


@dataclass(frozen=True)
class Kind:
    """What layers differ in."""

    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    scale: float = 0.125
    rotated: float = 1.0  # part of a head
    sinks: bool = False
    block: int = 0  # positions are cut into blocks of so many, whose tokens see each other; 0: none sees one behind it


PLAIN = Kind()
KINDS = [
    *(Kind(window=1), Kind(window=7), Kind(window=64), Kind(window=70, softcap=5.0), Kind(rotated=0.5, scale=0.2)),
    *(Kind(sinks=True), Kind(window=7, sinks=True)),
    *(Kind(window=1, chunked=True), Kind(window=7, chunked=True), Kind(window=64, chunked=True)),
    *(Kind(window=70, chunked=True, softcap=5.0), Kind(chunked=True)),
]
KIND_HEADS = [Heads(9, 3, 64), Heads(4, 2, 256), Heads(2, 1, 80), Heads(2, 2, 12), Heads(4, 1, 48, 32)]


class Pool:
    """Requests on scattered pages of a pool full of NaN, so that a read of an unused slot shows.

    So are the tokens behind all windows of a step: their pages may be others' by then.
    """

    def __init__(self, heads: Heads, page_size: int, seq_lens: list[int], kind: Kind = PLAIN) -> None:
        self.kind, self.heads, self.page_size, self.seq_lens = kind, heads, page_size, seq_lens
        self.generator = torch.Generator().manual_seed(0)
        num_pages = [-(-seq_len // page_size) for seq_len in seq_lens]
        scattered = torch.randperm(sum(num_pages) + 3, generator=self.generator).numpy().astype(np.int32)
        self.page_table = np.zeros((len(seq_lens), max(num_pages) + 1), np.int32)
        for row, count in enumerate(num_pages):
            self.page_table[row, :count], scattered = scattered[:count], scattered[count:]
        shape = (sum(num_pages) + 3, NUM_LAYERS, heads.num_planes, page_size, heads.num_kv_heads, heads.head_dim)
        self.kv = torch.full(shape, torch.nan)
        self.start = heads.latent_dim or 0  # what is behind a latent rotates
        half = int((heads.head_dim - self.start) * kind.rotated) // 2
        self.rope = torch.randn(max(seq_lens), 2, half, generator=self.generator)
        self.sinks = torch.linspace(-3.0, 5.0, heads.num_heads) if kind.sinks else None
        options: Any = {"rope_start": self.start, "window": kind.window, "chunked": kind.chunked}
        options |= {"softcap": kind.softcap, "sinks": self.sinks}
        self.layer = AttentionLayer(LAYER, self.rope, scale=kind.scale, **options)

    def run(self, new_lens: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the last `new_lens` tokens of each request on random earlier KV; return results and expected ones."""
        heads, dim = self.heads, self.heads.head_dim
        qkv = torch.randn(sum(new_lens), heads.num_states * dim, generator=self.generator)
        expected = self._expected(qkv.double().view(sum(new_lens), -1, dim), new_lens)
        out = torch.full((sum(new_lens), heads.num_heads * heads.value_dim), torch.nan)
        step = PagedAttention(heads, self.kv, self._tokens(new_lens))
        (step.decode if set(new_lens) == {1} else step.extend)(qkv, self.layer, out)
        return out, expected.flatten(1)

    def slots(self, row: int, start: int) -> I64:
        """Return the slots of a request's tokens from `start` on."""
        positions = np.arange(start, self.seq_lens[row])
        pages: I64 = self.page_table[row, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def _tokens(self, new_lens: list[int]) -> Tokens:
        spans = list(zip(self.seq_lens, new_lens, strict=True))
        return Tokens(
            positions=np.concatenate([np.arange(seq_len - new, seq_len) for seq_len, new in spans]),
            out_slots=np.concatenate([self.slots(row, seq_len - new) for row, (seq_len, new) in enumerate(spans)]),
            extend_lens=np.array(new_lens),
            page_table=self.page_table,
            seen_ends=self._ends(new_lens) if self.kind.block else None,
        )

    def _ends(self, new_lens: list[int]) -> I64:
        """The last block ends where its request does."""
        block, spans = self.kind.block, zip(self.seq_lens, new_lens, strict=True)
        ends = [np.minimum((np.arange(end - new, end) // block + 1) * block, end) for end, new in spans]
        return np.concatenate(ends)

    def _expected(self, states: Tensor, new_lens: list[int]) -> Tensor:
        results = []
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        for row, (seq_len, new) in enumerate(zip(self.seq_lens, new_lens, strict=True)):
            mine, states = states[:new], states[new:]
            cos, sin = self.rope[seq_len - new : seq_len].double().unsqueeze(2).unbind(1)
            edges = [self.start, self.start + 2 * cos.shape[-1]]
            before, turning, rest = mine[:, : num_heads + num_kv_heads].tensor_split(edges, dim=-1)
            first, second = turning.chunk(2, dim=-1)
            rotated = torch.cat((before, first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
            new_kv = torch.cat((rotated[:, num_heads:], mine[:, num_heads + num_kv_heads :]), dim=1)
            new_kv = new_kv.view(new, -1, num_kv_heads, self.heads.head_dim)
            kv = torch.cat((self._write_earlier(row, seq_len - new), new_kv))
            kept = kv.repeat_interleave(num_heads // num_kv_heads, dim=2)
            keys, values = kept[:, 0], kept[:, -1, :, : self.heads.value_dim]
            scores = torch.einsum("qhd,khd->hqk", rotated[:, :num_heads], keys) * self.kind.scale
            if self.kind.softcap:
                scores = self.kind.softcap * torch.tanh(scores / self.kind.softcap)
            seen = torch.ones(new, seq_len, dtype=torch.bool).tril(seq_len - new)
            if self.kind.block:
                blocks = torch.arange(seq_len) // self.kind.block
                seen |= blocks[seq_len - new :, None] == blocks
            if self.kind.window and self.kind.chunked:
                chunks = torch.arange(seq_len) // self.kind.window
                seen &= chunks[seq_len - new :, None] == chunks
            elif self.kind.window:
                seen = seen.triu(seq_len - new + 1 - self.kind.window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, new, 1)], dim=-1)
            weights = scores.softmax(-1)[..., :seq_len]
            results.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(results)

    def _write_earlier(self, row: int, count: int) -> Tensor:
        """Fill the pool with `count` tokens of a request, `[count, num_planes, num_kv_heads, head_dim]`."""
        kept = (self.heads.num_planes, self.heads.num_kv_heads, self.heads.head_dim)
        kv = torch.randn(count, *kept, generator=self.generator)
        slots, window, first = torch.from_numpy(self.slots(row, 0)[:count]), self.kind.window, 0
        if window:
            first = count // window * window if self.kind.chunked else max(0, count + 1 - window)
        slots = slots[first:]
        self.kv[slots // self.page_size, LAYER, :, slots % self.page_size] = kv[first:]
        return kv.double()


@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 2, 256), Heads(2, 1, 80), Heads(2, 2, 6)])
@pytest.mark.parametrize("kind", [Kind(block=5), Kind(block=70), Kind(block=33, window=20), Kind(block=100, window=70)])
def test_tokens_see_others_of_their_block_also_behind_them(heads: Heads, kind: Kind) -> None:
    """Chunks begin inside a block; blocks are larger and smaller than windows and than what is read at once."""
    pool = Pool(heads, 16, [150, 3, 200, 71], kind)
    out, expected = pool.run([150, 3, 47, 1])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_is_attention_of_float64(heads: Heads, page_size: int, num_threads: int) -> None:
    out, expected = Pool(heads, page_size, [1, 15, 16, 17, 63, 64, 65, 128, 131]).run([1] * 9)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_extend_is_attention_of_float64_with_and_without_a_prefix(
    heads: Heads, page_size: int, num_threads: int
) -> None:
    out, expected = Pool(heads, page_size, [1, 16, 40, 64, 65, 130, 129]).run([1, 16, 3, 64, 1, 130, 66])
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("heads", KIND_HEADS, ids=str)
def test_windows_soft_caps_partial_rotation_and_sinks_are_those_of_float64(
    heads: Heads, kind: Kind, num_threads: int
) -> None:
    lens = [1, 16, 70, 64, 65, 300, 290]
    for new_lens in ([1] * 7, [1, 16, 3, 64, 1, 300, 95]):
        out, expected = Pool(heads, 16, lens, kind).run(new_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("new_lens", [[1, 1], [5, 20]])
def test_only_the_slots_of_new_tokens_are_written(new_lens: list[int], num_threads: int) -> None:
    pool = Pool(Heads(6, 2, 64), 16, [17, 33])
    pool.run(new_lens)
    slots = [set(pool.slots(row, 0).tolist()) for row in range(2)]
    written = pool.kv[:, LAYER].isfinite().all(dim=(1, 3, 4)).flatten().nonzero().flatten().tolist()
    assert set(written) == slots[0] | slots[1]
    assert pool.kv[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("chunks", [[64, 136], [1, 199], [77, 1, 64, 58], [199, 1]])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(heads: Heads, chunks: list[int], num_threads: int) -> None:
    """Chunks of one token are computed by decode: prefill and decode agree to the bit."""
    assert torch.equal(run_in_chunks(heads, chunks), run_in_chunks(heads, [200]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("heads", KIND_HEADS, ids=str)
def test_a_layer_of_any_kind_gives_a_token_the_same_bits(heads: Heads, kind: Kind) -> None:
    assert torch.equal(run_in_chunks(heads, [1, 90, 1, 108], kind), run_in_chunks(heads, [200], kind))


@pytest.mark.parametrize("heads", KIND_HEADS, ids=str)
def test_a_row_of_several_tokens_gives_each_the_bits_that_it_has_alone(heads: Heads, num_threads: int) -> None:
    """The second request's rows cross a page, and read what they have just stored."""
    outs = []
    for rows in ([1, 4, 3], [1, 1, 1]):
        pool = Pool(heads, 16, [40, 34, 3])
        width = heads.num_states * heads.head_dim
        qkv = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
        owner, positions = np.repeat([0, 1, 2], [1, 4, 3]), np.array([39, 30, 31, 32, 33, 0, 1, 2])
        pool.kv[pool.page_table[:2].ravel()] = 0.25  # what is cached
        out = torch.full((8, heads.num_heads * heads.value_dim), torch.nan)
        for tokens in _steps(owner, rows):
            pages = pool.page_table[owner[tokens], positions[tokens] // 16].astype(np.int64)
            slots, lens = pages * 16 + positions[tokens] % 16, np.bincount(owner[tokens], minlength=3)
            own, present = out[tokens].clone(), lens > 0
            table = np.ascontiguousarray(pool.page_table[present])
            step = PagedAttention(heads, pool.kv, Tokens(positions[tokens], slots, lens[present], table))
            step.decode(qkv[tokens].clone(), pool.layer, own)
            out[tokens] = own
        outs.append(out)
    assert torch.equal(*outs)


def _steps(owner: I64, rows: list[int]) -> list[I64]:
    """Return the tokens of each step where requests have so many tokens in each."""
    index = np.concatenate([np.arange(count) for count in np.bincount(owner)])
    step = index // np.array(rows)[owner]
    return [np.flatnonzero(step == number) for number in range(step.max() + 1)]


def run_in_chunks(heads: Heads, chunks: list[int], kind: Kind = PLAIN) -> Tensor:
    pool = Pool(heads, 16, [sum(chunks)], kind)
    width = heads.num_states * heads.head_dim
    qkv = torch.randn(sum(chunks), width, generator=torch.Generator().manual_seed(1))
    outs, start = [], 0
    for chunk in chunks:
        end = start + chunk
        tokens = Tokens(
            positions=np.arange(start, end),
            out_slots=pool.slots(0, 0)[start:end],
            extend_lens=np.array([chunk]),
            page_table=pool.page_table,
        )
        out = torch.empty(chunk, heads.num_heads * heads.value_dim)
        step = PagedAttention(heads, pool.kv, tokens)
        (step.decode if chunk == 1 else step.extend)(qkv[start:end].clone(), pool.layer, out)
        outs.append(out)
        start = end
    return torch.cat(outs)


def test_scores_that_overflow_exp_still_give_a_softmax(num_threads: int) -> None:
    heads = Heads(2, 1, 64)
    for new_lens in ([1], [100]):
        pool = Pool(heads, 16, [100])
        pool.rope *= 40
        out, expected = pool.run(new_lens)
        assert out.isfinite().all()
        torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(2, 1, 80), Heads(4, 1, 512)])
@pytest.mark.parametrize("chunk", [50, 1])
def test_a_layer_that_borrows_keys_has_the_bits_of_the_one_that_stored_them_and_stores_nothing(
    heads: Heads, chunk: int
) -> None:
    """In pages with something else behind each of them, which nobody touches."""
    shape = (4, NUM_LAYERS, heads.num_planes, 16, heads.num_kv_heads, heads.head_dim)
    num_cells = shape[1] * shape[2] * shape[3] * shape[4] * shape[5]
    pool = torch.full((4, num_cells + 24), torch.nan)
    kv = pool[:, :num_cells].view(shape)
    qkv = torch.randn(50, heads.num_states * heads.head_dim, generator=torch.Generator().manual_seed(0))
    queries = qkv[:, : heads.num_heads * heads.head_dim].contiguous()
    rope, pages = torch.randn(64, 2, heads.head_dim // 2), np.array([[2, 0, 3, 1]], np.int32)
    keeper, borrower = (AttentionLayer(LAYER, rope, scale=0.1, window=20, keeps=keeps) for keeps in (True, False))
    stored, borrowed = (torch.zeros(50, heads.num_heads * heads.head_dim) for _ in range(2))
    for start in range(0, 50, chunk):
        part, positions = slice(start, start + chunk), np.arange(start, start + chunk)
        slots = pages[0, positions // 16].astype(np.int64) * 16 + positions % 16
        step = PagedAttention(heads, kv, Tokens(positions, slots, np.array([chunk]), pages))
        (step.decode if chunk == 1 else step.extend)(qkv[part].clone(), keeper, stored[part])
        before = pool.clone()
        (step.decode if chunk == 1 else step.extend)(queries[part].clone(), borrower, borrowed[part])
        assert torch.equal(pool.nan_to_num(9e9), before.nan_to_num(9e9))
    assert stored.isfinite().all()
    assert torch.equal(borrowed, stored)
    assert pool[:, num_cells:].isnan().all()
    assert int(kv.isfinite().sum()) == 50 * 2 * heads.num_kv_heads * heads.head_dim
