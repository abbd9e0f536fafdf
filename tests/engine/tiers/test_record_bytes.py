"""Pages that C copies have the headers that `page_format` makes, and only sound ones are told as such."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.engine.cache.page_ids import NOBODYS, PageId
from diptych.engine.tiers.page_format import HEADER_NBYTES, PageFormat, header
from diptych.engine.tiers.record_bytes import LEAST_PAGE_NBYTES, READ_RECORDS, Gatherer, Landing

SIZES = [LEAST_PAGE_NBYTES, 255, 256, 512, 1023, 1024, 1025, 1088, 4096, 16384, 16392, 65536, 300_000]
NUM_PAGES = READ_RECORDS + 5


def scene(nbytes: int) -> tuple[PageFormat, Any, list[PageId], list[int], bytes]:
    """Return a format, a pool with a gap behind each page, ids of pages, their places, and their records."""
    rng, record = np.random.default_rng(nbytes), PageFormat(b"terms of 16 byte", nbytes)
    pool = rng.integers(0, 256, (NUM_PAGES + 2, nbytes + 8), np.uint8)[:, :nbytes]
    ids = [PageId(number % 3, number + 2**63, number, rng.bytes(16)) for number in range(NUM_PAGES)]
    places = rng.permutation(NUM_PAGES + 2)[:NUM_PAGES].tolist()
    rows = [pool[place].tobytes() for place in places]
    return (
        record,
        pool,
        ids,
        places,
        b"".join(header(record.terms, page_id, row) + row for page_id, row in zip(ids, rows, strict=True)),
    )


@pytest.mark.parametrize("nbytes", SIZES)
def test_records_are_those_of_the_format_and_land_where_they_were_however_they_come(
    nbytes: int, tmp_path: Path
) -> None:
    record, pool, ids, places, expected = scene(nbytes)
    out = bytearray(len(expected))
    Gatherer(record, pool).gather(memoryview(out), ids, places)
    assert out == expected
    before = pool.copy()
    (tmp_path / "file").write_bytes(b"before!" + expected)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    landing = Landing(record, pool)
    for step in (None, max(1, nbytes // 3), 64, len(expected)):
        if step == 64 and nbytes > 5000:
            continue
        pool[places] = 0
        landing.begin(ids, places)
        if step is None:
            landing.read_cached(descriptor, len(b"before!"))
        while landing.num_left:
            landing.take(out[landing.num_taken : landing.num_taken + (step or 1000)])
        assert landing.unsound() == []
        assert np.array_equal(pool, before)
    os.close(descriptor)


@pytest.mark.parametrize("at", [0, 9, 16, 40, 50, 60, 64, 79, 100, 121, 127, HEADER_NBYTES, HEADER_NBYTES + 511])
def test_any_bit_that_differs_is_seen_and_of_that_page_alone(at: int) -> None:
    record, pool, ids, places, expected = scene(512)
    data, landing = bytearray(expected), Landing(record, pool)
    data[3 * record.record_nbytes + at] ^= 1
    landing.begin(ids, places)
    landing.take(data)
    assert landing.unsound() == [3]


def test_what_has_not_come_or_is_of_another_is_not_sound() -> None:
    record, pool, ids, places, expected = scene(512)
    landing = Landing(record, pool)
    landing.begin(ids, places)
    landing.take(expected[: 2 * record.record_nbytes - 1])
    assert (landing.unsound(), landing.num_left) == ([*range(1, NUM_PAGES)], len(expected) - landing.num_taken)
    landing.begin([*ids[:-1], NOBODYS], places)
    landing.take(expected + b"more than is wanted")
    assert (landing.unsound(), landing.num_left) == ([NUM_PAGES - 1], 0)


def test_a_file_that_cannot_be_read_is_an_error() -> None:
    record, pool, ids, places, _ = scene(512)
    landing = Landing(record, pool)
    landing.begin(ids, places)
    with pytest.raises(OSError, match="Bad file descriptor"):
        landing.read_cached(-1, 0)
