from __future__ import annotations

import pytest

from diptych.engine.embedded.dispatch.cache_aware import OPEN_TOKENS, CacheAware
from diptych.engine.embedded.dispatch.policy import GroupView, RequestView
from diptych.engine.embedded.dispatch.round_robin import RoundRobin
from diptych.engine.embedded.dispatch.shortest_queue import ShortestQueue

PAGE = 4
ANY = RequestView([1, 2, 3])


def idle(*ranks: int) -> list[GroupView]:
    return [GroupView(rank, 0, 0) for rank in ranks]


def test_round_robin_takes_turns_and_leaves_out_the_dead() -> None:
    policy = RoundRobin()
    assert [policy.choose(idle(0, 1, 2), ANY) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose(idle(0, 2), ANY) for _ in range(3)] == [2, 0, 2]


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        ([GroupView(0, 1, 10), GroupView(1, 9, 5)], 1),  # tokens come first
        ([GroupView(0, 3, 5), GroupView(1, 2, 5)], 1),  # then requests
        ([GroupView(0, 2, 5), GroupView(1, 2, 5)], 0),
    ],
)
def test_the_shortest_queue_is_that_with_the_least_to_compute(groups: list[GroupView], chosen: int) -> None:
    assert ShortestQueue().choose(groups, ANY) == chosen


def test_prompts_with_a_known_prefix_go_where_it_is() -> None:
    policy = CacheAware(PAGE)
    first = policy.choose([GroupView(0, 1, 0), GroupView(1, 0, 0)], RequestView([*range(16)]))
    again = policy.choose([GroupView(0, 0, 0), GroupView(1, 0, 8)], RequestView([*range(12), 99, 98, 97, 96]))
    assert (first, again) == (1, 1)


def test_a_prefix_gives_way_when_its_queue_costs_more_than_it_saves() -> None:
    policy, prompt = CacheAware(PAGE), RequestView([*range(16)])
    policy.choose(idle(0, 1), prompt)
    assert policy.choose([GroupView(0, 0, 15), GroupView(1, 0, 0)], prompt) == 0
    assert policy.choose([GroupView(0, 0, 17), GroupView(1, 0, 0)], prompt) == 1


def test_without_a_prefix_requests_spread_over_the_groups() -> None:
    policy, opened = CacheAware(PAGE), [0, 0, 0]
    for number in range(9):
        groups = [GroupView(rank, count, 0) for rank, count in enumerate(opened)]
        opened[policy.choose(groups, RequestView([number] * 8))] += 1
    assert opened == [3, 3, 3]


def test_the_same_tokens_in_another_namespace_are_another_prefix() -> None:
    policy = CacheAware(PAGE)
    policy.choose(idle(0, 1), RequestView([*range(OPEN_TOKENS * 2)], b"mine"))
    busier = [GroupView(0, 1, 0), GroupView(1, 0, 0)]
    assert policy.choose(busier, RequestView([*range(OPEN_TOKENS * 2)], b"yours")) == 1
    assert policy.choose(busier, RequestView([*range(OPEN_TOKENS * 2)], b"mine")) == 0
