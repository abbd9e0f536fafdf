from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from diptych.cli.main import COMMANDS, FIRST, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())


def test_help_begins_with_the_five_commands_of_a_newcomer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names = [next(name for name in sorted(COMMANDS, reverse=True) if line.startswith(f"{name} ")) for line in lines]
    assert names == ["up", "chat", "generate", "status", "links", *list(COMMANDS)[5:]]
    assert len(FIRST) == 5


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_version_is_that_of_the_package(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == version("diptych") + "\n"


@pytest.mark.parametrize(
    ("name", "hint"), [("ruoter", "did you mean `diptych router`?"), ("xyz", "`diptych --help` lists the commands.")]
)
def test_an_unknown_command_is_refused_with_a_hint(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f"diptych: there is no command {name!r}; {hint}\n"


def test_an_option_without_a_command_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "x"]) == 2
    hint = "belongs behind a command, as in `diptych up --model ...`; `diptych --help` lists them.\n"
    assert capsys.readouterr().err == f"diptych: --model {hint}"


def test_an_error_that_a_user_can_act_on_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--target", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "diptych generate: nobody answers at 127.0.0.1:1: start Diptych with `diptych up`, "
        "or name a router's gRPC API with --target\n"
    )


def test_an_argument_that_is_no_utf_8_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", os.fsdecode(b"caf\xe9")]) == 2
    assert capsys.readouterr().err == "diptych: 'caf\\udce9' is no UTF-8: convert it, as with `iconv -t utf-8`\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_configuration_and_a_main(name: str) -> None:
    module = importlib.import_module(COMMANDS[name].module)
    assert isinstance(getattr(module, COMMANDS[name].config), type)
    assert callable(module.main)


@pytest.mark.integration
@pytest.mark.parametrize("argv", [["--help"], ["up", "--help"], ["version"]])
def test_help_needs_no_heavy_import(argv: list[str]) -> None:
    heavy = "torch", "grpc", "numpy", "fastapi", "zmq", "tokenizers"
    program = f"""
import sys
from diptych.cli.main import main
try:
    main({argv!r})
except SystemExit:
    pass
sys.exit(",".join(name for name in {heavy!r} if name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stderr) == (1, "\n")


@pytest.mark.integration
def test_a_worker_with_too_little_kv_memory_says_so_before_it_starts_another_process() -> None:
    options = [
        "--model",
        "sim",
        "--device",
        "sim",
        "--insecure",
        "--kv-cache-mib",
        "1",
        "--page-size",
        "512",
        "--log-format",
        "text",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    command = [sys.executable, "-m", "diptych.cli", "decode", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert ended.returncode == 1
    assert "diptych decode: 1 MiB of KV memory hold 512 tokens, but 2 pages of 512 tokens" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "scheduler" not in ended.stderr
