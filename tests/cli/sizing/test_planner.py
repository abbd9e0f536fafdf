"""`diptych planner`: what Prometheus sees of its plans."""

from __future__ import annotations

from prometheus_client import generate_latest

from diptych.cli.sizing.planner import PlanMetrics
from diptych.common.members.roles import Role
from diptych.planner.pools.cluster import Pool
from diptych.planner.pools.orders import Orders, Scale
from diptych.planner.values import Admission, Plan, Reason, Why


def test_the_last_plan_its_reasons_and_what_was_asked_for_are_metrics() -> None:
    metrics = PlanMetrics()
    made = Plan(1, 2, 3, admission=Admission(4.5), reasons=(Reason(Why.GROWS, "it grows"),))
    for _ in range(2):
        metrics.show(made)
        metrics.ordered(Orders((Scale(Pool("d", ("decode", ""), Role.DECODE, 1, "1"), 2),), drains=(1, 2, 3)))
    page = generate_latest(metrics.registry).decode()
    for line in (
        'diptych_planner_workers{role="unified"} 3.0',
        "diptych_planner_admitted_requests_per_s 4.5",
        'diptych_planner_reasons_total{why="grows"} 2.0',
        'diptych_planner_orders_total{kind="scale"} 2.0',
        'diptych_planner_orders_total{kind="drain"} 6.0',
        'diptych_planner_orders_total{kind="role"} 0.0',
    ):
        assert line in page
