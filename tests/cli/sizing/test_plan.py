"""`diptych plan`: the search over trials, and what is printed."""

from __future__ import annotations

import json
from functools import partial

import pytest

from diptych.cli.main import main
from diptych.cli.plans.purchase import Search, busiest, cached_at_best, proposals
from diptych.cli.sizing.plan import PlanConfig
from diptych.common.config import parse
from diptych.common.errors import ConfigError
from diptych.engine.values.step_model import H200_LLAMA_8B
from diptych.planner.demand import demand
from diptych.planner.sizing import Sizing
from diptych.planner.values import Capacity, Goal, Kind, Sizes
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.generators.named import generate

CAPACITY = Capacity(H200_LLAMA_8B, kv_tokens=800_000)
SIZING = Sizing(CAPACITY, Goal(1.0, 0.03, 0.9))
LOAD = demand((Kind(20.0, 4000, 0, 200),), CAPACITY)


def _kept(enough: int, sizes: Sizes) -> float:
    return 0.95 if sizes.total >= enough else 0.5


def test_trials_go_up_until_something_is_enough_and_down_until_nothing_is() -> None:
    predicted = min(each.sizes.total for each in proposals(LOAD, SIZING, 16) if each.sizes)
    for enough in (predicted - 1, predicted, predicted + 2):
        search = Search(LOAD, SIZING, 16, partial(_kept, enough), 20)
        fewest = search.fewest()
        assert fewest is not None
        assert fewest.total == enough
        assert {each.total for each in search.tried} >= {enough - 1, enough}


def test_trials_are_bounded_and_nothing_that_was_not_tried_is_recommended() -> None:
    never = Search(LOAD, SIZING, 8, lambda sizes: 0.0, 3)
    assert never.fewest() is None
    assert len(never.tried) == 3
    both = Search(LOAD, SIZING, 16, lambda sizes: 0.95 if sizes.both else 0.0, 20)
    assert both.fewest() in both.tried


def test_the_busiest_time_is_planned_for_and_not_the_mean() -> None:
    calls = generate("bursty", 300, 1.0, 1)
    whole = busiest(calls, [0] * len(calls), SIZING, 1e6)
    minute = busiest(calls, [0] * len(calls), SIZING, 60.0)
    assert demand(minute, CAPACITY).work > 1.2 * demand(whole, CAPACITY).work


def test_what_a_cache_without_limits_would_hold() -> None:
    blocks = generate("chat", 2, 1.0, 1)[0].blocks[:2]
    calls = [Call(0.0, 1024, 8, blocks), Call(1.0, 1024, 8, blocks), Call(2.0, 600, 8, blocks[:2])]
    assert cached_at_best(calls) == [0, 1023, 599]


def test_a_plan_is_predicted_tried_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--trace=code", "--rate=0.2", "--calls=40", "--gpus=4", "--trials=2", "--ttft-slo-ms=8000"]) == 0
    )
    told = capsys.readouterr()
    assert "plan       1 GPUs: 0 prefill, 0 decode, 1 both" in told.out
    assert "tried      0 prefill, 0 decode, 1 both: 100.0% keep it" in told.out


def test_a_plan_for_programs_and_a_load_for_which_there_are_not_enough_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rate=40", "--calls=100", "--gpus=2", "--trials=0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] is None
    assert set(found["predicted"].values()) == {None}
    assert main(["plan", "--rate=2", "--calls=100", "--gpus=8", "--tp=2", "--trials=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 2 * sum(found["plan"].values())
    assert Sizes(**found["plan"]).serves


def test_a_plan_of_groups_says_their_nodes_and_how_each_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["plan", "--rate=1", "--calls=100", "--trials=0", "--gpus=64", "--gpus-per-node=8"]
    assert main([*load, "--tp=16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    workers = sum(found["plan"].values())
    assert (found["gpus"], found["nodes"], found["nodes_per_worker"]) == (16 * workers, 2 * workers, 2)
    assert main([*load, "--tp=16"]) == 0
    told = capsys.readouterr().out
    groups = f"{workers} groups" if workers > 1 else "one group"
    assert f"plan       {16 * workers} GPUs on {2 * workers} nodes, {groups} of 2: " in told
    assert "groups     each worker: --tp 16 --nnodes 2, 8 GPUs a node" in told


def test_a_plan_of_stages_counts_their_gpus_and_says_how_each_worker_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["plan", "--rate=2", "--calls=100", "--gpus=24", "--gpus-per-node=8", "--pp=3", "--trials=0"]
    assert main([*load, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    workers = sum(found["plan"].values())
    assert (found["gpus"], found["nodes"]) == (3 * workers, -(-workers // 2))
    assert main(load) == 0
    assert "groups     each worker: --tp 1 --pp 3, on one node" in capsys.readouterr().out
    assert main([*load, "--tp=8", "--gpus=96"]) == 0
    assert "groups     each worker: --tp 8 --pp 3 --nnodes 3, 8 GPUs a node" in capsys.readouterr().out


def test_more_groups_than_nodes_have_room_for_are_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rate=40", "--calls=100", "--trials=0", "--gpus=24", "--gpus-per-node=8", "--tp=24"]) == 1
    assert "plan       more than 24 GPUs on 3 nodes, one group of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--share=1"], ["--gpus=1", "--tp=2"], ["--trials=-1"], ["--kv-tokens=0"], ["--pp=0"]]
)
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        parse(PlanConfig, words, prog="diptych plan")


def test_what_came_first_is_looked_at_too_and_calls_at_once_have_no_rate() -> None:
    blocks = generate("chat", 2, 1.0, 1)[0].blocks[:2]
    early = [Call(each / 2, 1024, 8, blocks) for each in range(200)]
    late = [Call(100.0 + 10 * each, 1024, 8, blocks) for each in range(30)]
    found = busiest([*early, *late], [0] * 230, SIZING, 100.0)
    assert demand(found, CAPACITY).requests_per_s > 1.9
    with pytest.raises(ConfigError, match="all come at once"):
        busiest([Call(1.0, 1024, 8, blocks)], [0], SIZING, 100.0)


def test_a_trial_that_was_enough_is_not_forgotten_where_more_was_predicted() -> None:
    search = Search(LOAD, SIZING, 16, lambda sizes: 0.0, 1, {Sizes(both=1): 0.95})
    assert search.fewest() == Sizes(both=1)
