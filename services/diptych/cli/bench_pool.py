"""What both ends of `diptych bench kv` are: a transport with a pool of small pages, of which a piece is several."""

from __future__ import annotations

import secrets
from typing import Final

from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport
from diptych.kvtransfer.ucx.options import Transports

PAGE_NBYTES: Final = 16 << 10


def open_bench(pool_mib: int, transports: Transports) -> tuple[UcxTransport, HostPool]:
    transport = open_transport(secrets.randbits(64) or 1, options=UcxOptions(transports=transports))
    layout = PoolLayout(
        num_pages=(pool_mib << 20) // PAGE_NBYTES,
        num_layers=1,
        page_size=16,
        num_kv_heads=2,
        head_dim=PAGE_NBYTES // 256,
        dtype="float32",
    )
    return transport, transport.allocate_pool(layout)
