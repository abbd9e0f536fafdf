"""Pages of several ranks in host memory: each copies its part, and what takes its time ends with the slowest."""

from __future__ import annotations

import random
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_copier import LateCopier

from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.group import TensorParallelCopier
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker

PAGES, SLOTS = np.array([2, 5], np.int32), np.array([1, 0], np.int32)
MOST_WAITED_S = 60


class Ranks:
    """Two ranks with pools of their own. Rank 1 applies the log when told to."""

    def __init__(self, endpoint: str) -> None:
        self.pools = [np.arange(16, dtype=np.uint64).reshape(8, 2) + np.uint64(100 * rank) for rank in range(2)]
        self.copiers = [LateCopier(pool, 4, random.Random(0)) for pool in self.pools]
        self.log = RankLog(HostChannels(endpoint), 2)
        self.other = TpModelWorker(HostChannels(endpoint), 1)
        self.lead = TensorParallelCopier(self.copiers[0], self.log)
        self._runner: Any = None

    def apply(self) -> None:
        self.other.apply_due(self._runner, None, self.copiers[1])

    def apply_restore(self) -> None:
        """Wait for a restore in the log."""
        while not self.copiers[1].is_busy:
            self.apply()

    def all_restored(self) -> list[int]:
        """Wait for a restore to end: a channel may also wake for what is no message."""
        while not (restored := self.lead.restored()):
            assert select.select(self.lead.descriptors(), [], [], MOST_WAITED_S)[0]
        return list(restored)

    def end_restore(self, rank: int) -> None:
        assert self.copiers[rank].advance()
        if rank:
            self.other.report_restored(self.copiers[1])
            assert select.select(self.lead.descriptors(), [], [], MOST_WAITED_S)[0]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(f"ipc://{tmp_path}/scheduler")
    yield ranks
    ranks.other.close()
    ranks.log.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_restore_ends_with_the_slowest_rank(ranks: Ranks, order: tuple[int, int]) -> None:
    before = [pool[PAGES].copy() for pool in ranks.pools]
    ranks.lead.save(PAGES, SLOTS)
    assert not ranks.lead.restore(7, SLOTS, PAGES + 1)
    ranks.apply_restore()
    ranks.end_restore(order[0])
    assert ranks.lead.restored() == []
    ranks.end_restore(order[1])
    assert ranks.all_restored() == [7]
    assert [pool[PAGES + 1].tolist() for pool in ranks.pools] == [each.tolist() for each in before]
    assert ranks.lead.restored() == []


def test_a_peer_is_let_in_when_every_rank_has_read(ranks: Ranks) -> None:
    ranks.lead.finish_saves()  # nothing was saved, so nobody is asked
    ranks.lead.save(PAGES, SLOTS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.lead.finish_saves)
        while not waiting.done():
            ranks.apply()
    for each in ranks.pools:
        each[PAGES] = 0
    ranks.lead.restore(1, SLOTS, PAGES)
    ranks.apply_restore()
    for rank in range(2):
        ranks.end_restore(rank)
    assert ranks.all_restored() == [1]
    assert [each[PAGES].tolist() for each in ranks.pools] == [[[4, 5], [10, 11]], [[104, 105], [110, 111]]]
