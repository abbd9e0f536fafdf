"""Pages on their way to a pool with another layout: what the C and GPU kernels must compute, bit for bit, in numpy.

A region of a page is `[num_layers, num_planes, page_size, num_heads, head_dim]`; keys and values are two planes.
`pack_page` gathers the tokens of one target page out of source pages, takes some heads, casts, and gives `[num_layers,
num_planes, dst_page_size, num_heads, head_dim]`: the part of the target's region that the source has, in one piece.
Where a region is made of several parts, they land one after the other in the region itself, in order of their heads,
and `unpack_page` puts the heads of each token side by side.

Casts go through float32, to the nearest with ties to even. fp8_e4m3 has no infinity: what is larger than 448 becomes
448, its NaN is not recognised, and any other NaN becomes 448. To the other types a NaN goes as a NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.integer[Any]]

CELLS: Final[dict[str, npt.DTypeLike]] = {  # how numpy holds the numbers of a pool
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "fp8_e4m3": np.uint8,
}
_FP8_LARGEST: Final = 0x7E
HEAD_STEP: Final = 16  # numbers: GPUs convert heads of multiples of it, so every load and store is as wide as can be

INCLUDE_FOLDER: Final = Path(__file__).with_name("cpu")  # of page_pack.h, for every library that includes it
_CELL_TYPES: Final = {name: number for number, name in enumerate(CELLS)}  # as in page_pack.h


@dataclass(frozen=True, slots=True)
class PagePack:
    """How tokens of source pages become a part of a target page."""

    num_layers: int
    head_dim: int
    src_page_size: int  # tokens
    src_num_heads: int  # of a source page
    src_dtype: str  # a key of CELLS
    first_head: int  # of a source page: the heads `[first_head, first_head + num_heads)` are taken
    num_heads: int
    dst_page_size: int  # tokens
    dst_dtype: str
    num_planes: int = 2  # of a layer
    src_offset: int = 0  # of the region in a source page, bytes
    src_page_nbytes: int = 0  # 0: source pages hold this region alone

    @property
    def src_region_nbytes(self) -> int:
        cells = self.num_layers * self.num_planes * self.src_page_size * self.src_num_heads * self.head_dim
        return cells * np.dtype(CELLS[self.src_dtype]).itemsize

    @property
    def src_stride(self) -> int:
        """Bytes of a source page."""
        return self.src_page_nbytes or self.src_region_nbytes

    @property
    def num_rows(self) -> int:
        """The rows of an image: a row is one token in one plane of one layer."""
        return self.num_layers * self.num_planes * self.dst_page_size

    @property
    def row_nbytes(self) -> int:
        """Bytes of the taken heads of one token, in one plane of one layer."""
        return self.num_heads * self.head_dim * np.dtype(CELLS[self.dst_dtype]).itemsize

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of an image."""
        return self.num_planes * self.dst_page_size * self.row_nbytes

    @property
    def image_nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes


def pack_page(pack: PagePack, pool: U8, src_pages: Indices, first_token: int) -> U8:
    """Return the image of one target page, `[image_nbytes]`.

    pool: `[num_pages, src_stride]`. The image's first token is number `first_token` of those in `src_pages`; where
    they have no more tokens, it is zero.
    """
    tokens = first_token + np.arange(pack.dst_page_size)
    places, offsets = np.divmod(tokens, pack.src_page_size)
    exists = places < len(src_pages)
    region = pool[:, pack.src_offset : pack.src_offset + pack.src_region_nbytes].view(CELLS[pack.src_dtype])
    planes = (pack.num_layers, pack.num_planes)
    kv = region.reshape(len(pool), *planes, pack.src_page_size, pack.src_num_heads, pack.head_dim)
    taken = kv[np.asarray(src_pages)[places[exists]], :, :, offsets[exists]]  # [tokens, layers, planes, heads, dim]
    taken = taken[..., pack.first_head : pack.first_head + pack.num_heads, :]
    image = np.zeros((*planes, pack.dst_page_size, pack.num_heads, pack.head_dim), CELLS[pack.dst_dtype])
    image[:, :, exists] = np.moveaxis(cast(taken, pack.src_dtype, pack.dst_dtype), 0, 2)
    return image.reshape(-1).view(np.uint8)


def unpack_page(page: U8, part_heads: Sequence[int], num_rows: int, head_nbytes: int) -> None:
    """Put the heads of each token side by side, in place.

    page: a region of it, parts `[num_rows, part_heads[k], head_nbytes]` one after the other; rows as in an image.
    """
    parts = np.split(page, np.cumsum(part_heads)[:-1] * (num_rows * head_nbytes))
    page[:] = np.concatenate([part.reshape(num_rows, -1) for part in parts], axis=1).ravel()


def cast(values: npt.NDArray[Any], src_dtype: str, dst_dtype: str) -> npt.NDArray[Any]:
    """Return numbers as cells of another type."""
    return values if src_dtype == dst_dtype else narrow(widen(values, src_dtype), dst_dtype)


def widen(values: npt.NDArray[Any], dtype: str) -> F32:
    match dtype:
        case "bfloat16":
            bits: npt.NDArray[np.uint32] = np.left_shift(values, 16, dtype=np.uint32)
            return bits.view(np.float32)
        case "fp8_e4m3":
            return np.take(FP8_VALUES, values)
        case _:
            return values.astype(np.float32)


def narrow(values: F32, dtype: str) -> npt.NDArray[Any]:
    match dtype:
        case "bfloat16":
            wide = values.view(np.uint32)
            rounded = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
        case "fp8_e4m3":
            return _to_fp8(values)
        case _:
            with np.errstate(over="ignore"):
                return values.astype(CELLS[dtype])


def _to_fp8(values: F32) -> U8:
    bits = values.view(np.int32)
    size = bits & 0x7FFFFFFF
    magnitude = size.view(np.float32)
    normal = (size - (120 << 23) + 0x7FFFF + (size >> 20 & 1)) >> 20
    with np.errstate(invalid="ignore"):  # garbage behind the last token may be NaN
        subnormal = (magnitude + np.float32(2**14)).view(np.int32) & 0x7F  # the last bit of such a sum is worth 2^-9
    rounded = np.where(magnitude < 2**-6, subnormal, normal)
    clamped = np.where(magnitude < 448, rounded, _FP8_LARGEST)
    signs: npt.NDArray[np.int32] = np.where(np.isnan(values), 0, bits >> 24 & 0x80)
    codes: npt.NDArray[np.int32] = clamped | signs
    return codes.astype(np.uint8)


def _fp8_values() -> F32:
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents > 0, (8 + fractions) * 2.0 ** (exponents - 10.0), fractions * 2.0**-9)
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


FP8_VALUES: Final = _fp8_values()  # what NaNs are read as, too


class PackStruct(Structure):
    """`struct page_pack`"""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "num_layers",
            "head_dim",
            "src_page_size",
            "src_num_heads",
            "src_type",
            "first_head",
            "num_heads",
            "dst_page_size",
            "dst_type",
            "num_planes",
            "src_offset",
            "src_page_bytes",
        )
    )


class SourceStruct(Structure):
    """`struct source_pages`"""

    _fields_ = (("pool", c_void_p), ("pages", c_void_p), ("num_pages", c_int64))


class PartsStruct(Structure):
    """`struct page_parts`"""

    _fields_ = (
        ("num_rows", c_int64),
        ("head_bytes", c_int64),
        ("offset", c_int64),
        ("num_parts", c_int64),
        ("part_heads", POINTER(c_int64)),
    )


def pack_struct(pack: PagePack) -> PackStruct:
    return PackStruct(
        num_layers=pack.num_layers,
        head_dim=pack.head_dim,
        src_page_size=pack.src_page_size,
        src_num_heads=pack.src_num_heads,
        src_type=_CELL_TYPES[pack.src_dtype],
        first_head=pack.first_head,
        num_heads=pack.num_heads,
        dst_page_size=pack.dst_page_size,
        dst_type=_CELL_TYPES[pack.dst_dtype],
        num_planes=pack.num_planes,
        src_offset=pack.src_offset,
        src_page_bytes=pack.src_stride,
    )


def parts_struct(part_heads: Sequence[int], *, num_rows: int, head_nbytes: int, offset: int = 0) -> PartsStruct:
    heads = (ctypes.c_int64 * len(part_heads))(*part_heads)
    return PartsStruct(num_rows, head_nbytes, offset, len(part_heads), ctypes.cast(heads, POINTER(c_int64)))
