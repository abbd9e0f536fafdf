from __future__ import annotations

import random

import pytest

from diptych.common.members.neighbours import neighbours


def drawn(num_members: int) -> list[int]:
    """Return as many instance ids."""
    rng = random.Random(num_members)
    return [rng.getrandbits(64) for _ in range(num_members)]


@pytest.mark.parametrize("most", [0, 2, 8])
@pytest.mark.parametrize("num_members", [2, 9, 10, 40])
def test_both_ends_of_a_link_name_each_other_and_nobody_has_many(num_members: int, most: int) -> None:
    members = drawn(num_members)
    named = {each: neighbours(each, set(members) - {each}, most) for each in members}
    assert all(each in named[other] for each, others in named.items() for other in others)
    assert {len(others) for others in named.values()} == {min(most, num_members - 1)}


def test_who_comes_between_two_changes_the_links_of_few() -> None:
    members = drawn(40)
    new, *known = members
    changed = [
        each for each in known if neighbours(each, {*known} - {each}, 8) != neighbours(each, {*members} - {each}, 8)
    ]
    assert len(changed) == 8
    assert set(changed) == neighbours(new, known, 8)
