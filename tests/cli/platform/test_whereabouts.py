"""Which platform a command is about, and by which token it is let in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diptych.cli.ask.chat import ChatConfig
from diptych.cli.main import main
from diptych.cli.measure.bench import BenchConfig
from diptych.cli.observe.status import StatusConfig
from diptych.cli.platform.local_platforms import LocalPlatform, announced, chosen
from diptych.cli.platform.whereabouts import let_in, located
from diptych.cli.requests.inference_client import addressed
from diptych.common.errors import ConfigError
from diptych.common.trust.tokens import TOKEN_VARIABLE

TOKEN = Path("/x/operator")
ONE = LocalPlatform("127.0.0.1:8000", "127.0.0.1:9001", "127.0.0.1:7001", "m", {"DIPTYCH_AUTH_TOKEN_FILE": str(TOKEN)})
TWO = ONE._replace(http="[::1]:8001", bootstrap="127.0.0.1:7002", model="n", trust={"DIPTYCH_INSECURE": "1"})
Environ = dict[str, str]


@pytest.fixture
def nobody(tmp_path: Path) -> Environ:
    """The environment of a user without a platform."""
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def one(nobody: Environ, tmp_path: Path) -> Iterator[Environ]:
    with announced(ONE, tmp_path / "diptych"):
        yield nobody


def test_beside_a_platform_nothing_needs_to_be_said(one: Environ) -> None:
    found = located(StatusConfig(), one)
    assert (found.bootstrap, found.auth_token_file, found.insecure) == (("127.0.0.1:7001",), TOKEN, False)


def test_what_was_said_wins_each_by_itself(one: Environ) -> None:
    there = StatusConfig(bootstrap=("a:1",), auth_token_file=Path("mine"))
    assert located(there, one) == there
    known = located(StatusConfig(auth_token_file=Path("mine")), one)
    assert (known.bootstrap, known.auth_token_file) == (("127.0.0.1:7001",), Path("mine"))
    by_variable = located(StatusConfig(), one | {TOKEN_VARIABLE: "a-token-of-its-own"})
    assert (by_variable.bootstrap, by_variable.auth_token_file) == (("127.0.0.1:7001",), None)


def test_a_platforms_token_goes_to_that_platform_only(one: Environ) -> None:
    assert located(StatusConfig(bootstrap=("127.0.0.1:7001",)), one).auth_token_file == TOKEN
    stranger = StatusConfig(bootstrap=("127.0.0.1:7009",))
    assert located(stranger, one) == stranger


def test_a_benchmark_between_two_processes_here_has_the_token_that_a_platform_has(one: Environ) -> None:
    assert let_in(BenchConfig(what="kv"), ONE, one).auth_token_file == TOKEN
    known = BenchConfig(what="kv", insecure=True)
    assert let_in(known, ONE, one) == known


def test_who_asks_a_model_is_led_to_the_platform_that_runs_here(one: Environ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", one["XDG_RUNTIME_DIR"])
    assert addressed(ChatConfig()).target == addressed(ChatConfig(platform="8000")).target == "127.0.0.1:9001"
    assert addressed(ChatConfig(target="a:1")).target == "a:1"
    with pytest.raises(ConfigError, match="both say where"):
        addressed(ChatConfig(target="a:1", platform="8000"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{one['XDG_RUNTIME_DIR']}/diptych")
    assert addressed(ChatConfig()).target == "127.0.0.1:9000"  # one started by hand


def test_without_a_platform_it_is_said_what_to_do(nobody: Environ) -> None:
    with pytest.raises(ConfigError, match="start one with `diptych up`, or say where one is with --bootstrap and"):
        located(StatusConfig(), nobody)
    assert located(StatusConfig(insecure=True), nobody).bootstrap == ("127.0.0.1:7000",)  # one started by hand


def test_of_several_platforms_the_one_that_is_named_is_meant() -> None:
    assert chosen((ONE, TWO), "8001") == chosen((ONE, TWO), "7002") == TWO
    assert chosen((), "") is None
    with pytest.raises(ConfigError) as several:
        chosen((ONE, TWO), "")
    assert str(several.value) == (
        "several platforms run here; say which one is meant:"
        "\n  --platform 8000   m, bootstrap at 127.0.0.1:7001"
        "\n  --platform 8001   n, bootstrap at 127.0.0.1:7002"
    )
    with pytest.raises(ConfigError, match=r"with the port 1 runs here; there are:\n  --platform 8000"):
        chosen((ONE,), "1")
    with pytest.raises(ConfigError, match="nor any other; `diptych up` starts one"):
        chosen((), "8000")


def test_two_ways_to_say_where_contradict_each_other(one: Environ) -> None:
    with pytest.raises(ConfigError, match="both say where"):
        located(StatusConfig(bootstrap=("a:1",), platform="8000"), one)


@pytest.fixture
def _two_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of them pretends to be another process: that which started ours."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(TOKEN_VARIABLE)
    with ExitStack() as stack:
        stack.enter_context(announced(ONE, tmp_path / "diptych"))
        with monkeypatch.context() as parent:
            parent.setattr(os, "getpid", os.getppid)
            stack.enter_context(announced(TWO, tmp_path / "diptych"))
        yield


@pytest.mark.usefixtures("_two_run_here")
@pytest.mark.parametrize(
    "command",
    ["status", "links", "role x prefill", "drain x", "update-weights m", "chat", "generate x", "check kv", "bench kv"],
)
def test_every_command_asks_which_platform_is_meant(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 1
    words = capsys.readouterr().err
    assert words.startswith(f"diptych {command.split()[0]}: several platforms run here; say which one is meant:\n")
    assert "--platform 8000 " in words
    assert "--platform 8001 " in words


@pytest.mark.parametrize("command", ["status", "links", "role x prefill", "drain x", "update-weights m"])
def test_a_bootstrap_that_does_not_answer_is_an_error_that_names_the_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--bootstrap", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1: " in (words := capsys.readouterr().err)
    assert "; --bootstrap (or DIPTYCH_BOOTSTRAP) says where it is, `diptych up` starts a platform\n" in words
