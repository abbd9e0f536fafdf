"""A decode scheduler in whose pages a bit flips between their arrival and their verification, a few times.

`python -m damaging_decode JSON`. Each time another layer's keys or values are hit; after all of them, nothing is.
"""

from __future__ import annotations

import itertools
import sys

from diptych.engine.options.config import SchedulerConfig
from diptych.engine.scheduler.process import run_scheduler
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.transport import PageIndices, Transport
from diptych.kvtransfer.ucx import UcxOptions
from diptych.kvtransfer.ucx.transport import UcxTransport
from diptych.unified.scheduler import build_core


class DamagingTransport(UcxTransport):
    """Flips a bit before a digest is computed, unless it is that of a link test."""

    def allocate_pool(self, layout: PoolLayout) -> HostPool:
        self._damaged = super().allocate_pool(layout)
        self._positions = itertools.product(range(layout.num_layers), range(2))
        return self._damaged

    def digest_pages(self, pages: PageIndices) -> int:
        layout = self._damaged.layout
        position = next(self._positions, None) if pages[0] < layout.num_pages else None
        if position is not None:
            kind_nbytes = layout.page_nbytes // layout.num_layers // 2
            kind = position[0] * 2 + position[1]
            self._damaged.buffer[int(pages[-1]) * layout.page_nbytes + kind * kind_nbytes] ^= 1
        return super().digest_pages(pages)


def _open_transport(config: SchedulerConfig) -> Transport:
    return DamagingTransport(config.instance_id, UcxOptions(transports=config.transports))


if __name__ == "__main__":
    run_scheduler(sys.argv, build_core, _open_transport)
