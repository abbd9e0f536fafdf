"""Sums over ranks by stores. One process plays all ranks here: who is early gives up, and calls again, as nobody would
on a GPU, where `test_peer_sums.py` runs ranks at the same time. (The interpreter truncates bfloat16: float16 here.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.collectives.one_shot import (
    LARGEST_NBYTES,
    PROGRAMS,
    REGION_NBYTES,
    OneShotSum,
    fits,
    flat_tile,
    memory_nbytes,
    reference_sum,
)
from diptych.kernels.gpu.layers.norms import add_rms_norm


class Ranks:
    """Ranks of one process, on one device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Each has two programs, so that few tiles are many for one: the interpreter is slow."""
        self.device = device
        self.memory = [torch.zeros(memory_nbytes(size), dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = [each.data_ptr() for each in self.memory]
        self.sums = [
            OneShotSum(rank, addresses, device, num_programs=2, max_polls=1, traps=False) for rank in range(size)
        ]

    def call(self, call: Callable[[int, OneShotSum], object], order: list[int]) -> None:
        """Have each rank make its call, the first in `order` first; those who were early once more, backwards."""
        early = []
        for rank in (*order, *order[-2::-1]):
            each = self.sums[rank]
            before = int(each.late)
            call(rank, each)
            if int(each.late) > before:
                early.append(rank)
        assert early == order[:-1]  # all but the last had to wait, and nobody the second time

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
        return [torch.randn(*shape, device=self.device).to(dtype) for _ in self.sums]


def sum_own(brought: list[Tensor], rank: int, sums: OneShotSum) -> None:
    sums.sum(brought[rank])


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 2880), (5, 24)])
@pytest.mark.parametrize("order", [[0, 1], [2, 0, 1]])
def test_every_rank_has_the_sum_in_the_order_of_ranks_call_after_call(
    num_tokens: int, size: int, order: list[int], device: torch.device
) -> None:
    ranks = Ranks(len(order), device)
    for dtype in (torch.float16, torch.float32, torch.float16):  # turns alternate, and come again
        parts = ranks.numbers(num_tokens, size, dtype=dtype)
        expected, sums = reference_sum(parts), [part.clone() for part in parts]
        ranks.call(partial(sum_own, sums), order)
        assert all(torch.equal(each, expected) for each in sums)


def test_calls_of_other_sizes_in_between_take_nothing_that_is_still_read(device: torch.device) -> None:
    ranks = Ranks(2, device)
    for num_tokens, size in ((5, 32), (1, 4096), (3, 64), (2, 512), (5, 32)):
        parts = ranks.numbers(num_tokens, size)
        expected, sums = reference_sum(parts), [part.clone() for part in parts]
        ranks.call(partial(sum_own, sums), [1, 0])
        assert torch.equal(sums[0], expected)
        assert torch.equal(sums[1], expected)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 2880), (5, 128)])
def test_the_norm_behind_a_sum_has_the_bits_of_one_by_itself(num_tokens: int, size: int, device: torch.device) -> None:
    ranks = Ranks(2, device)
    parts, stream = ranks.numbers(num_tokens, size), ranks.numbers(num_tokens, size)[0]
    weight = torch.randn(size, device=device).to(torch.float16)
    expected, expected_normed = stream.clone(), torch.empty_like(stream)
    add_rms_norm(expected, reference_sum(parts), weight, 1e-5, expected_normed)
    streams, normed = [stream.clone() for _ in parts], [torch.empty_like(stream) for _ in parts]
    brought = [part.clone() for part in parts]
    ranks.call(lambda rank, each: each.add_rms_norm(streams[rank], brought[rank], weight, 1e-5, normed[rank]), [0, 1])
    for rank in range(2):
        assert torch.equal(streams[rank], expected)
        assert torch.equal(normed[rank], expected_normed)
        assert torch.equal(brought[rank], parts[rank])


def test_who_waits_in_vain_writes_nothing_and_says_so(device: torch.device) -> None:
    ranks = Ranks(2, device)
    (part, _), alone = ranks.numbers(4, 64), ranks.sums[0]
    before = part.clone()
    alone.sum(part)
    assert int(alone.late) == 2  # programs
    assert torch.equal(part, before)


def test_sums_that_do_not_fit_are_known_before() -> None:
    assert fits(1, 8192, 2)
    assert fits(LARGEST_NBYTES // 16384, 8192, 2)
    assert not fits(LARGEST_NBYTES // 16384 + 1, 8192, 2)
    assert not fits(1, 4, 2)  # no whole vector
    for num_tokens in (1, 7, 73, 256):
        for size in (896, 2880, 4096, 5120, 7168, 8192):
            if fits(num_tokens, size, 2):
                tile = flat_tile(num_tokens, size)
                tiles = num_tokens * size // tile
                assert (size % tile, tile % 8) == (0, 0)
                assert -(-tiles // PROGRAMS) * tile * 2 <= REGION_NBYTES, (num_tokens, size)
