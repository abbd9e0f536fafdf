from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.host_pages import HostPages
from diptych.kvtransfer.ownership import Pages

PAGE_NBYTES = 8


def page_list(*pages: int) -> Pages:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("order", [(3, 4, 5, 1), (1,), (5, 4, 3), (1, 2, 3)])
def test_pages_come_back_to_wherever_they_are_wanted(order: tuple[int, ...]) -> None:
    buffer = bytearray(range(8 * PAGE_NBYTES))
    before = np.frombuffer(bytes(buffer), np.uint8).reshape(8, PAGE_NBYTES)
    host = HostPages(memoryview(buffer), PAGE_NBYTES, 4)
    slots = page_list(*range(len(order)))
    host.save(page_list(*order), slots)
    assert host.restore(0, slots, page_list(*range(len(order))))
    after = np.frombuffer(buffer, np.uint8).reshape(8, PAGE_NBYTES)
    assert after[: len(order)].tolist() == before[list(order)].tolist()


def test_a_slot_listed_twice_has_the_last_page() -> None:
    buffer = bytearray(range(3 * PAGE_NBYTES))
    host = HostPages(memoryview(buffer), PAGE_NBYTES, 1)
    host.save(page_list(1, 2), page_list(0, 0))
    host.restore(0, page_list(0), page_list(0))
    assert buffer[:PAGE_NBYTES] == bytes(range(2 * PAGE_NBYTES, 3 * PAGE_NBYTES))
