"""Makes both ends of `diptych bench kv`: a transport with a pool of small pages; a piece is several of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport

PAGE_NBYTES: Final = 16 << 10

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Pieces in random order on both sides; every page of a pool is in one."""

    piece_nbytes: int
    src: Pages  # a piece is a run of neighbours
    dst: Pages


def open_bench(pool_mib: int, transports: Transports) -> tuple[UcxTransport, HostPool]:
    transport = open_transport(secrets.randbits(64) or 1, options=UcxOptions(transports=transports))
    layout = PoolLayout.kv(
        num_pages=(pool_mib << 20) // PAGE_NBYTES,
        num_layers=1,
        page_size=16,
        num_kv_heads=2,
        head_dim=PAGE_NBYTES // 256,
        dtype="float32",
    )
    return transport, transport.allocate_pool(layout)


def scatter(num_pages: int, page_nbytes: int, piece_nbytes: int) -> Scatter:
    """Cut `num_pages` pages into pieces; what is left of them is in none. The same each time."""
    random = np.random.default_rng(piece_nbytes)
    run = np.arange(piece_nbytes // page_nbytes)
    num_pieces = num_pages // len(run)
    src, dst = ((random.permutation(num_pieces)[:, None] * len(run) + run).reshape(-1) for _ in range(2))
    return Scatter(piece_nbytes, src, dst)
