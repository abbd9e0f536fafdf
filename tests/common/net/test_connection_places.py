"""Which connection goes when there are too many."""

from __future__ import annotations

import random

from diptych.common.net.http_connection import ConnectionPlaces


def test_the_one_that_has_waited_longest_for_a_request_goes() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(3)
    assert [places.enter(each) for each in "abc"] == [None] * 3
    places.begin("a")
    assert (places.enter("d"), places.enter("e")) == ("b", "c")
    places.end("a")  # waits only from now on
    assert (places.enter("f"), places.enter("g"), places.enter("h")) == ("d", "e", "a")


def test_where_all_have_a_request_the_newcomer_goes() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(2)
    for each in "ab":
        places.enter(each)
        places.begin(each)
    assert (places.enter("c"), len(places)) == ("c", 2)
    places.leave("b")
    assert (places.enter("d"), len(places)) == (None, 2)


def test_one_that_had_to_go_gets_no_place_back_by_a_late_word_of_it() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(1)
    places.enter("a")
    assert places.enter("b") == "a"
    places.begin("a")
    places.end("a")
    places.leave("a")
    assert (len(places), places.enter("c")) == (1, "b")


def test_never_are_there_more_than_places_and_never_goes_one_with_a_request() -> None:
    rng, places = random.Random(7), ConnectionPlaces[int](10)
    waiting: list[int] = []
    working: list[int] = []
    for number in range(5000):
        match rng.randrange(4):
            case 0 | 1:
                waiting.append(number)
                leaving = places.enter(number)
                assert leaving == (waiting[0] if len(waiting) + len(working) > 10 else None)
                if leaving is not None:
                    waiting.remove(leaving)
            case 2 if waiting:
                working.append(waiting.pop(rng.randrange(len(waiting))))
                places.begin(working[-1])
            case 3 if working:
                ended = working.pop(rng.randrange(len(working)))
                if rng.random() < 0.5:
                    places.end(ended)
                    waiting.append(ended)
                else:
                    places.leave(ended)
        assert len(places) == len(waiting) + len(working) <= 10
