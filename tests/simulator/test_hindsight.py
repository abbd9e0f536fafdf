from __future__ import annotations

import numpy as np

from diptych.common.members.roles import Role
from diptych.engine.values.step_model import StepModel
from diptych.generation.slo import Slo
from diptych.planner.values import Sizes
from diptych.simulator.hindsight import Hindsight, divisions, hindsight
from diptych.simulator.report.summary import summary
from diptych.simulator.setup import Drain, Setup, Start, WorkerSetup
from diptych.simulator.traces.call import Call

SLO = Slo(ttft_s=1.0)
MORE = WorkerSetup(step_model=StepModel(step=0.001, prompt_token=0.001), start_s=2.0)
SETUP = Setup((), slo=SLO, more=MORE)


def calls(*times: tuple[float, float, float]) -> list[Call]:
    """So many a second from one time to another: each takes a worker half a second."""
    arrivals = [at for first, last, rate in times for at in np.arange(first, last, 1 / rate).tolist()]
    return [Call(at, 500, 2, np.array([number], np.uint64)) for number, at in enumerate(arrivals)]


def search(load: list[Call], most: int, *policies: str) -> Hindsight:
    return hindsight(SETUP, load, policies or ("pair_cost",), lambda outcome: summary(outcome, SLO).good, most)


def test_workers_are_divided_in_each_way() -> None:
    assert divisions(1) == [Sizes(both=1)]
    assert divisions(3) == [Sizes(both=3), Sizes(1, 2), Sizes(2, 1)]


def test_the_fewest_workers_that_do_are_the_best() -> None:
    found = search(calls((0, 20, 1)), 3)
    assert (found.static.sizes, found.static.good) == (Sizes(both=1), 20)
    assert found.divided is found.static


def test_a_policy_that_serves_more_is_found() -> None:
    """All prompts have a session of their own but the policy that hashes has them at one worker."""
    load = [Call(each.arrival_s, 500, 2, each.blocks, session="one") for each in calls((0, 10, 3))]
    found = search(load, 2, "consistent_hash", "least_load")
    assert (found.static.policy, found.static.sizes) == ("least_load", Sizes(both=2))


def test_workers_come_and_go_with_the_load() -> None:
    found = search(calls((0, 10, 1), (10, 20, 4), (20, 41, 1)), 2)
    assert found.static.sizes == Sizes(both=2)
    assert found.divided.good >= 0.99 * found.static.good
    assert found.divided.gpu_hours < 0.9 * found.static.gpu_hours
    assert {type(action) for action in found.divided.actions} <= {Drain, Start}
    assert all(action.worker.role is Role.UNIFIED for action in found.divided.actions if isinstance(action, Start))
