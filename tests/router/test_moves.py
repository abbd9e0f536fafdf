"""A stream goes on at another worker: its client sees nothing of it, and whoever operates the router does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from diptych.common.members.roles import LegKind
from diptych.router.workers.worker_view import Pair

Cluster = Any

EOS = 256
SCRIPT = "It was a bright cold day in April, and the clocks were striking thirteen."
NUM_MADE = 40  # tokens, before whoever makes an output stands still, until it is to move or to go on
ASKED = {"stream": True, "max_tokens": 100, "logprobs": 2, "stream_options": {"include_usage": True}}


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster], hang: Any) -> Cluster:
    """Two workers that do both; the first of them makes the output, and stands still in the middle of it."""
    started = start_cluster(prefill=0, decode=0, unified=2, policy="round_robin")
    started.script = SCRIPT
    stand_still(started.workers, hang)
    return started


def stand_still(workers: Iterable[Any], hang: Any) -> None:
    """Have no output end before it has moved, however late it is told to. No leg for a prompt is so long."""
    for worker in workers:
        worker.faults = [hang(NUM_MADE)]


def running(cluster: Cluster) -> tuple[Any, Any, Any]:
    """Return the request that runs, once it can move, its worker, and another one. No other leg will stand still."""
    found = cluster.router.dispatcher.running
    cluster.wait_until(lambda: found and next(iter(found)).output())
    request = next(iter(found))
    old, new, *_ = sorted(cluster.workers, key=lambda worker: worker.instance.instance_id != request.output().worker_id)
    for worker in cluster.workers:
        worker.faults.clear()
    return request, old, new


def move(cluster: Cluster, request: Any, target: Any) -> None:
    async def begin() -> None:
        request.move(target.instance.instance_id, "told to")

    cluster.call(begin())


def read(answer: Any) -> tuple[str, list[float], Any]:
    """Return the text, the log-probabilities and the usage of a stream."""
    lines = [line[6:] for line in answer.read().splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), logprobs, events[-1]["usage"]


def metric(cluster: Cluster, name: str) -> float:
    value: float = cluster.router.dispatcher.metrics.registry.get_sample_value(f"diptych_router_{name}_total")
    return value


def test_a_stream_goes_on_elsewhere_without_a_gap(cluster: Cluster) -> None:
    with cluster.ask(**ASKED) as answer:
        request, old, new = running(cluster)
        move(cluster, request, new)
        text, logprobs, usage = read(answer)
    tokens = [*cluster.tokenizer.encode(SCRIPT), EOS]
    assert text == SCRIPT
    assert logprobs == pytest.approx([-token / 100 for token in tokens])
    assert usage["completion_tokens"] == len(tokens)
    assert [metric(cluster, name) for name in ("moves", "moves_begun", "replays")] == [1, 1, 0]
    assert cluster.router.fleet.estimates.output_len == len(tokens), "all of it, wherever it was made"
    (leg,) = [leg for leg in new.started if leg.kind == LegKind.DECODE.wire]
    (asking,) = [leg for leg in old.started if leg.moves_room]
    assert (leg.room, leg.peer_instance_id) == (asking.room, old.instance.instance_id)
    assert asking.peer_instance_id == new.instance.instance_id
    assert list(leg.prompt_token_ids[-leg.num_prior_output_tokens :]) == tokens[: leg.num_prior_output_tokens]
    assert leg.sampling.max_tokens == 100 - leg.num_prior_output_tokens


def test_its_new_worker_hears_who_computed_its_prompt(start_cluster: Callable[..., Cluster], hang: Any) -> None:
    cluster = start_cluster(prefill=1, decode=2)
    cluster.script = SCRIPT
    [prefill, *decode] = cluster.workers
    stand_still(decode, hang)
    with cluster.ask(**ASKED) as answer:
        request, old, _ = running(cluster)
        [new] = {*decode} - {old}
        move(cluster, request, new)
        text, _, _ = read(answer)
    assert text == SCRIPT
    (leg,) = new.started
    assert leg.peer_instance_id == old.instance.instance_id
    assert leg.computed_by_instance_id == prefill.instance.instance_id


def test_why_it_went_there_is_told(cluster: Cluster) -> None:
    with cluster.ask(**ASKED) as answer:
        request_id = answer.headers["x-request-id"]
        request, old, new = running(cluster)
        move(cluster, request, new)
        read(answer)
    explained = cluster.router.dispatcher.explanations.find(request_id)
    first, second = explained["requests"][0]["attempts"]
    assert (first["outcome"], second["outcome"]) == ("moved", "stop")
    assert (second["policy"], second["reason"]) == ("move", "told to")
    assert second["prefill_instance"] == f"{old.instance.instance_id:016x}"
    assert second["decode_instance"] == f"{new.instance.instance_id:016x}"


def test_a_worker_that_refuses_keeps_its_request(cluster: Cluster, fail: Any) -> None:
    with cluster.ask(**ASKED) as answer:
        request, old, new = running(cluster)
        old.faults.append(fail(0, 6))
        move(cluster, request, new)
        cluster.wait_for(lambda: not old.faults)
        cluster.release(old)
        text, _, _ = read(answer)
    assert text == SCRIPT
    assert [metric(cluster, name) for name in ("moves", "moves_begun", "replays")] == [0, 1, 0]
    assert request.output() is None
    assert request._asked == {Pair(old.instance.instance_id, new.instance.instance_id)}, "so it is not asked again"


def test_a_new_worker_that_fails_before_the_old_one_lets_go_costs_a_replay_at_most(cluster: Cluster, fail: Any) -> None:
    with cluster.ask(**ASKED) as answer:
        request, old, new = running(cluster)
        old.let_go_s = 60.0
        new.faults.append(fail(0, 4))
        move(cluster, request, new)
        text, _, usage = read(answer)
    assert text == SCRIPT
    assert usage["completion_tokens"] == len(cluster.tokenizer.encode(SCRIPT)) + 1
    assert metric(cluster, "moves") == 0


def test_a_client_that_leaves_meanwhile_has_all_legs_aborted(cluster: Cluster) -> None:
    connection = cluster.connect(**ASKED)
    with connection.getresponse():
        request, old, new = running(cluster)
        old.let_go_s = 60.0
        move(cluster, request, new)
        cluster.wait_for(lambda: any(leg.num_prior_output_tokens for leg in new.started))
    connection.close()
    cluster.wait_for(lambda: not (old.running or new.running))
    assert cluster.router.dispatcher.running == set()


def test_a_late_worker_gives_its_outputs_away_by_itself(cluster: Cluster) -> None:
    """It says that a step takes longer than the output allows; the other one says that it has time."""
    for worker in cluster.workers:
        worker.instance.load.output_step_s = 0.005
        worker.instance.load.context_token_s = 1e-6
    with cluster.ask(**ASKED, slo={"tpot_ms": 20, "ttft_ms": 1000}) as answer:
        _, old, new = running(cluster)
        for worker in (old, new):
            worker.instance.load.output_tokens = 40_000 * (worker is old)
            cluster.report_load(worker, worker.instance.load)
        text, _, _ = read(answer)
    assert text == SCRIPT
    assert metric(cluster, "moves") == 1
