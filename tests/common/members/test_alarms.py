from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.members.alarms import Alarms

steps = st.tuples(st.sampled_from(["set", "drop", "pop"]), st.integers(0, 4), st.integers(0, 50))


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, max_size=60))
def test_alarms_go_off_as_in_a_plain_dictionary(plan: list[tuple[str, int, int]]) -> None:
    alarms, model = Alarms(), dict[int, float]()
    for step, key, at_s in plan:
        match step:
            case "set":
                alarms.set(key, at_s)
                model[key] = at_s
            case "drop":
                alarms.drop(key)
                model.pop(key, None)
            case "pop":
                due = sorted((at, key) for key, at in model.items() if at <= at_s)
                assert [(model.pop(key), key) for key in alarms.pop_due(at_s)] == due
        assert alarms.next_s == min(model.values(), default=None)
        assert [key in alarms for key in range(5)] == [key in model for key in range(5)]


def test_putting_alarms_off_does_not_fill_memory() -> None:
    alarms = Alarms()
    for beat in range(1000):
        for key in range(3):
            alarms.set(key, beat + 3.0)
        alarms.pop_due(beat)
    assert len(alarms._heap) == 3
