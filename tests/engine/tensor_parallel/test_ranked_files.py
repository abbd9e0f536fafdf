"""Pages of several ranks in files: there only if every rank has its part, whatever happens to one of them."""

from __future__ import annotations

import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_scenes import MIB, PAGE_NBYTES, RECORD, SOON_S, page_ids

from diptych.engine.cache.host_tier import NO_COPIER
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.parts.ranked_files import RankedFiles, RankFiles
from diptych.engine.tensor_parallel.rank_log import RankLog, ids_from_bytes, ids_to_bytes
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.segments import SegmentFormat

IDS = page_ids(np.arange(16, dtype=np.int64))
FROM, TO = np.arange(0, 8, dtype=np.int32), np.arange(8, 16, dtype=np.int32)


class Ranks:
    """Two ranks with pools and files of their own. Rank 1 applies the log when told to."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.pools = [rng.integers(0, 256, (16, PAGE_NBYTES), np.uint8) for _ in range(2)]
        self.log = RankLog(HostChannels(endpoint), 2)
        self.other = TpModelWorker(HostChannels(endpoint), 1)
        self.tier = FileTier(RankedFiles(self._files(folder, 0, None), self.log))
        self.parts = RankFiles(self._files(folder, 1, self.other.files_number()))
        self._nobodys: Any = None
        self._is_closed = False

    def _files(self, folder: Path, rank: int, number: int | None) -> PageFiles:
        record = SegmentFormat(bytes([rank]) * 16, RECORD.page_nbytes)
        pool = self.pools[rank]
        files = PageFiles(folder, record, MIB, pool, pool, number=number)
        if rank:
            self.others_files = files
        else:
            self.own_files = files
        return files

    def apply(self) -> None:
        self.other.apply_due(self._nobodys, None, NO_COPIER, [self.parts])

    def save(self) -> None:
        """Have all pages written on both ranks."""
        self.tier.save(FROM, self.tier.allocate(8), IDS)
        while self.others_files.num_pages + self.others_files.counts.written.num_dropped < 8:
            self.apply()
            self.others_files.finish_writes()
        self.tier.finish_writes()

    def load(self) -> str | None:
        """Load all pages, which rank 0 says are there; return what went wrong."""
        assert all(map(self.tier.has, IDS))
        self.tier.restore(7, self.tier.claim(IDS), TO)
        while not (ended := self.tier.restored()):
            self.apply()
            self.other.report_loaded(self.parts)
            select.select(self.tier.descriptors(), [], [], 0.01)
        (end,) = ended
        assert end.number == 7
        return end.error

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.tier.close()
        self.parts.close()
        self.other.close()
        self.log.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(f"ipc://{tmp_path}/scheduler", tmp_path / "kv")
    yield ranks
    ranks.close()


def test_ids_cross_the_log_as_they_are() -> None:
    ids = [*IDS, IDS[3]._replace(group=0x8003, name=2**64 - 1)]
    assert ids_from_bytes(ids_to_bytes(ids)) == ids


def test_each_rank_keeps_its_part_and_the_next_life_finds_all(ranks: Ranks, tmp_path: Path) -> None:
    before = [pool[FROM].copy() for pool in ranks.pools]
    ranks.save()
    assert ranks.load() is None
    assert all((pool[TO] == each).all() for pool, each in zip(ranks.pools, before, strict=True))
    ranks.close()
    again = Ranks(f"ipc://{tmp_path}/again", tmp_path / "kv")
    assert again.load() is None
    assert all((pool[TO] == each).all() for pool, each in zip(again.pools, before, strict=True))
    again.close()


def test_a_load_ends_with_the_slowest_rank(ranks: Ranks) -> None:
    ranks.save()
    ranks.tier.restore(7, ranks.tier.claim(IDS), TO)
    own = ranks.own_files.reader.fileno()
    assert select.select([own], [], [], SOON_S)[0]
    assert ranks.tier.restored() == []
    while not (ended := ranks.tier.restored()):
        ranks.apply()
        ranks.other.report_loaded(ranks.parts)
    assert [each.error for each in ended] == [None]


@pytest.mark.parametrize("how", ["flipped", "dropped", "forgotten"])
def test_what_one_rank_lacks_nobody_finds(how: str, ranks: Ranks, tmp_path: Path) -> None:
    if how == "dropped":
        ranks.others_files.writer._bytes_per_s = 1e-9
        ranks.others_files.writer._queue.pending.add(b"much")
    ranks.save() if how != "dropped" else save_on_rank_0(ranks)
    if how == "flipped":
        (path,) = ranks.others_files.log.folder.glob("*.segment")
        data = bytearray(path.read_bytes())
        data[2 * RECORD.record_nbytes + 200] ^= 1
        path.write_bytes(data)
    if how == "forgotten":
        ranks.tier.forget(IDS)
        assert not any(map(ranks.tier.has, IDS))
        while any(map(ranks.others_files.has, IDS)):
            ranks.apply()
        return
    assert ranks.load()
    there = [ranks.tier.has(each) for each in IDS]
    assert there == ([at != 2 for at in range(8)] if how == "flipped" else [False] * 8)
    assert ranks.tier.counts.read.num_corrupt == (how == "flipped")
    assert ranks.tier.counts.num_opened == 0, "no medium has failed"


def save_on_rank_0(ranks: Ranks) -> None:
    ranks.tier.save(FROM, ranks.tier.allocate(8), IDS)
    ranks.tier.finish_writes()
    while ranks.others_files.counts.written.num_dropped < 8:
        ranks.apply()
    ranks.others_files.writer._queue.pending.clear()


def test_a_peer_is_let_in_when_every_rank_has_copied(ranks: Ranks) -> None:
    before = [pool[FROM].copy() for pool in ranks.pools]
    ranks.tier.finish_saves()  # nothing was saved, so nobody is asked
    ranks.tier.save(FROM, ranks.tier.allocate(8), IDS)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.tier.finish_saves)
        while not waiting.done():
            ranks.apply()
    for pool in ranks.pools:
        pool[FROM] = 0
    ranks.tier.finish_writes()
    ranks.others_files.finish_writes()
    assert ranks.load() is None
    assert all((pool[TO] == each).all() for pool, each in zip(ranks.pools, before, strict=True))
