"""What decides about tiers: the format of pages, who is let in, and when a medium is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diptych.engine.cache.page_ids import PageId, groups
from diptych.engine.tiers.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from diptych.engine.tiers.doorkeeper import LONG_TOKENS, Doorkeeper
from diptych.engine.tiers.page_format import HEADER_NBYTES, header, is_sound, rank_terms, terms_digest, whose
from diptych.engine.tiers.runs import MOST_ENDS, WIDTH, RunIndex, RunSearch, TextSearch, in_folders, run_pages
from diptych.engine.tiers.segments import TRAILER_NBYTES, Location, SegmentFormat, SegmentIndex, Table
from diptych.engine.tiers.stores.object_room import surplus
from diptych.engine.tiers.stores.object_store import Entry

TERMS = terms_digest({"weights": "a"})
PAGE = PageId(3, 5, 4, bytes(range(16)))
DATA = bytes(range(256)) * 4


def test_a_header_is_that_of_its_page_alone() -> None:
    found = header(TERMS, PAGE, DATA)
    assert len(found) == HEADER_NBYTES
    assert whose(found, TERMS, len(DATA)) == PAGE
    assert is_sound(found, TERMS, PAGE, DATA)
    others = [PAGE._replace(group=2), PAGE._replace(name=6), PAGE._replace(parent=5), PAGE._replace(proof=bytes(16))]
    assert not any(is_sound(found, TERMS, other, DATA) for other in others)
    assert not is_sound(found, terms_digest({"weights": "b"}), PAGE, DATA)
    assert not is_sound(found, TERMS, PAGE, DATA[:-1] + b"\0")
    assert whose(found, terms_digest({"weights": "b"}), len(DATA)) is None
    assert whose(found, TERMS, len(DATA) + 1) is None


def test_ranks_have_terms_and_folders_of_their_own() -> None:
    folders = [rank_terms(TERMS, rank).hex() for rank in range(3)]
    assert folders[0] == TERMS.hex()
    assert len({*folders}) == 3
    assert in_folders(f"{folders[0]}/ab/abcd", folders[1:]) == [f"{folder}/ab/abcd" for folder in folders]


def test_every_group_of_a_model_has_a_number_of_its_own() -> None:
    assert groups(2, 3) == (0, 1, 2, 0x8000, 0x8001, 0x8002)


def test_terms_that_could_differ_between_processes_are_no_terms() -> None:
    assert terms_digest({"layers": frozenset({3, 1})}) == terms_digest({"layers": frozenset({1, 3})})
    with pytest.raises(TypeError, match="no form in JSON"):
        terms_digest({"model": object()})


@pytest.mark.parametrize("number", [0, 17, 700])
def test_a_footer_is_read_as_it_was_written_or_not_at_all(number: int) -> None:
    record = SegmentFormat(TERMS, 1024)
    table = Table([number.to_bytes(18, "little") for number in range(number)], [*range(0, number * 1152, 1152)])
    data = record.footer(8192, table)
    trailer = data[-TRAILER_NBYTES:]
    where = record.table_range(trailer, 8192 + len(data))
    assert where is not None
    begin, end = (at - 8192 for at in where)
    read = record.read_table(data[begin:end], trailer)
    assert read is not None
    assert (read.keys, [*read.offsets]) == (table.keys, table.offsets)
    assert SegmentFormat(bytes(16), 1024).table_range(trailer, 8192 + len(data)) is None
    if number:
        assert record.read_table(data[begin : end - 1] + b"\xff", trailer) is None


def test_an_index_forgets_with_a_segment_what_is_only_there() -> None:
    index = SegmentIndex(1 << 20, 1024)
    one, two = b"1" * 18, b"2" * 18
    index.add(1, Table([one, two], [0, 1024]), 4096)
    index.add(2, Table([two], [0]), 4096)
    assert index.holding([two]) == [1, 2]
    index.drop(1)
    assert (index.find(one), index.find(two), index.nbytes) == (None, (2, 0), 4096)
    assert index.excess(1 << 20) == [], "the newest stays, to which is written"


class _Losing(dict[bytes, int]):
    """Loses what is asked for: as by another thread, at once after the answer."""

    def get(self, key: bytes, default: Any = None) -> Any:
        return self.pop(key, default)


def test_an_index_lets_pages_be_lost_and_segments_go_while_others_ask() -> None:
    index = SegmentIndex(1 << 20, 1024)
    index.add(1, Table([b"1" * 18], [0]), 1 << 20)
    index._at = _Losing(index._at)
    index.drop(1)
    assert index.num_pages == 0
    index.nbytes = 1 << 20  # as somebody may see it who asked before the segments went
    assert not index.is_old(Location(1, 0))


def test_a_breaker_pauses_for_longer_each_time_and_one_tries() -> None:
    breaker, pause_s, now_s = Breaker(), FIRST_PAUSE_S, 100.0
    breaker.fail(now_s)
    breaker.fail(now_s)  # of others that were asked before
    while pause_s < LONGEST_PAUSE_S:
        assert not breaker.allows(now_s + pause_s - 0.1)
        now_s += pause_s
        assert breaker.allows(now_s)
        breaker.begin(now_s)
        assert not breaker.allows(now_s)
        breaker.fail(now_s)
        pause_s *= 2
    breaker.begin(now_s + LONGEST_PAUSE_S)
    breaker.succeed()
    assert breaker.is_closed
    assert breaker.num_opened == 1


def test_a_doorkeeper_lets_in_what_comes_again_or_is_long_and_forgets() -> None:
    keeper = Doorkeeper(4)
    one, other = np.array([7, 8], np.uint64), np.array([9], np.uint64)
    assert keeper.admits(one, 2, 16)
    assert keeper.admits(other, 1, LONG_TOKENS)
    assert not keeper.admits(one, 1, 16)
    assert keeper.admits(one[1:], 1, 16), "any part of it"
    for name in range(20, 24):
        keeper.admits(np.array([name], np.uint64), 1, 16)
    assert not keeper.admits(one, 1, 16)


@pytest.mark.parametrize(
    ("page_size", "record_nbytes", "expected"),
    [
        (16, 65536, 16),
        (16, 2**21, 4),
        (16, 5 * 2**20, 1),
        (16, 2**25, 1),
        (64, 1000, 4),
        (512, 1000, 1),
        (12, 900, 16),
    ],
)
def test_a_run_has_256_tokens_or_8_mib_or_a_page(page_size: int, record_nbytes: int, expected: int) -> None:
    assert run_pages(page_size, record_nbytes) == expected


@pytest.mark.parametrize("num_runs", [1, 2, 7, 8, 9, 80, 800])
def test_a_search_finds_how_many_runs_are_there_in_few_turns(num_runs: int) -> None:
    for num_there in {0, 1, num_runs // 2, num_runs - 1, num_runs}:
        search, num_turns = RunSearch(num_runs), 0
        while not search.is_over:
            asked = search.to_ask()
            assert len(asked) <= WIDTH
            search.tell([(run, run < num_there) for run in asked])
            num_turns += 1
        assert search.num_found == num_there
        assert num_turns <= (1 if num_there == 0 else 4)


@pytest.mark.parametrize(
    ("num_runs", "there"), [(3, {1}), (3, {0, 2}), (3, set()), (100, {97, 50}), (100, {75}), (100, {9})]
)
def test_a_search_finds_the_last_end_behind_the_runs_that_are_there(num_runs: int, there: set[int]) -> None:
    search, num_asked = TextSearch(num_runs + 5, range(num_runs + 5)), 0
    while not search.is_over:
        asked = search.to_ask()
        assert len(asked) <= WIDTH
        num_asked += sum(number >= num_runs + 5 for number in asked)
        search.tell(
            [(each, each < num_runs if each < num_runs + 5 else each - num_runs - 5 in there) for each in asked]
        )
    assert (search.num_found, search.end) == (num_runs, max(there - {*range(num_runs - MOST_ENDS)}, default=None))
    assert num_asked <= MOST_ENDS


def test_a_text_without_runs_or_ends_is_not_asked_for_ends() -> None:
    for search in (TextSearch(2, [0, 1]), TextSearch(2, [])):
        search.tell([(run, not search._ends) for run in search.to_ask()])
        assert (search.is_over, search.end) == (True, None)


def test_an_index_of_runs_forgets_what_is_old_and_what_is_too_much() -> None:
    index = RunIndex(most_pages=4)
    ids = [PageId(0, number, 0, bytes([number]) * 16) for number in range(8)]
    index.add("a", 1, ids[:2], until_s=10.0)
    assert index.find(ids[1], 9.0) == ("a", 2)
    assert index.find(ids[1], 10.0) is None
    assert index.run_of(ids[1]) == "a", "it may have to be deleted"
    index.add("a", 0, ids[:3], until_s=20.0)
    assert (index.find(ids[0], 10.0), index.num_pages) == (("a", 0), 3)
    index.add("a", 2, ids[2:3], until_s=30.0)
    assert index.find(ids[0], 25.0) == ("a", 0), "what is known of its beginning stays"
    index.add("b", 0, ids[4:8], until_s=20.0)
    assert (index.find(ids[0], 0.0), index.num_pages) == (None, 4)


def test_an_index_of_runs_finds_what_two_of_them_have_in_the_one_that_is_left() -> None:
    index = RunIndex(most_pages=8)
    ids = [PageId(0, number, 0, bytes([number]) * 16) for number in range(4)]
    index.add("a", 0, ids[:3], until_s=10.0)
    index.add("b", 0, [*ids[:2], ids[3]], until_s=10.0)
    index.drop("a")
    assert [index.find(each, 0.0) for each in ids] == [("b", 0), ("b", 1), None, ("b", 2)]
    index.add("a", 0, ids[:3], until_s=10.0)
    index.add("b", 0, [*ids[:2], ids[3]], until_s=20.0)
    assert index.find(ids[0], 15.0) == ("b", 0), "what is added again is found there"
    assert index.refind("a", 0, 9.0)
    index.drop("b")
    assert [index.find(each, 0.0) for each in ids] == [("a", 0), ("a", 1), ("a", 2), None]
    assert not index.refind("a", 0, 10.0)
    assert not index.refind("b", 0, 0.0)


def test_the_oldest_objects_go_from_a_directory_and_some_room_is_left() -> None:
    entries = [Entry(f"{age}", 10, float(age)) for age in (3, 1, 2, 4)]
    assert surplus(entries, 50, 10) == []
    assert surplus(entries, 40, 10) == ["1", "2"]
    assert surplus(entries, 15, 10) == ["1", "2", "3", "4"]
