"""Pages go to host memory and back beside steps, restores and peers that write into the pool: each finds its own."""

from __future__ import annotations

import random
import select
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_queues import ArrayMovement, EmulatedDevice

from diptych.common.arrays import I32, I64
from diptych.engine.runner.gpu.copy_queues import CopyQueues, Mark
from diptych.engine.runner.gpu.gpu_host_pages import NUM_PARTS, GpuHostPages, last_of_each

NUM_PAGES, NUM_SLOTS, NUM_BUFFERED = 24, 40, 2 * NUM_PARTS
MOVES = 3000  # at least, and until so many pages have come back:
NUM_CHECKED = 300
MOST_WAITED_S = 60


class Emulated(ArrayMovement):
    """Pages that hold a number each. A copy that overtakes another brings a wrong one."""

    def __init__(self, rng: random.Random, rank: int = 0) -> None:
        self.pool = np.zeros(NUM_PAGES, np.uint64)
        super().__init__(self.pool, NUM_BUFFERED, NUM_SLOTS)
        self._device = EmulatedDevice(rng)
        queues = self._device.queues
        self.queues = replace(queues, reads=queues.steps) if rank else queues
        self.advance = self._device.advance

    def write(self, pages: I64, values: I64) -> None:
        """What a step or a peer does."""
        self.pool[pages] = values

    write_as_peer = write

    def values(self, pages: I64) -> list[int]:
        found: list[int] = self.pool[pages].tolist()
        return found


class Game:
    """Random moves of a scheduler over a copier; `memory` says what is where."""

    def __init__(self, rng: random.Random, memory: Any, rank: int = 0) -> None:
        self._rng, self._memory, self._rank = rng, memory, rank
        self._queues: CopyQueues = memory.queues
        self._copier = GpuHostPages(memory, memory.queues, NUM_SLOTS, NUM_BUFFERED)
        self._free = list(range(NUM_PAGES))
        self._running: list[tuple[Mark, dict[int, int]]] = []  # steps, with what they write
        self._cached: dict[int, int] = {}  # by page: its value
        self._free_slots, self._saved = list(range(NUM_SLOTS)), dict[int, int]()  # by slot
        self._restores: dict[int, tuple[list[int], dict[int, int]]] = {}  # slots, and values by page
        self._num_values = self._num_restores = 0
        self.num_checked = 0

    def play(self, num_moves: int) -> None:
        moves = [self.compute, self.commit, self.evict, self.let_in, self.restore, self.hear, self.forget]
        num_left = num_moves
        while num_left > 0 or self.num_checked < NUM_CHECKED:
            num_left -= 1
            self._rng.choice(moves)()
            for _ in range(self._rng.randrange(30)):
                self._memory.advance()
        while self._restores:
            self._memory.advance()
            self.hear()
        self._copier.close()

    def compute(self) -> None:
        pages, values = self._new(self._take(self._free, 5))
        self._queues.steps.put(lambda: self._memory.write(pages, values))
        self._running.append((self._queues.steps.mark(), dict(zip(pages.tolist(), values.tolist(), strict=True))))

    def commit(self) -> None:
        """The host hears that the oldest step is over; that of other ranks takes rank 0's word for it."""
        if self._running:
            mark, written = self._running.pop(0)
            if not self._rank:
                mark.wait()
            self._cached |= written

    def evict(self) -> None:
        """Slots may be given twice in one eviction."""
        pages = self._take(list(self._cached), min(11, len(self._free_slots)))
        if not pages:
            return
        slots = self._take(self._free_slots, len(pages), at_least=len(pages))
        if len(slots) > 1 and self._rng.random() < 0.3:
            self._free_slots.append(slots[0])
            slots[0] = slots[-1]
        self._copier.save(np.array(pages, np.int32), np.array(slots, np.int32))
        for page, slot in zip(pages, slots, strict=True):
            self._saved[slot] = self._cached.pop(page)
        self._free += pages

    def let_in(self) -> None:
        pages, values = self._new(self._take(self._free, 3))
        self._copier.finish_saves()
        self._memory.write_as_peer(pages, values)
        self._cached |= zip(pages.tolist(), values.tolist(), strict=True)

    def restore(self) -> None:
        slots = self._take(list(self._saved), min(9, len(self._free)))
        if not slots:
            return
        pages = self._take(self._free, len(slots), at_least=len(slots))
        number, self._num_restores = self._num_restores, self._num_restores + 1
        expected = {page: self._saved.pop(slot) for page, slot in zip(pages, slots, strict=True)}
        self._restores[number] = slots, expected
        assert not self._copier.restore(number, np.array(slots, np.int32), np.array(pages, np.int32))

    def forget(self) -> None:
        for slot in self._take(list(self._saved), 6):
            del self._saved[slot]
            self._free_slots.append(slot)

    def hear(self) -> None:
        select.select(self._copier.descriptors(), [], [], 0.0)  # lets the other thread run
        for number in self._copier.restored():
            slots, expected = self._restores.pop(number)
            assert self._memory.values(np.array(list(expected))) == list(expected.values())
            self._free_slots += slots
            self._cached |= expected
            self.num_checked += len(expected)

    def _new(self, pages: list[int]) -> tuple[I64, I64]:
        self._num_values += len(pages)
        return np.array(pages, np.int64), np.arange(self._num_values - len(pages), self._num_values) + 1

    def _take(self, places: list[int], most: int, at_least: int = 0) -> list[int]:
        taken = self._rng.sample(places, self._rng.randint(at_least, max(0, min(most, len(places)))))
        for place in taken:
            places.remove(place)
        return taken


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_no_copy_overtakes_what_it_depends_on(seed: int, rank: int) -> None:
    rng = random.Random(seed)
    Game(rng, Emulated(rng, rank), rank).play(MOVES)


def steps_wait_for_no_read(copier: Any, pages: I32, slots: I32) -> None:
    """A planted bug."""
    pages, slots = last_of_each(pages, slots)
    for start in range(0, len(pages), copier._part_len):
        part = slice(start, start + copier._part_len)
        copier._save_part(pages[part].astype(np.int64), slots[part].astype(np.int64))


def peers_wait_for_nothing(copier: Any) -> None:
    """A planted bug."""


def restores_wait_for_nothing(copier: Any, number: int, slots: I32, pages: I32) -> bool:
    """A planted bug."""
    copier._queues.restores.put(lambda: copier._movement.restore(slots, pages))
    copier._ends.expect(number, copier._queues.restores.mark())
    return False


PLANTED: list[tuple[str, Callable[..., Any]]] = [
    ("save", steps_wait_for_no_read),
    ("finish_saves", peers_wait_for_nothing),
    ("restore", restores_wait_for_nothing),
]


@pytest.mark.parametrize(("name", "bug"), PLANTED)
def test_a_planted_bug_is_caught(name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuHostPages, name, bug)
    with pytest.raises(AssertionError):
        play_all()


def play_all() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        Game(rng, Emulated(rng)).play(MOVES)


def news_of(copier: GpuHostPages) -> list[int]:
    """Wait for the next end of a restore."""
    while not (found := list(copier.restored())):
        assert select.select(copier.descriptors(), [], [], MOST_WAITED_S)[0]
    return found


def test_more_pages_than_the_buffer_has_leave_in_parts() -> None:
    memory = Emulated(random.Random(0))
    copier = GpuHostPages(memory, memory.queues, NUM_SLOTS, NUM_BUFFERED)
    memory.pool[:] = np.arange(NUM_PAGES) + 1
    everything = np.arange(NUM_PAGES, dtype=np.int32)
    copier.save(everything, everything[::-1].copy())
    memory.queues.steps.put(lambda: memory.write(everything.astype(np.int64), np.zeros(NUM_PAGES, np.int64)))
    memory.queues.steps.mark().wait()
    copier.restore(7, everything, everything)
    while memory.advance():
        pass
    assert news_of(copier) == [7]
    assert memory.pool.tolist() == list(range(NUM_PAGES, 0, -1))
    copier.close()


def test_of_pages_for_one_slot_the_last_is_kept() -> None:
    pages, slots = last_of_each(np.array([4, 5, 6, 7], np.int32), np.array([2, 0, 2, 1], np.int32))
    assert (pages.tolist(), slots.tolist()) == ([5, 6, 7], [0, 2, 1])


def test_what_a_device_says_instead_of_an_end_reaches_whoever_asks() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("an illegal memory access")

    memory = Emulated(random.Random(0))
    copier = GpuHostPages(memory, memory.queues, NUM_SLOTS, NUM_BUFFERED)
    copier._ends.expect(1, Broken())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        news_of(copier)
    copier.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("page_nbytes", "piece_nbytes"), [(64, 1 << 40), (2 << 20, 1 << 40), (2 << 20, 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_copy_overtakes_what_it_depends_on_on_a_gpu(
    page_nbytes: int, piece_nbytes: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diptych.engine.runner.gpu import page_movement

    monkeypatch.setattr(page_movement, "PIECE_NBYTES", piece_nbytes)
    memory = OnGpu(page_nbytes, rank)
    try:
        Game(random.Random(page_nbytes + rank), memory, rank).play(MOVES)
    finally:
        torch.cuda.synchronize()
        memory.pinned.close()


class OnGpu:
    """The same over a real GPU: each page is filled with its number, and steps take a while before they write."""

    def __init__(self, page_nbytes: int, rank: int) -> None:
        from diptych.engine.runner.gpu.copy_queues import stream_queues
        from diptych.engine.runner.gpu.page_movement import PageMovement
        from diptych.engine.runner.gpu.piece_copies import copies_of_this_driver
        from diptych.engine.runner.gpu.pinned_memory import pinned_for_gpus

        gpu = torch.device("cuda", torch.cuda.current_device())
        pool, buffer = (torch.zeros(n, page_nbytes, dtype=torch.uint8, device=gpu) for n in (NUM_PAGES, NUM_BUFFERED))
        self.pinned = pinned_for_gpus(NUM_SLOTS * page_nbytes)
        host = self.pinned.tensor.view(NUM_SLOTS, page_nbytes)
        movement = PageMovement(pool, buffer, host, copies_of_this_driver())
        self.read, self.save, self.restore = movement.read, movement.save, movement.restore
        self._words = pool.view(torch.int64)
        self._peer = torch.cuda.Stream(gpu)
        self.queues = stream_queues(gpu, rank=rank)

    def advance(self) -> None:
        """It does so by itself."""

    def write(self, pages: I64, values: I64) -> None:
        torch.cuda._sleep(100_000)
        self._fill(pages, values)

    def write_as_peer(self, pages: I64, values: I64) -> None:
        with torch.cuda.stream(self._peer):
            self._fill(pages, values)
        self._peer.synchronize()

    def values(self, pages: I64) -> list[int]:
        with torch.cuda.stream(self._peer):
            words = self._words[torch.from_numpy(pages).cuda()].cpu()
        assert (words == words[:, :1]).all(), "a page is whole"
        found: list[int] = words[:, 0].tolist()
        return found

    def _fill(self, pages: I64, values: I64) -> None:
        for page, value in zip(pages.tolist(), values.tolist(), strict=True):
            self._words[page].fill_(value)
