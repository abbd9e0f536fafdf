"""A pair whose page sizes differ, or whose pages land in parts: the null model computes on every KV entry."""

from __future__ import annotations

import random
from typing import Any

import pytest
from null_runner import expected_output

from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import FailureCode

VOCAB = 1000
NO_DIGESTS = TransferRules(integrity="off")
SIZES = [(4, 16), (16, 4), (3, 5), (5, 3), (1, 8), (8, 1)]


def prompts(seed: int) -> list[list[int]]:
    """Some are the beginning of others, so prefixes are cached on both sides, in pages of each one's own size."""
    rng = random.Random(seed)
    longest = [rng.randrange(VOCAB) for _ in range(90)]
    return [longest[: rng.randint(1, 90)] for _ in range(8)]


@pytest.mark.parametrize("page_sizes", SIZES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_entry_arrives_whatever_the_page_sizes(make_pair: Any, page_sizes: tuple[int, int], seed: int) -> None:
    pages = [-(-400 // size) for size in page_sizes]
    pair = make_pair(page_sizes=page_sizes, prefill_pages=pages[0], decode_pages=pages[1])
    for room, prompt in enumerate(prompts(seed), 1):
        pair.start(room, prompt)
        if room % 3 == 0:
            pair.run()
    pair.run()
    for room, prompt in enumerate(prompts(seed), 1):
        assert pair.tokens(room) == expected_output(prompt, 5, VOCAB)
        stats = [side.ended(room).stats for side in (pair.prefill, pair.decode)]
        assert stats[0].pages_moved == stats[1].pages_moved
        assert stats[0].kv_digest == stats[1].kv_digest
    pair.assert_clean()


@pytest.mark.parametrize("rules", [TransferRules(integrity="always"), NO_DIGESTS])
def test_pages_in_parts_are_put_together_before_anybody_reads_them(make_pair: Any, rules: TransferRules) -> None:
    pair = make_pair(in_parts=True, rules=rules)
    for room, prompt in enumerate(prompts(4), 1):
        pair.start(room, prompt)
    pair.run()
    assert [pair.tokens(room) for room in range(1, 9)] == [expected_output(p, 5, VOCAB) for p in prompts(4)]
    pair.assert_clean()


def until_unpacking(pair: Any) -> None:
    """Play until decode wants pages put together."""
    while not any(type(effect).__name__ == "UnpackPages" for effect in pair.decode.outbox):
        assert any([pair.step(pair.prefill), pair.deliver(pair.prefill), pair.deliver(pair.decode)])


def test_a_room_that_is_given_up_while_its_pages_are_put_together_leaves_them_alone_until_then(make_pair: Any) -> None:
    pair = make_pair(in_parts=True)
    pair.start(1, list(range(10)))
    until_unpacking(pair)
    pair.abort(pair.decode, 1)
    assert pair.decode.ended(1).failure.code is FailureCode.ABORTED
    assert pair.decode.cache.pool.counts()["quarantined"] == 3
    pair.run()
    pair.assert_clean()


def test_a_lost_link_does_not_stop_pages_from_being_put_together(make_pair: Any) -> None:
    pair = make_pair(in_parts=True)
    pair.start(1, list(range(10)))
    until_unpacking(pair)
    pair.link_down(pair.decode)
    pair.link_down(pair.prefill)
    pair.run()
    assert pair.decode.core.report().num_open_rooms == 0
    pair.assert_clean()


def test_pages_that_can_not_be_put_together_fail_the_request(make_pair: Any) -> None:
    pair = make_pair(in_parts=True)
    pair.fail_next_unpacking = True
    pair.start(1, list(range(10)))
    pair.run()
    failure = pair.decode.ended(1).failure
    assert (failure.code, "could not be put together: test" in failure.message) == (FailureCode.TRANSFER_FAILED, True)
    pair.assert_clean()
