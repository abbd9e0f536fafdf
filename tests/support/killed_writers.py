"""Kills writers of a segment log again and again, and says what was found behind them.

    python killed_writers.py FOLDER ROUNDS

Processes are forked before they have threads. Each writes pages for ever, and tells of each write that has ended; it
is killed behind some of these, in the middle of the next ones. Prints how many pages were told of, found, and wrong.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Final

import numpy as np

from diptych.engine.cache.page_ids import PageId
from diptych.engine.tiers.disk import Disk
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import HEADER_NBYTES, is_sound
from diptych.engine.tiers.segment_log import SegmentLog
from diptych.engine.tiers.segments import SegmentFormat

RECORD: Final = SegmentFormat(b"terms of 16 byte", 65536)
CAPACITY: Final = 256 * 2**20
BURST: Final = 32  # pages that are given at once


def page_id(turn: int, number: int) -> PageId:
    return PageId(0, number, max(0, number - 1), turn.to_bytes(8, "little") + number.to_bytes(8, "little"))


def payload(one: PageId) -> bytes:
    return np.random.default_rng([*one.proof]).bytes(RECORD.page_nbytes)


def write_for_ever(folder: Path, turn: int, told: int) -> None:
    pages = np.zeros((BURST, RECORD.page_nbytes), np.uint8)
    writer = PageFiles(folder, RECORD, CAPACITY, pages, pages).writer
    number = 0
    while True:
        ids = [page_id(turn, number + at) for at in range(BURST)]
        for page, one in zip(pages, ids, strict=True):
            page[:] = np.frombuffer(payload(one), np.uint8)
        number += writer.give(ids, range(BURST))
        writer.submit()
        os.write(told, writer.counts.num_pages.to_bytes(4, "little"))


def killed(folder: Path, turn: int, rng: random.Random) -> int:
    """Return how many pages a writer had written, as it said, when it was killed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        write_for_ever(folder, turn, send)
    os.close(send)
    num_told = 0
    for _ in range(rng.randrange(1, 5)):
        num_told = int.from_bytes(os.read(receive, 4), "little")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(receive)
    return num_told


def found(folder: Path, turn: int) -> tuple[int, int]:
    """Return how many pages of a turn are found, one behind the other, and how many of them are wrong."""
    log = SegmentLog(folder, RECORD, CAPACITY, Disk())
    number = num_wrong = 0
    while (at := log.find(page_id(turn, number).key)) is not None:
        one = page_id(turn, number)
        with open(at[0], "rb") as file:
            data = os.pread(file.fileno(), RECORD.record_nbytes, at[1])
        num_wrong += not is_sound(data[:HEADER_NBYTES], RECORD.terms, one, data[HEADER_NBYTES:])
        num_wrong += data[HEADER_NBYTES:] != payload(one)
        number += 1
    log.drop(log.index.segments)
    log.close()
    return number, num_wrong


def main() -> None:
    folder, rng = Path(sys.argv[1]), random.Random(7)
    num_told = num_found = num_wrong = 0
    for turn in range(int(sys.argv[2])):
        told = killed(folder, turn, rng)
        here, wrong = found(folder, turn)
        assert here >= told, (turn, here, told)
        num_told, num_found, num_wrong = num_told + told, num_found + here, num_wrong + wrong
    print(num_told, num_found, num_wrong)


if __name__ == "__main__":
    main()
