"""What an indexer chooses, and attention to that, against torch, over page edges, ties and garbage in unused slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.paged_attention import AttentionLayer, Heads, PagedAttention, Tokens
from diptych.kernels.cpu.sparse_attention import IndexHeads, SparseAttention

NUM_LAYERS, LAYER = 3, 1  # of latents
NUM_CHOOSING, PLACE = 2, 1  # layers of index keys
SCALE, ROPE_DIM = 0.2, 8
HEADS: Final = (Heads(5, 1, 48, 32), Heads(3, 1, 44, 30), Heads(9, 1, 576, 512), Heads(40, 1, 96, 64))
INDEXES: Final = (IndexHeads(3, 24, 12), IndexHeads(16, 32, 50), IndexHeads(7, 10, 1), IndexHeads(64, 128, 70))
LENS: Final = [1, 12, 13, 40, 64, 65, 130, 300]
NEW_LENS: Final = [1, 12, 5, 40, 1, 20, 130, 33]
Kept = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    heads: Heads = HEADS[0]
    index: IndexHeads = INDEXES[0]
    page_size: int = 16
    dtype: torch.dtype = torch.float32  # of the pool
    whole: bool = True  # index states are small whole numbers: scores are exact, and many are equal
    turning: bool = False


class Pool:
    """Requests on scattered pages of one tensor, as a pool of two regions is; what nobody wrote is NaN."""

    def __init__(self, case: Case, seq_lens: list[int]) -> None:
        self.case, self.seq_lens = case, seq_lens
        self.generator = torch.Generator().manual_seed(0)
        counts = [-(-seq_len // case.page_size) for seq_len in seq_lens]
        scattered = torch.randperm(sum(counts) + 2, generator=self.generator).numpy().astype(np.int32)
        self.page_table = np.zeros((len(seq_lens), max(counts) + 1), np.int32)
        for row, count in enumerate(counts):
            self.page_table[row, :count], scattered = scattered[:count], scattered[count:]
        shapes = [(NUM_LAYERS, 1, case.page_size, 1, case.heads.head_dim)]
        shapes.append((NUM_CHOOSING, 1, case.page_size, 1, case.index.head_dim))
        sizes = [int(np.prod(shape)) for shape in shapes]
        cells = torch.full((sum(counts) + 2, sum(sizes)), torch.nan).to(case.dtype)
        parts = torch.split(cells, sizes, dim=1)
        self.kv, self.index_keys = (part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True))
        self.states = [self._states(seq_len) for seq_len in seq_lens]
        angles = torch.randn(max(seq_lens), ROPE_DIM // 2, generator=self.generator) * case.turning
        rope = torch.stack((angles.cos(), angles.sin()), dim=1)
        self.layer = AttentionLayer(LAYER, rope, scale=SCALE, rope_start=case.heads.value_dim)
        self.choosing = AttentionLayer(PLACE, rope, scale=1.0)

    def _states(self, seq_len: int) -> Tensor:
        """Return what attention is given of all tokens of a request."""
        size = self.case.heads.num_states * self.case.heads.head_dim
        states = torch.randn(seq_len, size, generator=self.generator)
        index = torch.randn(seq_len, self.case.index.size, generator=self.generator)
        return torch.cat([states, index.mul(0.8).round() if self.case.whole else index], dim=1)

    def step(self, starts: dict[int, tuple[int, int]]) -> SparseAttention:
        return SparseAttention(self.case.heads, self.case.index, self.kv, self.index_keys, self.tokens(starts))

    def tokens(self, spans: dict[int, tuple[int, int]]) -> Tokens:
        """Return the tokens `[first, last)` of each request, by its row."""
        positions = [np.arange(*span) for span in spans.values()]
        size = self.case.page_size
        places = zip(spans, positions, strict=True)
        slots = [self.page_table[row, at // size].astype(np.int64) * size + at % size for row, at in places]
        lens = np.array([len(at) for at in positions])
        return Tokens(np.concatenate(positions), np.concatenate(slots), lens, self.page_table[list(spans)])

    def run(self, spans: dict[int, tuple[int, int]], *, decode: bool = False) -> tuple[Tensor, Kept]:
        """Compute a step; return results, and what was chosen."""
        qkv = torch.cat([self.states[row][first:last] for row, (first, last) in spans.items()])
        out = torch.full((len(qkv), self.case.heads.num_heads * self.case.heads.value_dim), torch.nan)
        step = self.step(spans)
        step.choose(qkv, self.choosing)
        (step.decode if decode else step.extend)(qkv, self.layer, out)
        return out, step.chosen.numpy().copy()

    def fill(self, lens: list[int]) -> None:
        """Store the first tokens of each request."""
        spans = {row: (0, count) for row, count in enumerate(lens) if count}
        if spans:
            self.run(spans)

    def expected(self, row: int, position: int) -> tuple[Tensor, list[int]]:
        """Return what attention of a token is in float64 without rotation, and the positions that it attends to."""
        heads, index = self.case.heads, self.case.index
        own, size = self.states[row][: position + 1], heads.num_states * heads.head_dim
        states, kept = own[:, :size].view(len(own), -1, heads.head_dim), own[:, size:]
        numbers = (index.num_heads + 1) * index.head_dim
        index_states = kept[:, :numbers].view(len(own), -1, index.head_dim).double()
        keys, latents = (part[:, -1].to(self.case.dtype).double() for part in (index_states, states))
        scores = kept[-1, numbers:].double() @ (index_states[-1, :-1] @ keys.T).relu()
        best = scores.argsort(descending=True, stable=True)[: index.num_kept].sort().values
        queries = states[-1, :-1].double()
        weights = (queries @ latents[best].T * SCALE).softmax(-1)
        return (weights @ latents[best, : heads.value_dim]).flatten(), best.tolist()


def assert_right(pool: Pool, spans: dict[int, tuple[int, int]], out: Tensor, chosen: Kept) -> None:
    tokens = [(row, position) for row, span in spans.items() for position in range(*span)]
    for token, (row, position) in enumerate(tokens):
        expected, best = pool.expected(row, position)
        if position >= pool.case.index.num_kept:
            assert chosen[token].tolist() == best, (row, position)
        torch.testing.assert_close(out[token].double(), expected, atol=2e-5, rtol=1e-4)


def spans_of(new_lens: list[int]) -> dict[int, tuple[int, int]]:
    lens = zip(LENS, new_lens, strict=True)
    return {row: (seq_len - new, seq_len) for row, (seq_len, new) in enumerate(lens)}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_the_best_are_chosen_and_of_equal_ones_the_first(index: IndexHeads, page_size: int, num_threads: int) -> None:
    for new_lens in ([1] * len(LENS), NEW_LENS):
        pool, spans = Pool(Case(index=index, page_size=page_size), LENS), spans_of(new_lens)
        pool.fill([first for first, _ in spans.values()])
        assert_right(pool, spans, *pool.run(spans, decode=new_lens[1] == 1))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_to_what_was_chosen_is_that_of_float64(heads: Heads, num_threads: int) -> None:
    for new_lens in ([1] * len(LENS), NEW_LENS):
        pool, spans = Pool(Case(heads=heads, index=INDEXES[1]), LENS), spans_of(new_lens)
        pool.fill([first for first, _ in spans.values()])
        assert_right(pool, spans, *pool.run(spans, decode=new_lens[1] == 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_narrow_pools_are_read_as_they_are_written(dtype: torch.dtype, num_threads: int) -> None:
    pool, spans = Pool(Case(dtype=dtype, index=INDEXES[1]), LENS), spans_of(NEW_LENS)
    pool.fill([first for first, _ in spans.values()])
    assert_right(pool, spans, *pool.run(spans))


def test_what_can_not_be_told_apart_is_chosen_from_the_first_on() -> None:
    pool = Pool(Case(), [40])
    pool.states[0][:, pool.case.heads.num_states * pool.case.heads.head_dim :] = 0
    _, chosen = pool.run({0: (0, 40)})
    assert (chosen[12:] == np.arange(12)).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_choose_as_many_that_there_are(number: float) -> None:
    """What is computed means nothing, but reads no page of another request."""
    pool = Pool(Case(), [40])
    pool.states[0][20:, -40:] = number
    _, chosen = pool.run({0: (0, 40)})
    for position in range(12, 40):
        assert (np.diff(chosen[position]) > 0).all()
        assert 0 <= chosen[position, 0] <= chosen[position, -1] <= position


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("chunks", [[1] * 30 + [170], [77, 1, 64, 58], [199, 1]])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(heads: Heads, chunks: list[int], num_threads: int) -> None:
    case = Case(heads=heads, index=INDEXES[1], whole=False, turning=True)
    whole, in_chunks = Pool(case, [200]), Pool(case, [200])
    expected, chosen = whole.run({0: (0, 200)})
    start, outs = 0, []
    for chunk in chunks:
        out, own = in_chunks.run({0: (start, start + chunk)}, decode=chunk == 1)
        if (first := max(start, case.index.num_kept)) < start + chunk:
            assert (own[first - start :] == chosen[first : start + chunk]).all()
        outs.append(out)
        start += chunk
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(in_chunks.index_keys.nan_to_num(), whole.index_keys.nan_to_num())


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_token_has_the_same_bits_in_any_batch(heads: Heads, num_threads: int) -> None:
    case = Case(heads=heads, index=INDEXES[1], whole=False, turning=True)
    pool, spans = Pool(case, LENS), spans_of([1] * len(LENS))
    pool.fill([first for first, _ in spans.values()])
    together, chosen = pool.run(spans, decode=True)
    for row, span in spans.items():
        alone, own = pool.run({row: span}, decode=True)
        assert torch.equal(alone[0], together[row])
        assert LENS[row] <= case.index.num_kept or (own[0] == chosen[row]).all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_tokens_that_see_no_more_than_is_kept_are_attended_to_as_without_an_indexer(heads: Heads) -> None:
    """To the bit: alone in a step, and beside others that choose."""
    case = Case(heads=heads, index=replace(INDEXES[0], num_kept=100), whole=False, turning=True)
    sparse, alone = (Pool(case, [100, 130]) for _ in range(2))
    together, _ = sparse.run({0: (0, 100), 1: (0, 130)})
    dense = PagedAttention(heads, alone.kv, alone.tokens({0: (0, 100)}))
    qkv = alone.states[0][:, : heads.num_states * heads.head_dim].contiguous()
    expected = torch.empty(100, heads.num_heads * heads.value_dim)
    dense.extend(qkv, alone.layer, expected)
    assert torch.equal(together[:100], expected)
    assert torch.equal(alone.run({0: (0, 100)})[0], expected)


def test_a_layer_may_attend_to_what_another_one_chose() -> None:
    pool = Pool(Case(), [40])
    qkv, outs = pool.states[0].clone(), [torch.empty(40, 5 * 32) for _ in range(2)]
    step = pool.step({0: (0, 40)})
    step.choose(qkv.clone(), pool.choosing)
    other = AttentionLayer(LAYER + 1, pool.layer.rope, scale=SCALE, rope_start=32)
    step.extend(qkv.clone(), pool.layer, outs[0])
    step.extend(qkv.clone(), other, outs[1])
    assert torch.equal(*outs)
    assert torch.equal(pool.kv[:, LAYER].nan_to_num(), pool.kv[:, LAYER + 1].nan_to_num())


def test_keys_and_queries_turn_with_their_positions() -> None:
    case: Any = replace(Case(), whole=False, turning=True)
    pool = Pool(case, [40])
    qkv = pool.states[0].clone()
    pool.step({0: (0, 40)}).choose(qkv, pool.choosing)
    size, dim = case.heads.num_states * case.heads.head_dim, case.index.head_dim
    before, after = (states[:, size : size + 4 * dim].view(40, 4, dim) for states in (pool.states[0], qkv))
    cos, sin = pool.choosing.rope[:40, :, None].unbind(1)
    first, second, rest = torch.split(before, [4, 4, dim - 8], dim=2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)
    torch.testing.assert_close(after[:, :3], turned[:, :3])
    slots = torch.from_numpy(pool.tokens({0: (0, 40)}).out_slots)
    torch.testing.assert_close(pool.index_keys[slots // 16, PLACE, 0, slots % 16, 0], turned[:, 3])
