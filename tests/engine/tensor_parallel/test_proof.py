from __future__ import annotations

import itertools

from diptych.engine.tensor_parallel.proof import PROOF_BYTES, impostors, proof

SECRET, SIZE = b"s" * 32, 3


def test_every_pair_of_ranks_has_words_of_its_own_in_each_direction() -> None:
    words = {proof(SECRET, writer, reader) for writer, reader in itertools.product(range(SIZE), repeat=2)}
    assert (len(words), {len(each) for each in words}) == (SIZE**2, {PROOF_BYTES})


def test_an_impostor_is_found_whatever_it_repeats_of_what_it_was_shown() -> None:
    honest = [proof(SECRET, writer, 0) for writer in range(SIZE)]
    assert impostors(SECRET, 0, honest) == []
    for false in (bytes(PROOF_BYTES), proof(SECRET, 0, 1), proof(SECRET, 1, 2), proof(b"x" * 32, 1, 0)):
        assert impostors(SECRET, 0, [honest[0], false, honest[2]]) == [1]
