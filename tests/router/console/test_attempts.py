"""Failed attempts are counted for a while."""

from __future__ import annotations

from diptych.router.console.attempts import Attempts


def test_so_many_may_fail_in_a_while_and_each_makes_room_as_it_gets_old() -> None:
    attempts = Attempts(3, 60.0)
    for at_s in (0.0, 10.0, 20.0):
        assert attempts.wait_s(at_s) == 0.0
        attempts.fail(at_s)
    assert attempts.wait_s(20.0) == 40.0
    assert attempts.wait_s(60.0) == 0.0
    attempts.fail(60.0)
    assert attempts.wait_s(60.0) == 10.0
