"""Packing pages: casts against torch, images against a plain loop, and the C kernel against numpy, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.kernels import page_pack
from diptych.kernels.cpu.library import load
from diptych.kernels.page_pack import CELLS, U8, Indices, PagePack, SourceStruct, pack_struct, parts_struct

TORCH: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPES = list(TORCH)


@st.composite
def packs(draw: st.DrawFn) -> PagePack:
    src_num_heads = draw(st.integers(1, 4))
    first_head = draw(st.integers(0, src_num_heads - 1))
    alone = PagePack(
        num_layers=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 4, 16, 20, 64])),
        src_page_size=draw(st.integers(1, 9)),
        src_num_heads=src_num_heads,
        src_dtype=draw(st.sampled_from(DTYPES)),
        first_head=first_head,
        num_heads=draw(st.integers(1, src_num_heads - first_head)),
        dst_page_size=draw(st.integers(1, 9)),
        dst_dtype=draw(st.sampled_from(DTYPES)),
        num_planes=draw(st.integers(1, 2)),
    )
    before, behind = draw(st.integers(0, 2)) * 8, draw(st.integers(0, 2)) * 8  # other regions of the page
    stride = before + alone.src_region_nbytes + behind
    return replace(alone, src_offset=before, src_page_nbytes=-(-stride // 4) * 4)


def numbers(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return numbers of every size that a type has or rounds to: subnormal ones, ties, too large ones, both zeros."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(count) * 10.0 ** rng.uniform(-9, 5, count)
    edges = [
        0,
        -0.0,
        448,
        449,
        464,
        65504,
        65520,
        1e9,
        2**-9,
        2**-10,
        3 * 2**-10,
        2**-6,
        2**-14,
        2**-24,
        2**-25,
        17,
        19,
    ]
    found[: len(edges)] = edges[:count]
    return found.astype(np.float32)


def cells(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """What torch makes of the numbers; fp8 stops at its largest."""
    tensor = torch.from_numpy(values)
    tensor = tensor.clamp(-448, 448) if dtype == "fp8_e4m3" else tensor
    return tensor.to(TORCH[dtype]).view(-1).view(torch.uint8).numpy()


def pool_of(pack: PagePack, num_pages: int, seed: int) -> np.ndarray[Any, Any]:
    count = num_pages * pack.src_stride // np.dtype(CELLS[pack.src_dtype]).itemsize
    return cells(numbers(count, seed), pack.src_dtype).reshape(num_pages, -1)


def rows_in_c(pack: PagePack, pool: U8, src_pages: Indices, first_token: int, start: int, end: int) -> U8:
    """The rows `[start, end)` of an image, by the C kernel."""
    out = np.empty((end - start) * pack.row_nbytes, np.uint8)
    pages = np.ascontiguousarray(src_pages, np.int64)
    source = SourceStruct(pool.ctypes.data, pages.ctypes.data, len(pages))
    load().diptych_pack_rows(byref(pack_struct(pack)), byref(source), first_token, start, end - start, out.ctypes.data)
    return out


def unpack_in_c(page: U8, part_heads: Sequence[int], num_rows: int, head_nbytes: int) -> None:
    parts, scratch = parts_struct(part_heads, num_rows=num_rows, head_nbytes=head_nbytes), np.empty_like(page)
    load().diptych_unpack_page(byref(parts), page.ctypes.data, scratch.ctypes.data)


@pytest.mark.parametrize("src", DTYPES)
@pytest.mark.parametrize("dst", DTYPES)
def test_a_cast_is_what_torch_makes_of_it(src: str, dst: str) -> None:
    packed = cells(numbers(100_000, 0), src)
    wide = torch.from_numpy(packed).view(TORCH[src]).float().numpy()
    found = page_pack.cast(packed.view(CELLS[src]), src, dst)
    assert found.view(np.uint8).tobytes() == cells(wide, dst).tobytes()


@settings(max_examples=200, deadline=None)
@given(packs(), st.integers(0, 20), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_the_c_kernel_gives_the_same_bits(pack: PagePack, first_token: int, num_pages: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, src_pages = pool_of(pack, 6, seed), rng.permutation(6)[:num_pages]
    image = page_pack.pack_page(pack, pool, src_pages, first_token)
    assert rows_in_c(pack, pool, src_pages, first_token, 0, pack.num_rows).tobytes() == image.tobytes()
    start, end = sorted(rng.integers(0, pack.num_rows + 1, 2).tolist())
    rows = image.reshape(-1, pack.row_nbytes)[start:end]
    assert rows_in_c(pack, pool, src_pages, first_token, start, end).tobytes() == rows.tobytes()


def test_an_image_holds_the_tokens_heads_and_layers_that_were_asked_for() -> None:
    pack = PagePack(2, 3, 4, 5, "float32", 1, 2, 6, "float32")
    kv = np.arange(7 * 2 * 2 * 4 * 5 * 3, dtype=np.float32).reshape(7, 2, 2, 4, 5, 3)
    pages, first_token = np.array([6, 0, 3]), 9
    image = page_pack.pack_page(pack, kv.reshape(7, -1).view(np.uint8), pages, first_token)
    wanted = np.zeros((2, 2, 6, 2, 3), np.float32)
    for token in range(3):  # the source has 12
        page, offset = divmod(first_token + token, 4)
        wanted[:, :, token] = kv[pages[page], :, :, offset, 1:3]
    assert image.tobytes() == wanted.tobytes()


def test_an_image_is_of_one_region_of_the_page() -> None:
    latent = PagePack(3, 4, 2, 1, "float32", 0, 1, 2, "float32", num_planes=1, src_offset=16, src_page_nbytes=120)
    pages = np.arange(2 * 30, dtype=np.float32).reshape(2, 30)
    image = page_pack.pack_page(latent, pages.view(np.uint8), np.array([1]), 0)
    assert image.tobytes() == pages[1, 4:28].tobytes()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([1, 2, 8, 24]),
    st.integers(1, 2),
)
def test_parts_become_a_page(
    part_heads: list[int], num_layers: int, page_size: int, head_nbytes: int, num_planes: int
) -> None:
    shape = (num_layers, num_planes, page_size, sum(part_heads), head_nbytes)
    whole = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    parts = np.split(whole, np.cumsum(part_heads)[:-1], axis=3)
    landed = np.concatenate([part.ravel() for part in parts])
    for unpack_page in (page_pack.unpack_page, unpack_in_c):
        page = landed.copy()
        unpack_page(page, part_heads, num_layers * num_planes * page_size, head_nbytes)
        assert page.tobytes() == whole.tobytes()
