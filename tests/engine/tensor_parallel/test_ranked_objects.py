"""Pages of several ranks in a store: there only if every rank has its part, whatever happens to one of them."""

from __future__ import annotations

import math
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_store import OddStore
from tier_scenes import PAGE, PAGE_NBYTES, RUN, TERMS, page_ids

from diptych.engine.cache.beside import Beside
from diptych.engine.cache.host_tier import NO_COPIER
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.parts.ranked_objects import RankedObjects, RankObjects
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.tiers.page_format import PageFormat, rank_terms
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.values.window_pages import NO_WINDOWS

IDS = page_ids(np.arange(2 * RUN * PAGE, dtype=np.int64))
FROM, TO = np.arange(0, 8, dtype=np.int32), np.arange(8, 16, dtype=np.int32)
OF_RANK_1 = rank_terms(TERMS, 1)
STATE = Beside(NO_WINDOWS, 3, PAGE)
END = STATE.ids([], IDS[-1])


class Ranks:
    """Two ranks with pools of their own, and one store. Rank 1 applies the log when told to."""

    def __init__(self, endpoint: str, store: OddStore) -> None:
        rng = np.random.default_rng(0)
        self.pools = [rng.integers(0, 256, (24, PAGE_NBYTES), np.uint8) for _ in range(2)]
        self.log = RankLog(HostChannels(endpoint), 2)
        self.other = TpModelWorker(HostChannels(endpoint), 1)
        self.own = PageObjects(store, objects(TERMS, [OF_RANK_1.hex()]), self.pools[0])
        self.tier = SharedTier(RankedObjects(self.own, self.log))
        said = self.other.store()
        assert (said.terms, said.run_pages) == (TERMS, RUN)
        self.others = PageObjects(store, objects(rank_terms(said.terms, 1), []), self.pools[1])
        self.parts = RankObjects(self.others)
        self._nobodys: Any = None

    def apply(self) -> None:
        self.other.apply_due(self._nobodys, None, NO_COPIER, [self.parts])
        self.other.report_loaded(self.parts)

    def offer(self) -> None:
        """Have two runs, and an end behind them, written on both ranks."""
        for run in (slice(0, RUN), slice(RUN, 2 * RUN)):
            self.tier.offer(FROM[run], IDS[run])
        self.offer_end()
        assert self.tier.restored() == []
        assert not self.tier.has(IDS[0]), "it is not known yet whether all ranks have written it"

    def offer_end(self) -> None:
        self.tier.offer(np.arange(16, 19, dtype=np.int32), END)
        while self.others._known.keys() != self.own._known.keys():
            self.apply()
        self.tier.finish_writes()
        self.others.finish_writes()

    def look_up(self) -> list[bool]:
        """Ask for all, and return which pages are there then."""
        while self.tier.look_up_s == math.inf:
            self.tier.restored()
        lookup = self.tier.look_up(0, IDS, math.inf)
        while lookup is not None and not lookup.is_answered:
            select.select(self.tier.descriptors(), [], [], 0.01)
            self.tier.restored()
        return [*map(self.tier.has, [*IDS, *END])]

    def load(self) -> str | None:
        """Load all that is known to be there; return what went wrong."""
        self.tier.restore(7, self.tier.claim([*IDS, *END]), np.concatenate([TO, [19, 20, 21]]).astype(np.int32))
        while not (ended := self.tier.restored()):
            self.apply()
            select.select(self.tier.descriptors(), [], [], 0.01)
        (end,) = ended
        assert end.number == 7
        return end.error

    def close(self) -> None:
        for each in (self.tier, self.parts, self.other, self.log):
            each.close()


def objects(terms: bytes, others: list[str]) -> Objects:
    return Objects(PageFormat(terms, PAGE_NBYTES), RUN, terms.hex(), STATE, others)


@pytest.fixture
def store() -> OddStore:
    return OddStore()


@pytest.fixture
def ranks(tmp_path: Path, store: OddStore) -> Iterator[Ranks]:
    ranks = Ranks(f"ipc://{tmp_path}/scheduler", store)
    yield ranks
    ranks.close()


def test_each_rank_gives_its_part_and_finds_it(ranks: Ranks, store: OddStore) -> None:
    ranks.offer()
    assert {name.split("/")[0] for name in store.runs()} == {TERMS.hex(), OF_RANK_1.hex()}
    assert len(store.runs()) == 6
    assert all(ranks.look_up())
    assert ranks.load() is None
    for pool in ranks.pools:
        assert (pool[TO] == pool[FROM]).all()
        assert (pool[19:22] == pool[16:19]).all()


def test_what_one_rank_has_not_written_is_not_there(ranks: Ranks, store: OddStore) -> None:
    ranks.offer()
    gone = f"{OF_RANK_1.hex()}/"
    store.delete([name for name in store.runs() if name.startswith(gone) and IDS[2 * RUN - 1].key.hex() in name])
    assert ranks.look_up() == [True] * RUN + [False] * (RUN + 3)


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_what_one_rank_cannot_load_nobody_finds_and_it_is_written_again(
    how: str, ranks: Ranks, store: OddStore
) -> None:
    ranks.offer()
    assert all(ranks.look_up())
    (name,) = [each for each in store.runs() if each.startswith(OF_RANK_1.hex()) and each.endswith(END[-1].key.hex())]
    data = store.objects.pop(name)
    if how == "flipped":
        store.objects[name] = data[:-1] + bytes([data[-1] ^ 1])
    assert ranks.load()
    assert [*map(ranks.tier.has, [*IDS, *END])] == [True] * len(IDS) + [False] * 3
    assert ranks.tier.counts.read.num_corrupt == (how == "flipped")
    assert ranks.tier.counts.num_opened == 0, "no medium has failed"
    ranks.others.finish_writes()
    assert name not in store.objects
    assert ranks.tier.lacks(END[-1].group, END[-1].name)
    ranks.offer_end()
    assert store.objects[name] == data


def test_what_is_forgotten_is_deleted_on_every_rank(ranks: Ranks, store: OddStore) -> None:
    ranks.offer()
    assert all(ranks.look_up())
    ranks.tier.forget_runs([*IDS, *END], [])
    assert not any(map(ranks.tier.has, [*IDS, *END]))
    ranks.tier.finish_writes()
    while store.runs():
        ranks.apply()
        ranks.others.finish_writes()


def test_a_peer_is_let_in_when_every_rank_has_copied(ranks: Ranks, store: OddStore) -> None:
    before = ranks.pools[1][FROM[:RUN]].copy()
    ranks.tier.finish_saves()  # nothing was offered, so nobody is asked
    ranks.tier.offer(FROM[:RUN], IDS[:RUN])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.tier.finish_saves)
        while not waiting.done():
            ranks.apply()
    ranks.pools[1][FROM] = 0
    ranks.others.finish_writes()
    (data,) = [data for name, data in store.runs().items() if name.startswith(OF_RANK_1.hex())]
    records = np.frombuffer(data, np.uint8).reshape(RUN, -1)
    assert (records[:, -PAGE_NBYTES:] == before).all()
