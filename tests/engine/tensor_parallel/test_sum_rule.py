from __future__ import annotations

from diptych.engine.tensor_parallel.sum_rule import SumRule, sum_rule


def test_steps_are_scattered_from_so_many_bytes_on_if_each_rank_gets_a_row() -> None:
    rule = SumRule(4, 1024)
    assert [rule.scatters(num_tokens, 256) for num_tokens in (3, 4, 5)] == [False, True, True]
    assert not rule.scatters(3, 4096)
    assert rule.scatters(4, 4096)


def test_nothing_is_scattered_where_no_measurement_says_that_it_pays() -> None:
    assert not any(sum_rule(device, 2).scatters(1 << 20, 1 << 14) for device in ("cpu", "cuda"))
