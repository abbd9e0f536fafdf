"""The hand-off under every fault: random games of whole clusters, with the rules checked at every move.

A game that breaks a rule tells its seed and its last moves; `DIPTYCH_PROTOCOL_SEED` plays one seed again.
"""

from __future__ import annotations

import os
import random
import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.play import MOODS, Game, Mood, seeded

SEEDS = range(2 * len(MOODS))
MOVES = 5800
REPLAYED = os.environ.get("DIPTYCH_PROTOCOL_SEED")


def test_a_hundred_thousand_moves_are_played() -> None:
    assert len(SEEDS) * MOVES >= 100_000


@pytest.mark.parametrize("seed", SEEDS)
def test_no_rule_is_broken_whatever_happens(seed: int) -> None:
    game = seeded(seed)
    game.run(MOVES)
    finished = [attempt for attempt in game.cluster.attempts.values() if attempt.decode.has_finished]
    assert len(finished) > 50
    assert game.cluster.network.num_copies > 200


def test_no_rule_is_broken_with_a_seed_that_nobody_has_seen() -> None:
    seeded(int(REPLAYED) if REPLAYED else secrets.randbits(32)).run(MOVES)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(mood=st.sampled_from(MOODS), rng=st.randoms(use_true_random=False))
def test_no_rule_is_broken_in_short_games(mood: Mood, rng: random.Random) -> None:
    """The moves are drawn by hypothesis, which finds a shorter game when one breaks a rule."""
    Game(rng, mood, "drawn").run(60)


def test_a_seed_plays_the_same_game_again() -> None:
    one, two = (seeded(7) for _ in range(2))
    for game in (one, two):
        game.run(1000)
    stories = [[(a.room, a.prefill.outputs, a.decode.outputs) for a in g.cluster.attempts.values()] for g in (one, two)]
    assert stories[0] == stories[1]
