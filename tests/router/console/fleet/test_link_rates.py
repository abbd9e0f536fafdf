from __future__ import annotations

from diptych.router.console.fleet.link_rates import MIN_S, LinkRates
from diptych.v1.worker_pb2 import LinkStatus

WORKER = 1


def links(**sent: int) -> list[LinkStatus]:
    return [LinkStatus(peer_instance_id=int(name[1:]), bytes_sent=count) for name, count in sent.items()]


def test_a_rate_is_the_difference_of_two_counts_by_the_time_between_them() -> None:
    rates = LinkRates()
    assert rates.of(WORKER) == {}
    rates.add(WORKER, links(p5=1000, p6=50), 10.0)
    assert rates.of(WORKER) == {}
    rates.add(WORKER, links(p5=4000, p6=50), 12.0)
    assert rates.of(WORKER) == {5: 1500.0}
    rates.add(WORKER, links(p5=4000, p6=50), 13.0)
    assert rates.of(WORKER) == {}


def test_a_link_that_came_up_anew_counts_from_its_beginning() -> None:
    rates = LinkRates()
    rates.add(WORKER, links(p5=1000), 0.0)
    rates.add(WORKER, links(p5=400, p6=200), 2.0)
    assert rates.of(WORKER) == {5: 200.0, 6: 100.0}


def test_counts_that_come_at_once_are_no_rate() -> None:
    rates = LinkRates()
    rates.add(WORKER, links(p5=0), 0.0)
    rates.add(WORKER, links(p5=1000), MIN_S / 2)
    assert rates.of(WORKER) == {}
    rates.add(WORKER, links(p5=1000), 1.0)
    assert rates.of(WORKER) == {5: 1000.0}


def test_a_worker_that_is_forgotten_begins_anew() -> None:
    rates = LinkRates()
    rates.add(WORKER, links(p5=0), 0.0)
    rates.forget(WORKER)
    rates.add(WORKER, links(p5=1000), 1.0)
    assert rates.of(WORKER) == {}


def test_rates_are_those_between_the_last_two_words_and_one_object_until_the_next() -> None:
    rates = LinkRates()
    for second, count in enumerate((0, 1000, 1500)):
        rates.add(WORKER, links(p5=count), float(second))
    assert rates.of(WORKER) == {5: 500.0}
    assert rates.of(WORKER) is rates.of(WORKER)
