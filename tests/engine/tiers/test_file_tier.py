"""Pages outlive a process in files, and whatever happens to these, nobody is given wrong bytes."""

from __future__ import annotations

import errno
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import killed_writers
import numpy as np
import pytest
from tier_scenes import MIB, PAGE, PAGE_NBYTES, RECORD, SOON_S, Life, page_ids

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers import breaker, file_reader, page_files, page_format, page_reader, segments
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.page_format import HEADER_NBYTES
from diptych.engine.tiers.record_bytes import Landing
from diptych.engine.values.core_report import Holders
from diptych.engine.values.window_pages import WindowPages

TEXT = [*range(1, 42)]  # the last token is computed in any case
WHOLE = len(TEXT) - 1
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "windows": {"windows": WindowPages(2, 5)},
    "states": {"pages_per_state": 3},
}
NewLife = Callable[..., Life]


class OddDisk(Disk):
    """A disk that a test makes fail, hang or wait; nothing of it is cached."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.opens.set()
        self.reads.set()
        self.writes.set()
        self.error: OSError | None = None
        self.num_reads = 0
        self.is_writing = threading.Event()
        self.callers: set[int] = set()  # threads that may have waited for the medium

    def open(self, path: Path, flags: int) -> int:
        self.callers.add(threading.get_ident())
        return super().open(path, flags)

    def open_to_read(self, path: Path) -> int:
        self.callers.add(threading.get_ident())
        assert self.opens.wait(SOON_S)
        return super().open_to_read(path)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self.callers.add(threading.get_ident())
        self.num_reads += 1
        assert self.reads.wait(SOON_S)
        return super().read(descriptor, buffers, offset)

    def read_cached(self, descriptor: int, landing: Landing, offset: int) -> None:
        pass

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self.callers.add(threading.get_ident())
        self.is_writing.set()
        assert self.writes.wait(SOON_S)
        if self.error is not None:
            super().write(descriptor, data[: len(data) // 2], offset)  # torn
            raise self.error
        super().write(descriptor, data, offset)


@pytest.fixture
def new_life(tmp_path: Path) -> Iterator[NewLife]:
    begun: list[Life] = []

    def begin(*args: Any, folder: Path = tmp_path, **kwargs: Any) -> Life:
        life = Life(folder, *args, **kwargs)
        begun.append(life)
        return life

    yield begin
    for life in begun:
        assert life.cache.audit(Holders()) == []
        life.end()


@pytest.fixture
def disk() -> Iterator[OddDisk]:
    odd = OddDisk()
    yield odd
    odd.opens.set()
    odd.reads.set()
    odd.writes.set()


def know_the_medium(life: Life) -> None:
    """Wait until the medium is measured."""
    waited = threading.Event()
    for _ in range(int(SOON_S / 0.001)):
        if life.tier.load_s(1) < math.inf:
            return
        waited.wait(0.001)
    raise AssertionError("the medium is not measured")


def one_life(life: Life, **asked: Any) -> None:
    life.compute(TEXT, **asked)
    life.evict_all()
    life.end()


def found_in(life: Life, extra_key: bytes = b"") -> int:
    """Return how many tokens a request for the text finds, all of which are right."""
    know_the_medium(life)
    one = life.ask(TEXT, extra_key)
    life.expect_right(one)
    num_tokens = one.cached_len
    life.cache.drop(one)
    return num_tokens


def files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("*/*/*.segment"))


@pytest.mark.parametrize("beside", [*BESIDE])
def test_what_one_life_has_computed_the_next_finds_with_all_that_lies_beside_it(beside: str, new_life: NewLife) -> None:
    one_life(new_life(**BESIDE[beside]))
    second = new_life(**BESIDE[beside])
    assert found_in(second) == WHOLE
    assert second.tier.counts.read.num_corrupt == 0
    one_life(second)
    third = new_life(**BESIDE[beside])
    assert third.tier.counts.num_pages == second.tier.counts.num_pages, "nothing is written twice"


@pytest.mark.parametrize("other", ["salt", "weights", "format"])
def test_nothing_is_shared_across_salts_weights_and_formats(
    other: str, new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_life(new_life(), extra_key=b"one")
    if other == "format":
        for module in (page_format, segments):
            monkeypatch.setattr(module, "VERSION", 2)
    record = replace(RECORD, terms=b"those of another") if other == "weights" else RECORD
    second = new_life(record=record)
    second.compute(TEXT)  # so that there is a medium to be measured
    second.evict_all()
    assert not second.tier.has(page_ids(second.request(TEXT).tokens, b"two")[0])
    second.cache.clear()
    assert second.tier.has(page_ids(second.request(TEXT).tokens, b"one")[0]) == (other == "salt")
    assert found_in(second, b"two") == 0


def test_what_is_flushed_is_found_in_no_file(new_life: NewLife) -> None:
    first = new_life()
    first.compute(TEXT)
    first.evict_all()
    assert first.cache.flush() == WHOLE // PAGE
    first.tier.finish_writes()
    again = first.ask(TEXT)
    assert again.cached_len == 0
    first.cache.drop(again)
    first.end()
    second = new_life()
    other = second.ask(TEXT)
    assert other.cached_len == 0
    second.cache.drop(other)


def test_a_forged_name_finds_nothing(new_life: NewLife) -> None:
    life = new_life()
    one_life(life)
    mine = page_ids(life.request(TEXT).tokens)[3]
    assert life.tier.has(mine)
    assert not life.tier.has(mine._replace(proof=bytes(16)))


@pytest.mark.parametrize("number", range(0, HEADER_NBYTES + PAGE_NBYTES, 37))
def test_a_flipped_bit_is_a_miss_and_counted(number: int, new_life: NewLife, tmp_path: Path) -> None:
    one_life(new_life())
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    size = RECORD.record_nbytes
    data[7 * size + number] ^= 1 << number % 8
    path.write_bytes(data)
    second = new_life()
    assert found_in(second) == 7 * PAGE, "the restore fails as a whole, and what is before the page comes by another"
    assert second.tier.counts.read.num_corrupt == 1


@pytest.mark.parametrize("beside", [*BESIDE])
def test_a_file_that_is_cut_is_a_miss_and_counted(beside: str, new_life: NewLife, tmp_path: Path) -> None:
    one_life(new_life(**BESIDE[beside]))
    second = new_life(**BESIDE[beside])
    know_the_medium(second)
    for path in files(tmp_path):
        os.truncate(path, 5 * RECORD.record_nbytes + 9)
    assert found_in(second) == (5 * PAGE if beside == "nothing" else 0), "what lay beside the text is cut off"
    assert second.tier.counts.read.num_corrupt > 0


@pytest.mark.parametrize("is_footer_torn", [True, False])
def test_a_torn_end_is_cut_off_at_the_next_start(is_footer_torn: bool, new_life: NewLife, tmp_path: Path) -> None:
    one_life(new_life())
    (path,) = files(tmp_path)
    os.truncate(path, path.stat().st_size - 1 if is_footer_torn else 5 * RECORD.record_nbytes + 9)
    second = new_life()
    assert second.tier.counts.num_pages == (WHOLE // PAGE if is_footer_torn else 5)
    assert found_in(second) == (WHOLE if is_footer_torn else 5 * PAGE)
    second.end()
    assert new_life().tier.counts.num_pages == second.tier.counts.num_pages, "which is complete then"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_found_by_nobody_and_later_ones_are(
    number: int, disk: OddDisk, new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    life = new_life(disk)
    disk.error = OSError(number, os.strerror(number))
    life.compute(TEXT)
    life.evict_all()
    assert (life.tier.counts.num_pages, life.tier.counts.written.num_failed) == (0, WHOLE // PAGE)
    disk.error = None
    life.compute(TEXT)
    life.evict_all()
    assert life.tier.counts.num_pages == WHOLE // PAGE
    life.end()
    assert found_in(new_life()) == WHOLE


def test_a_medium_that_does_not_take_pages_keeps_nobody_waiting(disk: OddDisk, new_life: NewLife) -> None:
    life = new_life(disk)
    disk.writes.clear()
    for number in range(3):
        life.compute([number, *TEXT])
        life.cache._evict(life.cache.num_available)  # which returns
    pending = 3 * len([0, *TEXT]) // PAGE
    assert life.tier.counts.written.num_dropped == 0, "as little as this has a place"
    life.files.writer._bytes_per_s = 100.0  # but not if that is how slowly it goes
    life.compute([9] * 20)
    life.cache._evict(life.cache.num_available)
    assert life.tier.counts.written.num_dropped == 10
    disk.writes.set()
    life.tier.finish_writes()
    assert life.tier.counts.num_pages == pending


def test_a_read_that_hangs_is_given_up_and_the_medium_is_tried_again_later(
    disk: OddDisk, new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "READ_S", 0.05)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.2)
    one_life(new_life())
    life = new_life(disk)
    know_the_medium(life)
    disk.reads.clear()
    one = life.ask(TEXT)  # which returns
    assert (one.cached_len, life.tier.counts.read.num_failed, life.tier.counts.num_opened) == (0, 1, 1)
    num_reads = disk.num_reads
    other = life.ask(TEXT)
    assert (other.cached_len, disk.num_reads) == (0, num_reads), "nobody else is kept waiting"
    before = life.pool.copy()
    disk.reads.set()  # now it comes, and nobody wants it
    for each in (one, other):
        life.cache.drop(each)
    know_the_medium(life)
    assert (life.pool == before).all()
    assert found_in(life) == WHOLE
    assert life.files.reader.breaker.is_closed


def test_who_runs_steps_makes_no_call_that_waits_for_the_medium(disk: OddDisk, new_life: NewLife) -> None:
    """So a mount that hangs changes no step's time."""
    one_life(new_life())
    life = new_life(disk)
    disk.callers.clear()  # at the start nothing runs
    assert found_in(life) == WHOLE
    life.compute([9, *TEXT])
    life.evict_all()
    assert life.cache.flush()
    life.tier.finish_writes()
    assert disk.callers
    assert threading.get_ident() not in disk.callers


def test_a_file_that_does_not_open_keeps_nobody_waiting(
    disk: OddDisk, new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "READ_S", 0.05)
    monkeypatch.setattr(page_reader, "JOIN_S", 0.01)
    one_life(new_life())
    life = new_life(disk)
    know_the_medium(life)
    disk.opens.clear()
    one = life.ask(TEXT)  # which returns
    assert (one.cached_len, life.tier.counts.read.num_failed) == (0, 1)
    life.cache.drop(one)
    life.end()  # and so does this


def test_a_file_that_does_not_close_keeps_no_scheduler_waiting(
    new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_life(new_life())
    is_closing, closes, close_files = threading.Event(), threading.Event(), file_reader.FileReader.rest

    def close_slowly(reader: file_reader.FileReader) -> None:
        is_closing.set()
        assert closes.wait(SOON_S)
        close_files(reader)

    life = new_life()
    know_the_medium(life)
    monkeypatch.setattr(file_reader.FileReader, "rest", close_slowly)
    one = life.ask(TEXT)
    assert is_closing.wait(SOON_S)
    assert life.files.reader._changed.acquire(timeout=SOON_S / 4), "it is held by who closes"
    life.files.reader._changed.release()
    life.cache.drop(one)
    closes.set()


def test_what_is_sooner_computed_is_not_loaded(new_life: NewLife) -> None:
    one_life(new_life())
    life = new_life()
    life.cache.compute_s = lambda start, end: 1e-9
    assert found_in(life) == 0
    assert (life.cache.counts.not_loaded[1], life.tier.counts.read.num_pages) == (WHOLE // PAGE, 0)
    life.cache.compute_s = lambda start, end: 10.0
    assert found_in(life) == WHOLE
    assert 9 < life.cache.counts.saved_s[1] <= 10


def full_lives(new_life: NewLife, count: int, **which: Any) -> list[int]:
    """Let so many processes live together, each of which fills its log; return how many pages each has at its end."""
    lives = [new_life(**which) for _ in range(count)]
    for life in lives:
        for number in range(60):
            life.compute([number, *TEXT])
            life.evict_all()
        life.end()
    return [life.tier.counts.num_pages for life in lives]


@pytest.mark.parametrize("why", ["it is empty", "it has failed", "nothing is computed here"])
def test_nothing_is_named_for_a_tier_that_gives_nothing(
    why: str, new_life: NewLife, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why != "it is empty":
        one_life(new_life())
    life = new_life()
    if why == "it has failed":
        life.files.reader.breaker.fail(math.inf)
    if why == "nothing is computed here":
        know_the_medium(life)
        life.cache.compute_s = lambda start, end: 0.0
    named: list[PageId] = []
    monkeypatch.setattr(life.tier, "has", lambda page_id: named.append(page_id))
    one = life.ask(TEXT)
    assert (one.cached_len, one.page_names, named) == (0, [], [])
    life.cache.drop(one)


def test_pages_in_files_are_counted_as_those_of_files_alone(new_life: NewLife) -> None:
    one_life(new_life())
    life = new_life()
    assert [(each.name, each.pages) for each in life.cache.report().tiers] == [("pool", 0), ("files", WHOLE // PAGE)]
    assert found_in(life) == WHOLE
    life.compute([9, *TEXT])
    life.evict_all()
    cache = life.cache
    assert (cache.tree.num_host_pages, cache.moves.num_saved, cache.moves.num_restored) == (0, 0, 0)
    assert (life.tier.counts.read.num_pages, life.tier.counts.written.num_pages) == (WHOLE // PAGE, 21)


def test_processes_that_start_together_find_what_each_had(new_life: NewLife, tmp_path: Path) -> None:
    left = full_lives(new_life, 4)
    for path in tmp_path.glob("*/*"):
        make_old(path)
    assert [new_life().tier.counts.num_pages for _ in range(4)] == left
    assert {path.parent.name for path in files(tmp_path)} == {"0", "1", "2", "3"}


def make_old(folder: Path) -> None:
    for path in (folder / "lock", folder):
        os.utime(path, (0, 0))


def test_what_other_terms_have_left_is_bounded_once_it_is_unused_for_long(new_life: NewLife, tmp_path: Path) -> None:
    full_lives(new_life, 2)
    other = replace(RECORD, terms=b"those of another")
    before = files(tmp_path)
    new_life(record=other)
    assert files(tmp_path) == before, "one that is started again may want it"
    for path in tmp_path.glob("*/*"):
        make_old(path)
    one_life(new_life(record=other))
    theirs = [path for path in files(tmp_path) if path.parts[-3] != other.terms.hex()]
    assert 0 < sum(path.stat().st_size for path in theirs) <= MIB


def test_ranks_that_start_one_behind_the_other_leave_what_each_had(new_life: NewLife, tmp_path: Path) -> None:
    ranks = [replace(RECORD, terms=bytes([rank]) * 16) for rank in range(3)]
    for record in ranks:
        full_lives(new_life, 1, record=record)
    before = files(tmp_path)
    for path in tmp_path.glob("*/*"):
        make_old(path)
    lives = [new_life(record=record) for record in ranks]
    for life in lives:
        life.compute([9, *TEXT])
        life.evict_all()
    assert {path.parent for path in before} == {path.parent for path in files(tmp_path)}
    assert all(life.tier.counts.num_pages > 100 for life in lives)


def test_a_full_medium_gets_room_from_what_other_terms_have_left(
    disk: OddDisk, new_life: NewLife, tmp_path: Path
) -> None:
    one_life(new_life())
    disk.error = OSError(errno.ENOSPC, "it is full")
    one_life(new_life(disk, record=replace(RECORD, terms=b"those of another")))
    assert files(tmp_path) == []


def test_folders_are_of_one_user(new_life: NewLife, tmp_path: Path) -> None:
    one_life(new_life(folder=tmp_path / "deep" / "cache"))
    made = [path for path in (tmp_path / "deep" / "cache").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "deep" / "cache", *made]} == {0o700}


def test_a_full_log_drops_what_is_oldest_and_stays_within_its_bytes(new_life: NewLife, tmp_path: Path) -> None:
    life = new_life()
    for number in range(150):
        life.compute([number, *TEXT])
        life.evict_all()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= MIB + life.files.log.index.segment_nbytes
    assert life.tier.counts.nbytes <= MIB
    num_pages = life.tier.counts.num_pages
    assert num_pages > 0.7 * MIB / RECORD.record_nbytes
    newest, oldest = ([number, *TEXT] for number in (149, 0))
    found = life.ask(newest), life.ask(oldest)
    assert [one.cached_len for one in found] == [42, 0]
    for one in found:
        life.expect_right(one)
        life.cache.drop(one)
    life.end()
    assert new_life().tier.counts.num_pages == num_pages


def test_a_short_text_is_written_when_it_is_used_or_evicted_again(new_life: NewLife) -> None:
    life = new_life()
    life.compute(TEXT, num_uses=1)
    life.evict_all()
    assert life.tier.counts.num_pages == 0
    other = [9, *TEXT]
    for text, num_uses in ((other, 2), (TEXT, 1)):
        life.compute(text, num_uses)
        life.evict_all()
    assert life.tier.counts.num_pages == WHOLE // PAGE + len(other) // PAGE


def test_what_is_distrusted_is_not_found_in_a_later_life_either(new_life: NewLife) -> None:
    life = new_life()
    life.compute(TEXT)
    life.evict_all()
    know_the_medium(life)
    one = life.ask(TEXT)
    assert one.cached_len == WHOLE
    life.cache.distrust(one)
    life.cache.drop(one)
    life.tier.finish_writes()
    assert life.tier.counts.num_pages == 0
    life.end()
    assert new_life().tier.counts.num_pages == 0


@pytest.mark.parametrize("is_being_written", [True, False])
def test_what_is_distrusted_before_it_is_written_is_found_by_nobody(
    is_being_written: bool, disk: OddDisk, new_life: NewLife, tmp_path: Path
) -> None:
    life = new_life(disk)
    disk.writes.clear()
    texts = [TEXT] if is_being_written else [[9, *TEXT], TEXT]
    for text in texts:
        life.compute(text)
        life.cache._evict(life.cache.num_available)
        assert disk.is_writing.wait(SOON_S)
    distrusted = page_ids(life.request(TEXT).tokens[:WHOLE])
    life.tier.forget(distrusted)
    disk.writes.set()
    life.tier.finish_writes()
    assert not any(life.tier.has(each) for each in distrusted)
    life.end()
    for path in files(tmp_path):
        os.truncate(path, path.stat().st_size - 1)  # so that it is salvaged
    assert not any(new_life().tier.has(each) for each in distrusted)
    assert life.tier.counts.num_pages == (0 if is_being_written else 21)


def test_a_segment_that_cannot_be_deleted_is_emptied_and_the_writer_goes_on(
    disk: OddDisk, new_life: NewLife, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = new_life(disk)
    life.compute(TEXT)
    life.evict_all()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "not here")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        distrusted = page_ids(life.request(TEXT).tokens[:WHOLE])
        life.tier.forget(distrusted)
        life.tier.finish_writes()
        assert not any(map(life.tier.has, distrusted))
        life.compute([9, *TEXT])
        life.evict_all()
    assert life.tier.counts.num_pages == 21
    life.end()
    second = new_life()
    assert second.tier.counts.num_pages == 21
    assert not any(map(second.tier.has, distrusted))


class FullDisk(OddDisk):
    """A disk that takes no footer."""

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "it is full")
        super().write(descriptor, data, offset)


def test_what_lies_in_a_folder_does_not_keep_a_worker_from_starting(new_life: NewLife, tmp_path: Path) -> None:
    one_life(new_life())
    (path,) = files(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    (path.parent / "mine.segment").write_bytes(b"a stranger's")
    (path.parent / "00000007.segment").mkdir()  # which cannot be read
    for _ in range(2):
        life = new_life(FullDisk())
        assert life.tier.counts.num_pages == WHOLE // PAGE, "what has no footer is searched again"
        life.end()
    assert (path.parent / "mine.segment").exists()


def test_a_queue_is_bounded_in_bytes_too(disk: OddDisk, new_life: NewLife, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "BUFFER_NBYTES", 4096)
    life = new_life(disk)
    disk.writes.clear()
    life.compute(TEXT)
    life.cache._evict(life.cache.num_available)
    fitting = page_files.NUM_BUFFERS * (4096 // RECORD.record_nbytes)
    assert life.tier.counts.written.num_dropped == max(0, WHOLE // PAGE - fitting)
    disk.writes.set()


@pytest.mark.integration
def test_writers_that_are_killed_leave_what_they_had_written_and_nothing_wrong(tmp_path: Path) -> None:
    """32 pages are given at once, and the writer is killed in the midst of them; 100 times where checks are deep."""
    script, num_kills = Path(killed_writers.__file__), "100" if os.environ.get("DIPTYCH_DEEP_CHECKS") else "20"
    done = subprocess.run(
        [sys.executable, script, tmp_path, num_kills], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    num_told, num_found, num_wrong = map(int, done.stdout.split())
    assert num_found >= num_told > 0
    assert num_wrong == 0


def test_many_pages_of_16_kib_that_are_in_memory_are_all_right(tmp_path: Path) -> None:
    num_pages, nbytes = 120, 2**14
    pool = np.random.default_rng(0).integers(0, 256, (2 * num_pages, nbytes), np.uint8)
    files = page_files.PageFiles(tmp_path, segments.SegmentFormat(b"terms of 16 byte", nbytes), 8 * MIB, pool, pool)
    ids = [PageId(0, number + 1, number, bytes([number] * 16)) for number in range(num_pages)]
    assert all(files.keep(np.arange(num_pages, dtype=np.int32), ids))
    files.finish_writes()
    for path in files.log.folder.glob("*.segment"):
        path.read_bytes()
    files.load(1, ids, np.arange(num_pages, 2 * num_pages, dtype=np.int32))
    select.select(files.descriptors(), [], [], SOON_S)
    (ended,) = files.restored()
    assert (ended.error, files.counts.read.num_corrupt) == (None, 0)
    assert np.array_equal(pool[:num_pages], pool[num_pages:])
    files.close()
