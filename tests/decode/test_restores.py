"""A prefix that a tier brings back late: its request waits, others go on, and however that ends nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from null_runner import expected_output
from slow_tier import SlowTier, Stored
from stepped_engine import PAGE, VOCAB, Engine

from diptych.common.arrays import U64
from diptych.generation.output import FailureCode

NewEngine = Callable[..., Engine]

PROMPT = list(range(100, 100 + 5 * PAGE + 1))  # five whole pages, and a token
OTHER = list(range(40))


class Tiered:
    """An engine of 11 pages over a slow tier, in which PROMPT's prefix is."""

    def __init__(self, new_engine: NewEngine, num_slots: int = 16) -> None:
        self.engine = new_engine(num_pages=12, tiers=self._tiers(num_slots))
        self.engine.start(1, PROMPT, 1)
        self.engine.run()
        self.engine.start(2, OTHER, 4)  # takes all pages
        self.engine.run()
        assert self.engine.cache.cached_len(self.engine.start(3, PROMPT, 3)) == 5 * PAGE

    def _tiers(self, num_slots: int) -> Callable[[U64], list[SlowTier]]:
        def build(kv: U64) -> list[SlowTier]:
            self.tier = SlowTier(num_slots, kv)
            return [self.tier]

        return build

    def answer(self, error: str | None = None) -> None:
        self.engine.core.handle(self.tier.answer(error), self.engine.now_s)

    def num_cached_tokens(self, room: int) -> int:
        stats = self.engine.outputs[room][0].stats
        assert stats is not None
        return stats.cached_tokens

    def check_empty(self) -> None:
        """Nothing is held, by requests, tier or cache."""
        cache = self.engine.cache
        assert cache.audit(self.engine.core.report().holders) == []
        assert not cache.is_held
        cache.clear()
        assert (cache.num_available, cache.pool.num_free, self.tier.num_free) == (11, 11, self.tier.capacity)


@pytest.fixture
def tiered(new_engine: NewEngine) -> Tiered:
    return Tiered(new_engine)


def test_a_request_waits_for_its_prefix_while_others_run(tiered: Tiered) -> None:
    engine = tiered.engine
    engine.start(4, [1, 2, 3], 6)
    engine.run()  # ends, for nothing is left to do before the tier answers
    assert engine.tokens(3) == []
    assert engine.tokens(4) == expected_output([1, 2, 3], 6, VOCAB)
    assert engine.core.next_deadline_s() is None, "an event wakes it, not the clock"
    tiered.answer()
    engine.run()
    assert engine.tokens(3) == expected_output(PROMPT, 3, VOCAB)
    assert (tiered.num_cached_tokens(3), tiered.tier.num_asked) == (5 * PAGE, 1)
    assert engine.cache.moves.num_restored == 5
    tiered.check_empty()


def test_requests_of_one_prefix_wait_for_one_restore(tiered: Tiered) -> None:
    engine = tiered.engine
    engine.start(4, PROMPT, 3)
    engine.start(5, PROMPT[: 3 * PAGE], 3)  # ends within what comes
    engine.run()
    assert (engine.tokens(3), engine.tokens(4), engine.tokens(5)) == ([], [], [])
    tiered.answer()
    engine.run()
    assert engine.tokens(4) == engine.tokens(3) == expected_output(PROMPT, 3, VOCAB)
    assert engine.tokens(5) == expected_output(PROMPT[: 3 * PAGE], 3, VOCAB)
    assert tiered.tier.num_asked == 1
    tiered.check_empty()


def test_an_abort_while_waiting_frees_all(tiered: Tiered) -> None:
    engine = tiered.engine
    engine.run()
    engine.abort(3)
    engine.run()
    (output,) = engine.outputs[3]
    assert output.failure is not None
    assert output.failure.code is FailureCode.ABORTED
    assert (engine.core.report().num_open_rooms, engine.cache.num_available) == (0, 11 - 5), (
        "the tier still writes five pages"
    )
    assert engine.cache.is_held
    tiered.answer()
    tiered.check_empty()


def test_a_deadline_ends_the_waiting(tiered: Tiered) -> None:
    engine = tiered.engine
    engine.abort(3)
    engine.start(4, PROMPT, 3, deadline_s=5.0)
    engine.run()
    assert engine.core.next_deadline_s() == 5.0
    engine.now_s = 5.0
    engine.run()
    (output,) = engine.outputs[4]
    assert output.failure is not None
    assert output.failure.code is FailureCode.DEADLINE
    tiered.answer()
    tiered.check_empty()


def test_a_prefix_that_cannot_be_restored_is_forgotten_and_computed(tiered: Tiered) -> None:
    engine = tiered.engine
    engine.run()
    tiered.answer("the file is gone")
    engine.run()
    assert engine.tokens(3) == expected_output(PROMPT, 3, VOCAB)
    assert (engine.cache.moves.num_restored, engine.cache.counts.found_tokens) == (0, [0, 0])
    assert (tiered.num_cached_tokens(3), tiered.tier.num_asked) == (0, 1)
    tiered.check_empty()


def test_retracted_requests_wait_for_their_kv_too(new_engine: NewEngine) -> None:
    tier: list[SlowTier] = []

    def tiers(kv: U64) -> list[SlowTier]:
        tier.append(SlowTier(32, kv))
        return tier

    engine = new_engine(num_pages=12, tiers=tiers)
    engine.expect_short_outputs()
    prompts = {room: [room * 10 + i for i in range(6)] for room in (1, 2, 3)}
    for room, prompt in prompts.items():
        engine.start(room, prompt, max_tokens=30)
    engine.run()
    while tier[0].is_asked:
        engine.core.handle(tier[0].answer(), engine.now_s)
        engine.run()
    assert engine.core.report().counts.retractions > 0
    assert engine.cache.moves.num_restored > 0
    for room, prompt in prompts.items():
        assert engine.tokens(room) == expected_output(prompt, 30, VOCAB)


def test_what_one_cache_has_saved_another_one_finds_by_name(new_engine: NewEngine) -> None:
    stored: Stored = {}
    tier: list[SlowTier] = []

    def tiers(kv: U64) -> list[SlowTier]:
        tier.append(SlowTier(16, kv, stored=stored))
        return tier[-1:]

    first, second = new_engine(num_pages=12, tiers=tiers), new_engine(num_pages=12, tiers=tiers)
    first.start(1, PROMPT, 1)
    first.run()
    first.start(2, OTHER, 4)
    first.run()
    assert len(stored) == 5
    second.start(3, PROMPT, 3)
    second.run()
    assert second.tokens(3) == []
    second.core.handle(tier[1].answer(), 0.0)
    second.run()
    assert second.tokens(3) == expected_output(PROMPT, 3, VOCAB)
    assert tier[1].num_asked == 1
