from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.cli.main import main
from diptych.cli.plan import Site, Workers
from diptych.cli.up import UpConfig, banner
from diptych.common.errors import ConfigError


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """`main` sets the logging of its process up; this process is ours."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": 0}, "--prefill and --decode must be at least 1 without --unified"),
        ({"decode": 0}, "--prefill and --decode must be at least 1 without --unified"),
        ({"decode": -1, "unified": 1}, "--prefill, --decode and --unified must be 0 or more"),
        ({"threads": -1}, "--threads must be 0 or more"),
        ({"http_port": 9000}, "--http-port, --grpc-port and --bootstrap-port must differ"),
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(UpConfig(), **changes).validate()


def test_the_defaults_and_several_free_ports_are_fine() -> None:
    UpConfig().validate()
    UpConfig(http_port=0, grpc_port=0, bootstrap_port=0).validate()


def test_the_banner_holds_a_curl_that_can_be_pasted() -> None:
    text = banner(UpConfig(), Site("0.0.0.0", 8000, 9000, 7000), "small-model")
    command = shlex.split(text[text.index("curl") :])
    assert command[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(command[-1])["model"] == "small-model"


def test_an_ipv6_address_can_be_pasted_too() -> None:
    text = banner(UpConfig(), Site("::1", 8000, 9000, 7000), "small-model")
    assert "http://[::1]:8000/v1" in text
    assert "[::1]:9000" in text


def test_a_port_in_use_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["up", "--http-port", str(port)]) == 1
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_wrong_model_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "no/such/model", "--http-port", "0", "--grpc-port", "0"]) == 1
    assert "no model 'no/such/model'" in capsys.readouterr().err


def test_one_unified_worker_is_a_platform() -> None:
    config = UpConfig(device="sim", prefill=0, decode=0, unified=1, unified_options="--page-size 32")
    config.validate()
    assert config.workers == (Workers("unified", 1, ("--device", "sim", "--page-size", "32")),)
    assert "ready: 1 unified." in banner(config, Site("127.0.0.1", 1, 2, 3), "m")
