from __future__ import annotations

import dataclasses
import io
import json
import logging
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.main import main
from diptych.cli.plans.processes import ListenAddresses, Workers
from diptych.cli.platform.console_code import ConsoleCode
from diptych.cli.platform.local_platforms import LocalPlatform
from diptych.cli.platform.log_view import LogView
from diptych.cli.setup.up import UpConfig, banner, commands_elsewhere, commands_here, found_by_commands
from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import TOKEN_VARIABLE


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
        ({"prefill": 0}, "--prefill must be at least 1 without --unified"),
        ({"decode": -1, "unified": 1}, "--prefill, --decode, --unified and --encode must be 0 or more"),
        ({"threads": -1}, "--threads must be 0 or more"),
        ({"max_model_len": 1}, "--max-model-len must be 0 or at least 2"),
        ({"served_model_name": ("two words",)}, "--served-model-name takes names"),
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
    text = banner(UpConfig(), ListenAddresses("0.0.0.0", 8000, 9000, 7000), "small-model", "", "")
    command = shlex.split(text[text.index("curl") :])
    assert command[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(command[-1])["model"] == "small-model"
    assert "authorization" not in text


def test_the_curl_of_a_platform_with_keys_sends_one() -> None:
    config = UpConfig(api_keys_file=Path("/keys.toml"))
    text = banner(config, ListenAddresses("127.0.0.1", 8000, 9000, 7000), "small-model", "", "")
    command = [word for word in shlex.split(text[text.index("curl") :]) if word.strip()]
    assert command[4:6] == ["-H", "authorization: Bearer $DIPTYCH_API_KEY"]
    assert json.loads(command[-1])["model"] == "small-model"


def test_an_ipv6_address_can_be_pasted_too() -> None:
    text = banner(UpConfig(), ListenAddresses("::1", 8000, 9000, 7000), "small-model", "", "")
    assert "http://[::1]:8000/v1" in text
    assert "[::1]:9000" in text


def test_the_banner_says_where_the_console_is() -> None:
    page = ConsoleCode("the-code").address("http://127.0.0.1:8000")
    text = banner(UpConfig(), ListenAddresses("127.0.0.1", 8000, 9000, 7000), "m", "", page)
    assert "  console    http://127.0.0.1:8000/console/#code=the-code\n" in text


def test_the_banner_says_what_to_type_in_another_terminal() -> None:
    listen = ListenAddresses("127.0.0.1", 8000, 9000, 7000)
    assert commands_here(listen, 1) == "In another terminal: `diptych chat`, `diptych status`, `diptych links`."
    assert "`diptych status --platform 8000`" in commands_here(listen, 2)
    elsewhere = commands_elsewhere(listen, Path("/run/x/operator"))
    assert "`export DIPTYCH_AUTH_TOKEN_FILE=/run/x/operator; diptych status --bootstrap 127.0.0.1:7000`" in elsewhere
    assert "TOKEN" not in commands_elsewhere(listen, None)
    assert elsewhere in banner(UpConfig(), listen, "m", elsewhere, "")


def test_a_platform_that_commands_could_not_trust_serves_all_the_same_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    view, here = LogView(io.StringIO(), (), colour=False), LocalPlatform("h:1", "h:2", "h:3", "m", {})
    with found_by_commands(here, view) as found:
        assert found == 1
    assert isinstance(view.out, io.StringIO)
    assert view.out.getvalue() == ""
    (tmp_path / "diptych").chmod(0o777)
    with found_by_commands(here, view) as found:
        assert found == 0
    assert "commands won't find this platform by themselves: " in view.out.getvalue()


@pytest.fixture
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the token out of its environment."""
    monkeypatch.setenv(TOKEN_VARIABLE, "the-token-of-this-run")


@pytest.mark.usefixtures("_own_environment")
def test_a_port_in_use_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["up", "--http-port", str(port)]) == 1
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize("rest", [["no.gguf"], ["--model", "no.gguf"], ["no.gguf", "--prefill", "2"]])
def test_serve_is_up_with_the_model_behind_it_or_not(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *rest, "--http-port", "0", "--grpc-port", "0"]) == 1
    assert capsys.readouterr().err.startswith("diptych up: no model 'no.gguf'")


@pytest.mark.usefixtures("_own_environment")
def test_a_wrong_model_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "no/such/model", "--http-port", "0", "--grpc-port", "0"]) == 1
    assert "no model 'no/such/model'" in capsys.readouterr().err


def test_further_options_with_an_open_quotation_mark_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["up", "--decode-options", "--dtype 'bfloat16"])
    assert left.value.code == 2
    words = "diptych up: --decode-options has a quotation mark too few: --dtype 'bfloat16"
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--decode-options", "--kv-cache-mib 1 --page-size 512"], "decode#1: 1 MiB of KV memory hold 512 tokens"),
        (["--max-model-len", "16385"], "--max-model-len 16385 is more than the 16384 tokens that sim takes"),
        (["--max-model-len", "9000", "--decode-options", "--kv-cache-mib 8"], "hold 4,096 tokens, fewer than --max"),
        (["--chat-template", "/no/such/file"], "--chat-template /no/such/file: No such file"),
        (["--chat-template", "{% if %}"], "does not compile"),
    ],
)
def test_what_no_worker_or_router_could_do_ends_it_before_anything_starts(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0"]
    assert main(["up", "--model", "sim", "--device", "sim", *ports, *options]) == 1
    output = capsys.readouterr()
    assert words in output.err
    assert "starting" not in output.out


@pytest.mark.usefixtures("_own_environment")
def test_an_option_that_no_worker_has_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with pytest.raises(SystemExit):
        main(["up", "--model", "sim", "--device", "sim", *ports, "--prefill-options", "--pagesize 16"])
    assert "unrecognized arguments: --pagesize 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ["--tp", "2"],
            "--tp is an option of workers: set DIPTYCH_TP for all of them, or give it to those of one role",
        ),
        (["--kv-cache-mib=9"], "--kv-cache-mib is an option of workers: set DIPTYCH_KV_CACHE_MIB for all"),
        (["--cors-origins", "*"], "--cors-origins is an option of the router: set DIPTYCH_CORS_ORIGINS for it"),
        (["my-model"], "unrecognized arguments: my-model; a model is named by --model"),
        (["--nonsense", "3"], "unrecognized arguments: --nonsense 3\n"),
    ],
)
def test_a_word_that_belongs_elsewhere_is_told_where(
    capsys: pytest.CaptureFixture[str], words: list[str], advice: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", *words])
    assert advice in capsys.readouterr().err


def test_one_unified_worker_is_a_platform() -> None:
    config = UpConfig(device="sim", prefill=0, decode=0, unified=1, unified_options="--page-size 32")
    config.validate()
    assert config.workers == (Workers("unified", 1, ("--device", "sim", "--page-size", "32")),)
    assert "ready: 1 unified." in banner(config, ListenAddresses("127.0.0.1", 1, 2, 3), "m", "", "")
