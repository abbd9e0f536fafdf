from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError, Unavailable
from diptych.engine.frontend.health import PING_S
from diptych.engine.nodes.roster import BEAT_S, QUIET_S, SILENCE_S, PlaceTaken, Roster
from diptych.v1.bootstrap_pb2 import GroupNode
from diptych.v1.rank_pb2 import NodeHello

DEADLINE_S = 60.0


def hello(node: int, version: str = "1", epoch: int = 0) -> NodeHello:
    return NodeHello(
        node=node, num_nodes=3, epoch=epoch or 100 + node, host=f"h{node}", pod=f"p{node}", version=version
    )


@pytest.fixture
def roster() -> Roster:
    return Roster(hello(0), 6, DEADLINE_S)


def test_a_group_is_complete_when_each_node_has_come_and_says_which_ranks_are_where(roster: Roster) -> None:
    roster.join(hello(2), 1.0)
    assert roster.missing == [1]
    roster.join(hello(1), 2.0)
    assert roster.missing == []
    assert roster.records() == [
        GroupNode(node=node, epoch=100 + node, host=f"h{node}", pod=f"p{node}", first_rank=2 * node, num_ranks=2)
        for node in range(3)
    ]


def test_a_place_is_taken_once_and_words_say_by_whom(roster: Roster) -> None:
    roster.join(hello(1), 1.0)
    with pytest.raises(PlaceTaken, match=r"node 1 at h1 \(p1\) is in the group already, started as 0{14}65: give each"):
        roster.join(hello(1, epoch=7), 2.0)


def test_who_differs_never_joins_and_who_comes_late_may_join_the_next_group(roster: Roster) -> None:
    with pytest.raises(ConfigError, match=r"node 1 at h1.* can't join the group of h0: its version is 2"):
        roster.join(hello(1, version="2"), 1.0)
    roster.end()
    with pytest.raises(Unavailable, match="the group of h0 ends: join the next"):
        roster.join(hello(1), 1.0)


def test_a_node_that_is_silent_is_blamed_within_two_seconds_and_gone_after_five(roster: Roster) -> None:
    roster.join(hello(1), 1.0)
    roster.heard(1, 5.0)
    assert roster.absence(5.0 + QUIET_S) == ""
    assert roster.absence(5.1 + QUIET_S) == "node 1 at h1 (p1) is not heard"
    assert QUIET_S + PING_S + BEAT_S < 2.0  # then its requests are done elsewhere
    assert roster.complaint(5.0 + SILENCE_S) == ""
    assert "node 1 at h1 (p1) has not been heard for 5.1 s" in roster.complaint(5.1 + SILENCE_S)
    roster.heard(1, 5.2 + SILENCE_S)
    assert roster.absence(5.3 + SILENCE_S) == ""


def test_a_node_says_that_a_rank_of_it_was_stopped_and_that_it_goes_on(roster: Roster) -> None:
    roster.join(hello(1), 1.0)
    roster.heard(1, 1.2, is_stopped=True)
    assert roster.absence(1.3) == "a process of node 1 at h1 (p1) was stopped"
    assert roster.complaint(1.3) == ""
    roster.heard(1, 1.4)
    assert roster.absence(1.5) == ""


def test_nobody_is_blamed_for_the_time_in_which_we_did_not_listen(roster: Roster) -> None:
    roster.join(hello(1), 1.0)
    roster.excuse(10.0)
    assert roster.complaint(11.0 + SILENCE_S) == ""


def test_who_never_comes_is_named_when_the_time_is_up(roster: Roster) -> None:
    roster.join(hello(2), 1.0)
    roster.heard(2, DEADLINE_S)
    assert roster.complaint(DEADLINE_S) == ""
    assert "node 1 did not come in time" in roster.complaint(DEADLINE_S + 0.1)
