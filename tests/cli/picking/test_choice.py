from __future__ import annotations

from collections import Counter

import pytest

from diptych.cli.picking import choice
from diptych.cli.picking.choice import MAX_ENDPOINTS, Routers
from diptych.router.choose.pools import uniform


def routers(*endpoints: str) -> Routers:
    found = Routers()
    found.are(endpoints)
    return found


def test_requests_go_to_who_has_the_fewest_and_then_to_the_others() -> None:
    found = routers("a:1", "b:1", "c:1")
    for endpoint in ("a:1", "a:1", "b:1"):
        found.begin(endpoint)
    assert found.pick(None, "", "1") == ("c:1", "b:1", "a:1")
    found.end("a:1")
    found.end("a:1")
    assert found.pick(None, "", "1")[-1] == "b:1"


def test_of_those_that_have_as_many_each_gets_its_part() -> None:
    found = routers("a:1", "b:1")
    first = Counter(found.pick(None, "", str(number))[0] for number in range(400))
    assert min(first.values()) > 150


def test_a_session_stays_however_much_its_router_has_and_others_stay_when_one_goes() -> None:
    found = routers("a:1", "b:1", "c:1")
    before = {name: found.pick(None, name, "1") for name in map(str, range(60))}
    assert {order[0] for order in before.values()} == {"a:1", "b:1", "c:1"}
    for order in before.values():
        found.begin(order[0])
    assert {name: found.pick(None, name, "2") for name in before} == before
    found.are(("a:1", "b:1"))
    for name, order in before.items():
        assert found.pick(None, name, "3") == tuple(each for each in order if each != "c:1")


@pytest.mark.parametrize("session", ["", "s"])
def test_a_pick_takes_one_digest_a_router(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counted(key: str, name: str) -> float:
        hashed.append(name)
        return uniform(key, name)

    monkeypatch.setattr(choice, "uniform", counted)
    routers(*(f"{number}:1" for number in range(60))).pick(None, session, "1")
    assert len(hashed) == 60


def test_only_what_the_gateway_allows_is_picked_and_nobody_if_none_of_it_is_there() -> None:
    found = routers("a:1", "b:1")
    for session in ("", "s"):
        assert found.pick(["b:1", "x:1"], session, "1") == ("b:1",)
        assert found.pick(["x:1"], session, "1") == ()
        assert found.pick([], session, "1") == ()
    assert routers().pick(None, "", "1") == ()


def test_few_endpoints_are_told_and_counts_of_ended_requests_are_forgotten() -> None:
    found = routers(*(f"{number}:1" for number in range(9)))
    assert len(found.pick(None, "", "1")) == MAX_ENDPOINTS
    found.begin("0:1")
    found.end("0:1")
    assert found.open("0:1") == 0
    assert not found._open
