"""The host tier of all ranks: each copies its own part of a page."""

from __future__ import annotations

import numpy as np

from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.cache.tier import Slots
from diptych.engine.tensor_parallel.log_codec import to_bytes
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.kvtransfer.ownership import Pages
from diptych.v1 import rank_pb2


class TensorParallelCopier:
    """Implements `PageCopier` on rank 0."""

    def __init__(self, copier: PageCopier, log: RankLog) -> None:
        self._copier = copier
        self._log = log

    def save(self, pages: Pages, slots: Slots) -> None:
        """Return when every rank has saved: peers may write into the pages next."""
        self._log.append(rank_pb2.RankEntry(save=_host_copy(pages, slots)))
        self._copier.save(pages, slots)
        self._log.answers()

    def restore(self, slots: Slots, pages: Pages) -> None:
        self._log.append(rank_pb2.RankEntry(restore=_host_copy(pages, slots)))
        self._copier.restore(slots, pages)


def _host_copy(pages: Pages, slots: Slots) -> rank_pb2.HostCopy:
    return rank_pb2.HostCopy(pages=to_bytes(pages.astype(np.int64)), slots=to_bytes(slots.astype(np.int64)))
