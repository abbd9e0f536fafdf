"""What decides about tiers: the format of pages, who is let in, and when a medium is asked."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.page_ids import PageId, groups
from diptych.engine.tiers.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from diptych.engine.tiers.doorkeeper import LONG_TOKENS, Doorkeeper
from diptych.engine.tiers.page_format import HEADER_NBYTES, header, is_sound, terms_digest, whose
from diptych.engine.tiers.segments import TRAILER_NBYTES, SegmentFormat, SegmentIndex, Table

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
