"""Calls the router's C functions with sizes at which they could go wrong: `drive_c.py SEED ROUNDS`, or `beyond`.

For a process under sanitizers, to which each array is memory of its own. What the functions return is compared with
what Python finds.
"""

from __future__ import annotations

import sys
from random import Random

import numpy as np

from diptych.common.arrays import U64
from diptych.generation.page_hash import page_hashes as slow_page_hashes
from diptych.router.choose import page_chain, page_set
from diptych.router.choose.page_set import PageSet, prefix_lens
from diptych.router.keys.ledger import Ledger, load

EDGES = (0, 1, 2, 3, 7, 8, 31, 47, 48, 49, 63, 64, 65, 95, 96, 97, 1000)  # of tables, and pages of three words


def main(arguments: list[str]) -> None:
    if arguments == ["beyond"]:
        go_beyond()
        return
    seed, num_rounds = map(int, arguments)
    rng = Random(seed)
    for _ in range(num_rounds):
        drive_sets(rng)
        drive_full_tables(rng)
        drive_chains(rng)
        drive_ledger(rng)
    print(f"{num_rounds} rounds")


def drive_sets(rng: Random) -> None:
    pages, model = PageSet(), set[int]()
    for _ in range(4):
        hashes = some_hashes(rng)
        pages.add_chain(hashes) if rng.random() < 0.2 and not model & set(hashes) else pages.add(hashes)
        model |= set(hashes)
        assert len(pages) == len(model)
        gone = rng.sample(sorted(model), min(len(model), rng.choice(EDGES)))
        pages.remove(gone)
        model -= set(gone)
        assert len(pages) == len(model)
        assert prefix_lens([pages, PageSet()], gone) == [0, 0]


def drive_full_tables(rng: Random) -> None:
    """With a single empty slot, so that probing goes around the end."""
    library = page_set.load()
    num_slots = 1 << rng.randint(1, 8)
    table: U64 = np.zeros(num_slots, np.uint64)
    hashes = np.array([rng.getrandbits(64) | 1 for _ in range(num_slots - 1)], np.uint64)
    place = table.ctypes.data, num_slots - 1, hashes.ctypes.data, len(hashes)
    assert library.page_set_add(*place) == len(hashes)
    assert library.page_set_add(*place) == 0
    assert library.page_set_remove(*place) == len(hashes)
    assert not table.any()


def drive_chains(rng: Random) -> None:
    page_size, num_tokens = rng.choice((1, 2, 3, 16, 17, 64, 100)), rng.choice(EDGES)
    whole = np.array([rng.getrandbits(32) for _ in range(num_tokens + 1)], np.uint32)
    token_ids = whole[1:].copy() if rng.random() < 0.5 else whole[1:]  # at an odd place
    assert page_chain.page_hashes(token_ids, page_size).tolist() == list(
        slow_page_hashes(token_ids.astype(np.int64), page_size)
    )
    page_chain.text_hashes(rng.randbytes(num_tokens), 4 * page_size)


def drive_ledger(rng: Random) -> None:
    num_rows, num_processes = rng.choice((1, 2, 3, 7, 64)), rng.choice((1, 2, 5))
    ledger = Ledger(num_processes, num_processes - 1, num_rows=num_rows)
    for index in range(num_rows + 2):  # two do not fit
        account = ledger.account(str(index))
        assert account.places.hold(1, 1)
        assert not account.places.hold(1, 1)
        account.places.release(1)
        account.tokens.charge(rng.getrandbits(60), rng.choice((1, 2**40)), rng.random() * 1e9)
        assert account.tokens.wait_s(1, 1, rng.random()) >= 0
    ledger.forget(num_processes - 1)
    hashes: U64 = np.zeros(num_rows, np.uint64)
    rows = {load().ledger_row(hashes.ctypes.data, num_rows, rng.getrandbits(63) | 1) for _ in range(2 * num_rows + 1)}
    assert rows == {-1, *range(num_rows)}


def some_hashes(rng: Random) -> list[int]:
    bits = rng.choice((6, 40, 64))  # few, so that they meet again; any
    return list(
        dict.fromkeys(rng.getrandbits(bits) << rng.choice((0, 64 - bits)) or 1 for _ in range(rng.choice(EDGES)))
    )


def go_beyond() -> None:
    table: U64 = np.zeros(64, np.uint64)
    hashes: U64 = np.arange(1, 65, dtype=np.uint64)
    page_set.load().page_set_remove(table.ctypes.data, 127, hashes.ctypes.data, len(hashes))


if __name__ == "__main__":
    main(sys.argv[1:])
