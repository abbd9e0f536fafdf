from __future__ import annotations

from diptych.bootstrap.replica import MAX_TOLD, Mismatches
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL, ROLE_ROUTER, ROLE_UNIFIED, Instance, Role


def worker(instance_id: int, role: Role, protocol: int = 2, model: str = "m") -> Instance:
    instance = Instance(instance_id=instance_id, role=role, address=f"a:{instance_id}", compat="c", started_as=model)
    instance.terms.oldest_protocol = instance.terms.newest_protocol = protocol
    return instance


def test_two_kinds_of_workers_that_can_never_pair_are_told_once() -> None:
    mismatches = Mismatches()
    assert mismatches.add(worker(1, ROLE_PREFILL)) == ()
    assert mismatches.add(worker(2, ROLE_DECODE, protocol=3)) == (
        "0000000000000002 at a:2 and 0000000000000001 at a:1 can't pair: protocol versions 3-3 and 2-2 do not overlap",
    )
    assert mismatches.add(worker(3, ROLE_DECODE, protocol=3)) == ()
    assert mismatches.add(worker(2, ROLE_DECODE, protocol=3)) == ()


def test_a_kind_that_comes_back_after_the_last_one_left_is_told_again() -> None:
    mismatches = Mismatches()
    mismatches.add(worker(1, ROLE_UNIFIED))
    assert len(mismatches.add(worker(2, ROLE_UNIFIED, protocol=3))) == 1
    mismatches.drop(2)
    assert len(mismatches.add(worker(3, ROLE_UNIFIED, protocol=3))) == 1


def test_those_that_would_never_meet_are_no_news() -> None:
    mismatches = Mismatches()
    mismatches.add(worker(1, ROLE_PREFILL))
    assert mismatches.add(worker(2, ROLE_PREFILL, protocol=3)) == ()
    assert mismatches.add(worker(3, ROLE_DECODE, protocol=3, model="other")) == ()
    assert mismatches.add(worker(4, ROLE_ROUTER, protocol=3)) == ()


def test_at_most_a_few_are_told_at_a_time() -> None:
    mismatches = Mismatches()
    for number in range(9):
        mismatches.add(worker(number + 1, ROLE_PREFILL, protocol=number + 3))
    assert len(mismatches.add(worker(99, ROLE_DECODE))) == MAX_TOLD
