from __future__ import annotations

import importlib

import pytest

from diptych.cli.main import COMMANDS
from diptych.cli.plans.processes import (
    Component,
    ListenAddresses,
    Model,
    Workers,
    components,
    over_nodes,
    threads_each,
    transport_environment,
)
from diptych.common.config import parse
from diptych.engine.frontend.config import WorkerConfig

ONE_EACH = [Workers("prefill", 1), Workers("decode", 1), Workers("unified", 1)]
SITE = ListenAddresses(host="0.0.0.0", http_port=8000, grpc_port=9000, bootstrap_port=7000)


def test_two_and_one_workers_between_bootstrap_and_router() -> None:
    planned = components(Model("smollm2"), SITE, [Workers("prefill", 2), Workers("decode", 1)], num_threads=3)
    assert [component.name for component in planned] == ["bootstrap", "prefill#1", "prefill#2", "decode#1", "router"]


def test_a_worker_is_told_model_bootstrap_and_threads() -> None:
    _, prefill, _ = components(Model("smollm2"), SITE, [Workers("prefill", 1)], num_threads=3)
    model = "--model smollm2 --load-format auto"
    flags = f"{model} --bootstrap 127.0.0.1:7000 --host 127.0.0.1 --port 0 --metrics-port 0 --num-threads 3 --drain-s 5"
    flags += " --health-port 0"
    assert prefill == Component("prefill#1", ("prefill", *flags.split()), num_threads=3)


@pytest.mark.parametrize(
    "component", components(Model("some/model", "dummy"), SITE, ONE_EACH, 2), ids=lambda component: component.name
)
def test_every_component_understands_its_arguments(component: Component, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_OPEN_API", "1")
    command = COMMANDS[component.arguments[0]]
    config_class = getattr(importlib.import_module(command.module), command.config)
    config = parse(config_class, component.arguments[1:], prog="diptych")
    wanted = {"model": "some/model", "load_format": "dummy", "num_threads": 2, "http_port": 8000}
    wanted |= {"bootstrap": ("127.0.0.1:7000",)}
    assert {name: getattr(config, name, value) for name, value in wanted.items()} == wanted


@pytest.mark.parametrize(
    ("num_threads", "num_workers", "num_cores", "expected"), [(0, 2, 8, 4), (0, 4, 2, 1), (0, 3, 8, 2), (5, 2, 8, 5)]
)
def test_workers_share_the_cores(num_threads: int, num_workers: int, num_cores: int, expected: int) -> None:
    assert threads_each(num_threads, num_workers, num_cores) == expected


def test_clients_of_a_wildcard_address_use_loopback() -> None:
    assert SITE.client_host == "127.0.0.1"
    assert ListenAddresses("10.0.0.5", 1, 2, 3).client_host == "10.0.0.5"


def test_a_role_gets_its_further_options_after_all_others() -> None:
    workers = [Workers("prefill", 1, ["--tp", "2"]), Workers("decode", 1, ["--page-size", "64"])]
    _, prefill, decode, _ = components(Model("smollm2"), SITE, workers, 3)
    assert (prefill.arguments[-2:], decode.arguments[-2:]) == (("--tp", "2"), ("--page-size", "64"))


@pytest.mark.parametrize(
    ("options", "environment", "has_hardware", "expected"),
    [
        ((), {}, False, {"DIPTYCH_TRANSPORTS": "shm"}),
        ((), {}, True, {}),
        ((), {"DIPTYCH_TRANSPORTS": "tcp"}, False, {}),
        (("--tp", "2", "--transports", "auto"), {}, False, {}),
        (("--transports=tcp",), {}, False, {}),
    ],
)
def test_workers_of_a_host_need_no_port_for_kv_unless_somebody_wants_one(
    options: tuple[str, ...], environment: dict[str, str], has_hardware: bool, expected: dict[str, str]
) -> None:
    workers = (Workers("prefill", 1), Workers("decode", 1, options))
    assert transport_environment(workers, environment, has_hardware=has_hardware) == expected


def test_only_what_was_said_of_the_model_is_passed_on_and_to_whom_it_concerns() -> None:
    model = Model("m", "auto", 4096, ("a", "b"), "{{ messages }}")
    _, prefill, router = components(model, SITE, [Workers("prefill", 1)], 3)
    common = ("--model", "m", "--load-format", "auto", "--max-model-len", "4096")
    assert prefill.arguments[1:7] == common
    assert router.arguments[1:11] == (*common, "--served-model-name", "a,b", "--chat-template", "{{ messages }}")
    assert "--served-model-name" not in prefill.arguments


def test_a_worker_over_nodes_is_a_process_for_each_with_a_leader_and_gpus_of_its_own() -> None:
    options = ("--tp", "4", "--base-gpu=2")
    workers = over_nodes(Workers("decode", 2, options), 2, (7101, 7102), {"tp": "8"})
    planned = components(Model("smollm2"), SITE, [workers], 1)[1:-1]
    assert [component.name for component in planned] == ["decode#1", "decode#1.1", "decode#2", "decode#2.1"]
    configs = [parse(WorkerConfig, component.arguments[1:], prog="diptych") for component in planned]
    assert [(each.node_rank, each.leader[-4:], each.base_gpu) for each in configs] == [
        *((0, "7101", 2), (1, "7101", 4)),
        *((0, "7102", 2), (1, "7102", 4)),
    ]
    assert {(each.nnodes, each.tp) for each in configs} == {(2, 4)}


def test_a_worker_over_nodes_has_its_stages_one_node_after_the_other() -> None:
    workers = over_nodes(Workers("prefill", 1, ("--pp", "4")), 2, (7101,), {"tp": "3"})
    planned = components(Model("smollm2"), SITE, [workers], 1)[1:-1]
    configs = [parse(WorkerConfig, component.arguments[1:], prog="diptych") for component in planned]
    assert [(each.tp, each.pp, each.base_gpu) for each in configs] == [(3, 4, 0), (3, 4, 6)]


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ((), {}, 2),
        ((), {"tp": "4"}, 4),
        (("--tp=6",), {"tp": "4"}, 6),
        (("--pp=2",), {}, 1),
        ((), {"pp": "4"}, 1),
    ],
)
def test_a_worker_over_nodes_has_a_rank_on_each_unless_more_are_wanted(
    options: tuple[str, ...], given: dict[str, str], expected: int
) -> None:
    workers = over_nodes(Workers("unified", 1, options), 2, (7100,), given)
    (leader, _) = components(Model("smollm2"), SITE, [workers], 1)[1:-1]
    assert parse(WorkerConfig, leader.arguments[1:], prog="diptych").tp == expected
