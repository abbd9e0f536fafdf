"""Workers share a store, and whatever that does, nobody is given wrong bytes, and nobody waits for long."""

from __future__ import annotations

import errno
import math
import os
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from odd_store import SOON_S, OddStore
from tier_scenes import MIB, PAGE, PAGE_NBYTES, RECORD, RUN, TERMS, SharedLife, page_ids

from diptych.engine.cache.page_ids import PageId, groups
from diptych.engine.tiers import breaker, page_objects, page_writer
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.object_asker import Asked, ObjectAsker
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import HEADER_NBYTES, whose
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.runs import object_name
from diptych.engine.tiers.stores.object_room import Room
from diptych.engine.values.core_report import Holders
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.page_hash import extra_key

TEXT = [*range(1, 46)]  # of 22 pages 20 are whole runs
WHOLE = (len(TEXT) - 1) // PAGE // RUN * RUN * PAGE
NUM_RUNS = WHOLE // PAGE // RUN
RUN_NBYTES = RUN * RECORD.record_nbytes
NewLife = Callable[..., SharedLife]


@pytest.fixture
def store() -> Iterator[OddStore]:
    odd = OddStore()
    yield odd
    odd.opens.set()


@pytest.fixture
def new_life(store: OddStore) -> Iterator[NewLife]:
    begun: list[SharedLife] = []

    def begin(**kwargs: Any) -> SharedLife:
        life = SharedLife(store, **kwargs)
        begun.append(life)
        return life

    yield begin
    store.opens.set()
    for life in begun:
        assert life.cache.audit(Holders()) == []
        life.end()


def know_the_store(life: SharedLife) -> None:
    """Wait until it is measured."""
    waited = threading.Event()
    for _ in range(int(SOON_S / 0.001)):
        life.shared.restored()
        if life.shared.look_up_s < math.inf:
            return
        waited.wait(0.001)
    raise AssertionError("the store is not measured")


def one_life(life: SharedLife, **asked: Any) -> None:
    know_the_store(life)
    life.compute(TEXT, **asked)
    life.finish_writes()


def found_in(life: SharedLife, extra_key: bytes = b"") -> int:
    """Return how many tokens a request for the text finds, all of which are right."""
    know_the_store(life)
    one = life.ask(TEXT, extra_key)
    life.expect_right(one)
    num_tokens = one.cached_len
    life.cache.drop(one)
    return num_tokens


def test_what_one_worker_has_computed_another_finds_in_whole_runs(new_life: NewLife, store: OddStore) -> None:
    one_life(new_life())
    assert [len(data) for data in store.runs().values()] == [RUN_NBYTES] * NUM_RUNS
    second = new_life()
    assert found_in(second) == WHOLE
    assert second.shared.asked.num_runs == NUM_RUNS
    levels = {tier.name: tier.found_tokens for tier in second.cache.report().tiers}
    assert levels == {"pool": 0, "shared": WHOLE}
    second.compute(TEXT)
    second.finish_writes()
    assert store.num_writes == NUM_RUNS, "nothing is written twice"


BESIDE: dict[str, dict[str, Any]] = {
    "windows": {"windows": WindowPages(2, 5)},
    "chunks": {"windows": WindowPages(1, 12, is_chunked=True)},
    "states": {"pages_per_state": 3},
}
of_beside = pytest.mark.parametrize("beside", BESIDE.values(), ids=[*BESIDE])


@of_beside
def test_all_that_lies_beside_a_text_is_found_behind_its_last_run(
    beside: dict[str, Any], new_life: NewLife, store: OddStore
) -> None:
    one_life(new_life(**beside))
    records = [data[at:] for data in store.runs().values() for at in range(0, len(data), RECORD.record_nbytes)]
    found = {page_id.group for each in records if (page_id := whose(each[:HEADER_NBYTES], TERMS, PAGE_NBYTES))}
    assert found == set(groups(beside.get("windows", NO_WINDOWS).num_groups, beside.get("pages_per_state", 0)))
    second = new_life(**beside)
    assert found_in(second) == WHOLE
    num_writes = store.num_writes
    second.compute(TEXT)
    second.finish_writes()
    assert store.num_writes == num_writes, "nothing is written twice"


@of_beside
def test_ends_are_deleted_with_the_runs_before_them_also_by_who_has_forgotten_what_is_there(
    beside: dict[str, Any], new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_objects, "MOST_PAGES", 1)
    life = new_life(**beside)
    one_life(life)
    assert len(store.runs()) > NUM_RUNS
    life.cache.flush()
    life.finish_writes()
    assert store.runs() == {}


def test_an_end_that_waits_is_not_written_once_it_is_forgotten_though_memory_was_wanted_meanwhile(
    new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, may_write = new_life(**BESIDE["windows"]), threading.Event()
    know_the_store(life)
    write = store.write
    monkeypatch.setattr(store, "write", lambda *given: may_write.wait(SOON_S) and write(*given))
    life.compute(TEXT)
    life.cache.pool.uncache(life.cache.tree.windows.pop_spare(100))
    life.cache.flush()
    may_write.set()
    life.finish_writes()
    assert store.runs() == {}


def test_no_end_is_given_where_memory_was_wanted_for_what_windows_do_not_see(
    new_life: NewLife, store: OddStore
) -> None:
    life = new_life(**BESIDE["windows"])
    one_life(life, num_uses=1)
    life.cache.pool.uncache(life.cache.tree.windows.pop_spare(100))
    one_life(life, num_uses=1)
    assert len(store.runs()) == NUM_RUNS


@of_beside
def test_texts_that_part_leave_an_end_behind_the_last_run_that_they_share(
    beside: dict[str, Any], new_life: NewLife
) -> None:
    one = new_life(**beside)
    one_life(one)
    one.compute([*TEXT[:29], *range(100, 116)])  # 14 pages are the same, of which three are whole runs
    one.finish_writes()
    other = new_life(**beside)
    know_the_store(other)
    request = other.ask([*TEXT[:27], *range(200, 220)])
    assert request.cached_len == 3 * RUN * PAGE
    other.expect_right(request)
    other.cache.drop(request)


@of_beside
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_an_end_that_is_not_what_was_written_is_a_miss_and_goes(
    how: str, beside: dict[str, Any], new_life: NewLife, store: OddStore
) -> None:
    one_life(new_life(**beside))
    last = page_ids(new_life().request(TEXT).tokens)[WHOLE // PAGE - 1]
    (name,) = [name for name in store.objects if last.proof.hex() in name and not name.endswith(last.key.hex())]
    store.objects[name] = damaged(store.objects[name], how)
    if how == "gone":
        del store.objects[name]
    second = new_life(**beside)
    assert found_in(second) < WHOLE
    assert (second.shared.counts.read.num_corrupt > 0) == (how != "gone")
    second.finish_writes()
    assert name not in store.objects
    second.compute(TEXT)
    second.finish_writes()
    assert found_in(new_life(**beside)) == WHOLE


def test_who_has_the_beginning_of_a_text_goes_on_with_windows_that_begin_there(new_life: NewLife) -> None:
    one_life(new_life(**BESIDE["windows"]))
    second = new_life(**BESIDE["windows"])
    know_the_store(second)
    second.compute(TEXT[: 19 * PAGE])
    assert found_in(second) == WHOLE
    assert second.shared.counts.read.num_pages == 1 + 2, "a page of tokens, and its windows"


def test_who_has_a_part_of_a_run_reads_the_rest_of_it(new_life: NewLife) -> None:
    one_life(new_life())
    second = new_life()
    know_the_store(second)
    second.compute(TEXT[: 3 * PAGE])
    assert found_in(second) == WHOLE
    assert second.shared.counts.read.num_pages == WHOLE // PAGE - 3


def test_two_writers_of_one_object_leave_one_that_is_right(new_life: NewLife, store: OddStore) -> None:
    lives = [new_life(), new_life()]
    for life in lives:
        know_the_store(life)
        life.cache.compute_s = lambda start, end: 0.0  # so that nobody asks
    store.opens.clear()
    for life in lives:
        life.compute([0, *TEXT])
    store.opens.set()
    for life in lives:
        life.finish_writes()
    assert len(store.runs()) == NUM_RUNS
    third = new_life()
    know_the_store(third)
    one = third.ask([0, *TEXT])
    assert one.cached_len == WHOLE
    third.expect_right(one)
    third.cache.drop(one)


def test_nothing_is_shared_across_salts_and_terms(new_life: NewLife, store: OddStore) -> None:
    one_life(new_life(), extra_key=b"one")
    assert found_in(new_life(), b"two") == 0
    assert found_in(new_life(terms=b"those of another"), b"one") == 0
    renamed = {name.replace(TERMS.hex(), b"those of another".hex()): data for name, data in store.objects.items()}
    store.objects.update(renamed)  # as by a hand that meant well
    other = new_life(terms=b"those of another")
    assert found_in(other, b"one") == 0
    assert other.shared.counts.read.num_corrupt > 0


def test_an_adapter_and_a_salt_find_their_own_in_files_and_store(new_life: NewLife, tmp_path: Path) -> None:
    def files(life_pool: Any) -> FileTier:
        return FileTier(PageFiles(tmp_path, RECORD, MIB, life_pool, life_pool))

    ours = extra_key(b"tenant", "adapter")
    one = new_life(files=files)
    one_life(one, extra_key=ours)
    one.evict_all()
    one.tiers[0].close()
    for above in (files, None):
        life = new_life(files=above)
        for others in (extra_key(b"tenant", "another"), extra_key(b"other", "adapter"), extra_key(b"tenant", ""), b""):
            assert found_in(life, others) == 0
        while above and life.tiers[0].load_s(1) == math.inf:
            select.select(life.tiers[0].descriptors(), [], [], 0.001)
        assert found_in(life, ours) == (len(TEXT) - 1) // PAGE * PAGE if above else WHOLE


def damaged(data: bytes, how: str) -> bytes:
    at = len(data) // 2 + 9
    return data[:at] if how == "cut" else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_an_object_that_is_not_what_was_written_is_a_miss_is_counted_and_written_again(
    how: str, new_life: NewLife, store: OddStore
) -> None:
    one_life(new_life())
    third = page_ids(new_life().request(TEXT).tokens)[3 * RUN - 1].key.hex()
    name = next(name for name in store.objects if name.endswith(third))
    whole = store.objects[name]
    store.objects[name] = damaged(whole, how)
    second = new_life()
    assert found_in(second) == 2 * RUN * PAGE, "the restore fails as a whole, and what is before comes by another"
    assert second.shared.counts.read.num_corrupt == (2 if how == "cut" else 1)
    assert second.reader_is_closed
    second.shared.finish_writes()
    assert name not in store.objects, "or everybody would find it again"
    second.compute(TEXT)
    second.finish_writes()
    assert store.objects[name] == whole


def test_what_was_deleted_meanwhile_is_a_miss_and_what_is_before_it_comes(new_life: NewLife, store: OddStore) -> None:
    one_life(new_life())
    second = new_life()
    assert found_in(second) == WHOLE
    second.cache.clear()
    first = page_ids(second.request(TEXT).tokens)[RUN - 1].key.hex()
    store.delete([name for name in store.runs() if not name.endswith(first)])
    assert found_in(second) == RUN * PAGE
    assert second.shared.counts.read.num_corrupt == 0


@pytest.mark.parametrize("num_held", [0, 1, NUM_RUNS])
def test_a_hole_costs_one_load(num_held: int, new_life: NewLife, store: OddStore) -> None:
    one_life(new_life())
    keys = [each.key.hex() for each in page_ids(new_life().request(TEXT).tokens)[RUN - 1 :: RUN]]
    kept = keys[:num_held] + keys[num_held + 1 :]
    store.objects = {name: data for name, data in store.objects.items() if name == "probe" or name[-36:] in kept}
    assert found_in(new_life()) == num_held * RUN * PAGE


def test_a_dead_store_is_left_alone_and_asked_again_later(
    new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.2)
    one_life(new_life())
    life = new_life()
    know_the_store(life)
    store.error = OSError("connection refused")
    one = life.ask(TEXT)  # which returns
    assert (one.cached_len, life.shared.asked.num_failed, life.shared.counts.num_opened) == (0, 1, 1)
    num_lookups = life.shared.asked.num_lookups
    other = life.ask(TEXT)
    assert (other.cached_len, life.shared.asked.num_lookups) == (0, num_lookups), "nobody else is kept waiting"
    for each in (one, other):
        life.cache.drop(each)
    store.error = None
    assert found_in(life) == WHOLE


def test_a_store_that_is_dead_at_the_start_keeps_no_worker_from_starting(new_life: NewLife, store: OddStore) -> None:
    store.error = OSError("connection refused")
    life = new_life()
    life.compute(TEXT)
    life.finish_writes()
    assert (store.runs(), life.shared.counts.written.num_pages) == ({}, 0)
    assert life.shared.counts.written.num_failed + life.shared.counts.written.num_dropped == WHOLE // PAGE


def test_a_store_that_hangs_costs_a_request_a_share_of_its_computing(
    new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_objects, "READ_S", 0.05)
    one_life(new_life())
    life = new_life()
    life.cache.compute_s = lambda start, end: 100.0
    know_the_store(life)
    store.opens.clear()
    request = life.request(TEXT)
    assert not life.cache.admit(request)
    assert request.restore is not None
    assert request.restore.until_s == pytest.approx(3.0)
    life.cache.tree.at(request.restore.until_s)
    assert life.cache.admit(request)
    assert request.cached_len == 0
    life.cache.drop(request)
    while life.shared.look_up_s < math.inf:
        life.shared.restored()
    assert life.shared.counts.num_opened == 1
    before = life.pool.copy()
    store.opens.set()
    know_the_store(life)
    assert (life.pool == before).all(), "nobody wants what comes late"


def test_a_load_that_hangs_is_given_up(new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_objects, "READ_S", 0.05)
    one_life(new_life())
    life = new_life()
    know_the_store(life)
    one = life.request(TEXT)
    assert not life.cache.admit(one)
    assert one.restore is not None
    life.wait_for(one.restore)
    store.opens.clear()
    assert not life.cache.admit(one)  # and now it loads
    life.wait_for(one.restore)
    assert life.cache.admit(one)
    assert (one.cached_len, life.shared.counts.read.num_failed) == (0, 1)
    life.cache.drop(one)


def test_a_store_that_takes_nothing_keeps_nobody_waiting(
    new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_objects, "NUM_BUFFERS", 2)
    life = new_life()
    know_the_store(life)
    store.opens.clear()
    life.cache.compute_s = lambda start, end: 0.0  # nothing is asked for
    life.compute([0, *TEXT])  # which returns
    assert life.shared.counts.written.num_dropped == (NUM_RUNS - 2) * RUN
    store.opens.set()
    life.finish_writes()
    store.opens.clear()
    life.compute([0, *TEXT], num_uses=1)
    store.opens.set()
    life.finish_writes()
    assert len(store.runs()) == 4, "what was dropped is given again, as far as there is room"


def test_who_computes_sooner_than_a_store_answers_does_not_ask(new_life: NewLife) -> None:
    one_life(new_life())
    life = new_life()
    know_the_store(life)
    life.cache.compute_s = lambda start, end: 1e-9
    assert found_in(life) == 0
    assert life.shared.asked.num_lookups == 0


def test_an_answer_that_nobody_hears_at_once_did_not_take_longer(new_life: NewLife) -> None:
    one_life(new_life())
    now_s = [0.0]
    life = new_life(clock=lambda: now_s[0])
    know_the_store(life)
    request = life.request(TEXT)
    assert not life.cache.admit(request)
    waited = threading.Event()
    while not life.objects.asker._done:
        waited.wait(0.001)
    now_s[0] = 0.9
    life.shared.restored()
    assert request.lookup is not None
    assert request.lookup.is_answered
    assert life.shared.look_up_s < 0.1


def test_a_short_text_is_given_when_it_is_used_again(new_life: NewLife, store: OddStore) -> None:
    life = new_life()
    one_life(life, num_uses=1)
    assert store.runs() == {}
    one_life(life, num_uses=1)
    assert len(store.runs()) == NUM_RUNS


@pytest.mark.parametrize("is_being_written", [True, False])
def test_what_is_distrusted_is_deleted(is_being_written: bool, new_life: NewLife, store: OddStore) -> None:
    life = new_life()
    know_the_store(life)
    if is_being_written:
        life.compute(TEXT, num_uses=1)
        store.opens.clear()
        life.cache.compute_s = lambda start, end: 0.0
        life.compute(TEXT, num_uses=1)
    else:
        one_life(life)
    one = life.ask(TEXT)
    life.cache.distrust(one)
    life.cache.drop(one)
    store.opens.set()
    life.finish_writes()
    assert store.runs() == {}
    assert found_in(new_life()) == 0


def test_what_is_flushed_is_deleted_by_the_names_of_runs_alone(new_life: NewLife, store: OddStore) -> None:
    life = new_life()
    one_life(life)
    life.compute([*TEXT[:13], 99, 98, 97, 96])  # which parts from it inside a run
    life.finish_writes()
    names = {*store.runs()}
    assert len(names) == NUM_RUNS + 1
    life.cache.flush()
    life.finish_writes()
    assert sorted(store.deleted) == sorted(names)
    assert store.runs() == {}


def test_what_cannot_be_deleted_is_found_by_nobody_here_and_is_deleted_later(
    new_life: NewLife, store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(page_writer, "DROP_S", 0.01)
    life = new_life()
    one_life(life)
    store.delete_error = OSError("slow down")
    life.cache.flush()
    assert found_in(life) == 0
    life.compute(TEXT)
    while life.objects.writer._queue.pending:  # or it is written behind what is deleted below, as it should be
        threading.Event().wait(0.001)
    life.evict_pool()
    assert found_in(life) == 0, "nor what is there when it is given again"
    assert len(store.runs()) == NUM_RUNS
    store.delete_error = None
    while store.runs():  # what was given up is tried again after a pause
        life.finish_writes()


def test_an_answer_that_comes_behind_a_flush_is_not_believed(new_life: NewLife, store: OddStore) -> None:
    one_life(new_life())
    life = new_life()
    know_the_store(life)
    ids = page_ids(life.request(TEXT).tokens)
    store.opens.clear()
    lookup = life.shared.look_up(0, ids, math.inf)
    assert lookup is not None
    life.shared.forget_runs(ids, ids[RUN - 1 :: RUN])
    assert life.shared.look_up(0, ids, math.inf) is None, "it would be there until it is deleted"
    store.opens.set()
    life.wait_for(lookup)
    assert life.shared.num_pages == 0
    life.finish_writes()
    assert store.runs() == {}


def test_an_object_that_is_bad_is_deleted_and_not_the_one_that_shares_its_pages(
    new_life: NewLife, store: OddStore
) -> None:
    life = new_life()
    know_the_store(life)
    life.compute(TEXT)
    life.finish_writes()
    ids, bad = page_ids(life.request(TEXT).tokens), {*store.runs()}
    life.compute([*TEXT[:RUN], *TEXT])
    life.finish_writes()
    sound = {*store.runs()} - bad
    (name,) = [name for name in bad if name.endswith(ids[RUN - 1].key.hex())]
    life.objects.reader._source.lose(Run(name, 0, ids[:1], [0]), ids[0])
    assert life.shared.restored() == ()
    life.finish_writes()
    assert {*store.runs()} == sound | bad - {name}


def test_who_asks_for_answers_while_one_is_being_told_waits_for_that(
    store: OddStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_telling, goes_on = threading.Event(), threading.Event()
    write = os.eventfd_write

    def slow_write(descriptor: int, value: int) -> None:
        is_telling.set()
        assert goes_on.wait(SOON_S)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", slow_write)
    asker = ObjectAsker(store, lambda: 0.0)
    asker.ask(Asked(["a"], 0, [PageId(0, 1, 0, bytes(16))]), math.inf)
    assert is_telling.wait(SOON_S)
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(asker.answered)
        wait([heard], timeout=0.02)
        goes_on.set()
        assert len(heard.result(SOON_S)) == 1
    assert select.select([asker], [], [], 0)[0] == [], "or an idle loop would spin"
    asker.close()


def test_writers_that_share_a_directory_stay_near_its_bytes(store: OddStore) -> None:
    now_s, size, capacity = 0.0, 10, 16_960  # of 1,696 runs
    rooms = [Room(store, capacity, lambda: now_s) for _ in range(8)]
    most = 0
    for number in range(500):
        now_s += 0.5
        for room_number, room in enumerate(rooms):
            room.make(size)
            store.write(f"{room_number}/{number}", memoryview(bytes(size)))
        most = max(most, size * len(store.objects))
    assert 0.8 * capacity < most <= capacity


def test_a_medium_that_is_full_within_its_bytes_gets_room_at_once(
    small_room: Room, new_life: NewLife, store: OddStore
) -> None:
    life = new_life(room=small_room)
    one_life(life)
    store.write_error = OSError(errno.ENOSPC, "no space left")
    life.compute([0, *TEXT[:9]])
    life.finish_writes()
    assert 0 < len(store.runs()) < NUM_RUNS


@pytest.fixture
def small_room(store: OddStore) -> Room:
    return Room(store, 12 * RUN_NBYTES + MIB)  # and the probe


def test_a_directory_is_kept_within_its_bytes_and_the_oldest_goes(
    small_room: Room, new_life: NewLife, store: OddStore
) -> None:
    life = new_life(room=small_room)
    know_the_store(life)
    for number in range(8):
        life.compute([number, *TEXT])
        life.finish_writes()
        assert sum(map(len, store.objects.values())) <= 12 * RUN_NBYTES + MIB
    newest = page_ids(life.request([7, *TEXT]).tokens)[WHOLE // PAGE - 1].key.hex()
    assert any(name.endswith(newest) for name in store.objects)


def test_nothing_more_is_written_to_a_directory_that_lists_nothing(
    small_room: Room, new_life: NewLife, store: OddStore
) -> None:
    store.lists = False
    life = new_life(room=small_room)
    know_the_store(life)
    for number in range(8):
        life.compute([number, *TEXT])
        life.finish_writes()
    assert life.shared.counts.written.num_failed >= RUN
    assert len(store.runs()) < 8 * NUM_RUNS


def test_files_are_asked_before_the_store_and_both_may_have_parts(new_life: NewLife, tmp_path: Path) -> None:
    def files(life_pool: Any) -> FileTier:
        return FileTier(PageFiles(tmp_path, RECORD, MIB, life_pool, life_pool))

    one_life(new_life())
    life = new_life(files=files)
    know_the_store(life)
    life.compute(TEXT[: 6 * PAGE + 1])
    life.evict_all()
    waited = threading.Event()
    while life.tiers[0].load_s(1) == math.inf:
        waited.wait(0.001)
    before = [*life.cache.counts.found_tokens]
    assert found_in(life) == WHOLE
    found = [after - each for after, each in zip(life.cache.counts.found_tokens, before, strict=True)]
    assert found == [0, 6 * PAGE, WHOLE - 6 * PAGE]
    for _ in range(3):
        life.evict_all()
        assert found_in(life) == WHOLE


def test_names_of_objects_are_of_terms_and_proof() -> None:
    last = PageId(0, 7, 6, bytes(range(16)))
    name = object_name("ab", last)
    assert name == f"ab/{last.key[:1].hex()}/{last.key.hex()}"
    assert PAGE_NBYTES < RUN_NBYTES
