"""What adapters add on GPUs, against torch; rows of other tokens keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import FLOATS, on_gpu
from torch import Tensor

from diptych.kernels.adapted_matrix import AdaptedMatrix
from diptych.kernels.token_tiles import TokenTiles

NUM_SLOTS = 4  # the last one stays empty
RANKS = (5, 16, 40)  # of the adapters
OWNERS = {
    "one token": [1],
    "none with one": [-1, -1, -1],
    "three adapters, an empty slot and none": [2, -1, 0, 0, 3, 1, 2] * 5,
    "more tokens of one than a tile has": [0] * 17 + [-1] * 3 + [2] * 16,
}
MANY = [2, -1, 0, 2, 2, 1] * 50  # large tiles
SHAPES = [(48, 24, 1), (100, 300, 3), on_gpu(4096, 6144, 3), on_gpu(14_336, 4096, 1)]  # columns, rows, parts
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """Adapters of several ranks on one matrix, in parts that lie one behind the other, and one of the second part."""

    def __init__(self, k: int, n: int, num_parts: int, dtype: torch.dtype, device: torch.device) -> None:
        from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots

        rows = n // num_parts
        parts = tuple((i * rows, rows) for i in range(num_parts))
        matrices = {"before": AdaptedMatrix(16, ((0, 8),)), "matrix": AdaptedMatrix(k, parts)}
        self.slots = AdapterSlots(NUM_SLOTS, max(RANKS), matrices, dtype, device)
        self.slots.reserve()
        self.shape, self.dtype, self.device = (k, n), dtype, device
        self.products: list[list[tuple[Tensor, Tensor, int]]] = []
        for slot, rank in enumerate(RANKS):
            starts = [start for start, _ in (parts if slot else parts[-1:])]
            products = [(self.random(rank, k) / k**0.5, self.random(rows, rank) / rank**0.5, at) for at in starts]
            before = [(self.random(3, 16), self.random(8, 3), 0)]
            self.slots.install(slot, self.slots.prepare({"before": before, "matrix": products}))
            self.products.append(products)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)

    def check(self, owner: list[int]) -> None:
        k, n = self.shape
        x, before = (self.random(len(owner), size).to(self.device) for size in (k, n))
        out, exact = before.clone(), before.double()
        self.slots.table("matrix").add(x, TokenTiles.of(np.array(owner, np.int64), NUM_SLOTS, self.device), out)
        for slot, products in enumerate(self.products):
            mine = (torch.tensor(owner) == slot).to(self.device)
            for a, b, start in products:
                sides = (side.to(self.device).double() for side in (a, b))
                added = (x[mine].double() @ next(sides).T) @ next(sides).T
                exact[mine, start : start + len(b)] += added
        error = TOLERANCES[self.dtype]
        torch.testing.assert_close(out.double(), exact, atol=error, rtol=error)
        others = torch.tensor([slot in (-1, 3) for slot in owner], dtype=torch.bool).to(self.device)
        assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k", "n", "num_parts"), SHAPES)
def test_each_token_gets_what_its_adapter_makes_of_it_and_others_keep_their_bits(
    k: int, n: int, num_parts: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(k, n, num_parts, dtype, device)
    for owner in OWNERS.values():
        case.check(owner)
    if k < 1000 or device.type == "cuda":
        case.check(MANY)


def test_no_token_is_nothing_to_do(device: torch.device) -> None:
    Case(48, 24, 1, torch.float32, device).check([])


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_looked_up_gets_what_an_adapter_of_embeddings_adds(dtype: torch.dtype, device: torch.device) -> None:
    from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots

    slots = AdapterSlots(2, 24, {"embed": AdaptedMatrix(31, ((0, 70),), is_embedding=True)}, dtype, device)
    slots.reserve()
    a, b = torch.randn(9, 31).to(dtype), torch.randn(70, 9).to(dtype)
    slots.install(1, slots.prepare({"embed": [(a, b, 0)]}))
    ids, owner = torch.randint(0, 31, (40,)), torch.tensor([1, -1, 0, 1] * 10)
    before = torch.randn(40, 70).to(dtype)
    out, mine = before.clone().to(device), owner == 1
    slots.table("embed").add(ids.to(device), TokenTiles.of(owner.numpy(), 2, device), out)
    exact = before[mine].double() + a.T[ids[mine]].double() @ b.double().T
    error = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu()[mine].double(), exact, atol=error, rtol=error)
    assert torch.equal(out.cpu()[~mine], before[~mine])


def test_an_adapter_that_takes_the_slot_of_another_leaves_nothing_of_it(device: torch.device) -> None:
    case = Case(48, 24, 1, torch.float32, device)
    case.slots.install(2, case.slots.prepare({"matrix": case.products[0]}))
    case.products[2] = case.products[0]
    case.check([2, 1, 2])
