"""Which encode worker gets an image."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

from diptych.router.choose.encoders import MAX_OPEN, SLACK, encoders_of

DIGESTS = [sha256(bytes([number])).digest() for number in range(200)]
IDLE = {1: 0, 2: 0, 3: 0, 4: 0}


def test_images_are_shared_out_and_each_goes_to_the_same_worker_again() -> None:
    first = [encoders_of(digest, IDLE)[0] for digest in DIGESTS]
    assert [encoders_of(digest, IDLE)[0] for digest in DIGESTS] == first
    assert min(Counter(first).values()) > len(DIGESTS) // 8


def test_when_a_worker_goes_only_its_images_go_elsewhere() -> None:
    left = {worker: 0 for worker in IDLE if worker != 2}
    moved = [digest for digest in DIGESTS if encoders_of(digest, IDLE)[0] != encoders_of(digest, left)[0]]
    assert moved
    assert all(encoders_of(digest, IDLE)[0] == 2 for digest in moved)


def test_who_has_much_more_to_do_than_others_comes_last() -> None:
    best = encoders_of(DIGESTS[0], IDLE)[0]
    assert encoders_of(DIGESTS[0], IDLE | {best: SLACK})[0] == best
    assert encoders_of(DIGESTS[0], IDLE | {best: SLACK + 1})[-1] == best


def test_nobody_is_asked_who_has_as_many_images_as_may_wait() -> None:
    assert encoders_of(DIGESTS[0], {1: MAX_OPEN, 2: MAX_OPEN - 1}) == [2]
    assert encoders_of(DIGESTS[0], {1: MAX_OPEN}) == []
    assert encoders_of(DIGESTS[0], {}) == []
