from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from diptych.common.config import REQUIRED, add_options, from_namespace, new_parser, option, parse, to_flags
from diptych.common.errors import ConfigError


class Policy(enum.Enum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"


BACKENDS = {"cpu": 1, "gpu": 2}  # a registry


@dataclass(frozen=True, slots=True)
class Config:
    """Route requests."""

    bootstrap: tuple[str, ...] = option(REQUIRED, help="addresses")
    http_port: int = option(8000, help="port; 100% yours")
    ratio: float | None = option(None, help="a ratio", group="limits")
    policy: Policy = option(Policy.ROUND_ROBIN, help="how to choose")
    dtype: Literal["float32", "bfloat16"] = option("float32", help="of the KV pool")
    folder: Path = option(Path("here"), help="where")
    fast: bool = option(True, help="be fast")
    ports: tuple[int, ...] = option((), help="more ports")
    backend: str | None = option(None, help="by what", choices=BACKENDS)

    def validate(self) -> None:
        if self.ratio == 0:
            raise ConfigError("--ratio must not be 0")


EVERYTHING_GIVEN = Config(
    bootstrap=("a:1", "b:2"),
    http_port=9,
    ratio=0.5,
    policy=Policy.LEAST_LOAD,
    dtype="bfloat16",
    folder=Path("/there"),
    fast=False,
    ports=(1, 2),
    backend="gpu",
)


def read(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    parser = new_parser("diptych router")
    add_options(parser, Config)
    return from_namespace(Config, parser.parse_args(argv), environ or {})


def test_defaults_apply_where_nothing_is_said() -> None:
    assert read(["--bootstrap", "a:1"]) == Config(bootstrap=("a:1",))


def test_every_kind_of_field_is_read_from_flags() -> None:
    argv = ["--bootstrap=a:1", "--bootstrap=b:2", "--http-port=9", "--ratio=0.5", "--policy=least_load"]
    argv += ["--dtype=bfloat16", "--folder=/there", "--no-fast", "--ports=1,2", "--backend=gpu"]
    assert read(argv) == EVERYTHING_GIVEN


def test_every_kind_of_field_is_read_from_the_environment() -> None:
    environ = {
        "DIPTYCH_BOOTSTRAP": "a:1, b:2",
        "DIPTYCH_HTTP_PORT": "9",
        "DIPTYCH_RATIO": "0.5",
        "DIPTYCH_POLICY": "least_load",
        "DIPTYCH_DTYPE": "bfloat16",
        "DIPTYCH_FOLDER": "/there",
        "DIPTYCH_FAST": "off",
        "DIPTYCH_PORTS": "1,2",
        "DIPTYCH_BACKEND": "gpu",
    }
    assert read([], environ) == EVERYTHING_GIVEN


def test_a_flag_beats_the_environment() -> None:
    assert read(["--bootstrap=a", "--http-port=1"], {"DIPTYCH_HTTP_PORT": "2"}).http_port == 1


def test_an_empty_variable_counts_as_absent() -> None:
    assert read(["--bootstrap=a"], {"DIPTYCH_HTTP_PORT": ""}).http_port == 8000


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, "--bootstrap is required: give --bootstrap or set DIPTYCH_BOOTSTRAP"),
        (["--bootstrap=a", "--http-port=x"], {}, "--http-port must be a whole number, not 'x'"),
        (["--bootstrap=a"], {"DIPTYCH_RATIO": "x"}, "DIPTYCH_RATIO must be a number, not 'x'"),
        (["--bootstrap=a", "--ports=1,x"], {}, "--ports must be a whole number, not 'x'"),
        (["--bootstrap=a", "--dtype=int8"], {}, "--dtype must be one of float32, bfloat16, not 'int8'"),
        (["--bootstrap=a"], {"DIPTYCH_POLICY": "best"}, "DIPTYCH_POLICY must be one of round_robin, least_load, not"),
        (["--bootstrap=a", "--backend=tpu"], {}, "--backend must be one of cpu, gpu, not 'tpu'"),
        (["--bootstrap=a"], {"DIPTYCH_FAST": "maybe"}, "DIPTYCH_FAST must be one of 1, 0, true, false, yes, no, on"),
        (["--bootstrap=a", "--ratio=0"], {}, "--ratio must not be 0"),
        (["--bootstrap=a", "--ratio=nan"], {}, "--ratio must be a number, not 'nan'"),
        (["--bootstrap=a", "--http-port=-1"], {}, "--http-port must be between 0 and 65535, not -1"),
        (["--bootstrap=a"], {"DIPTYCH_HTTP_PORT": "70000"}, "DIPTYCH_HTTP_PORT must be between 0 and 65535, not 70000"),
    ],
)
def test_a_wrong_value_is_named_with_its_source(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(argv, environ)
    assert str(caught.value).startswith(message)


def test_parse_exits_with_2_and_the_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_BOOTSTRAP", raising=False)
    with pytest.raises(SystemExit) as caught:
        parse(Config, [], prog="diptych router")
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "diptych router: --bootstrap is required: give --bootstrap or set DIPTYCH_BOOTSTRAP\n"
        "See diptych router --help.\n"
    )


def test_flags_are_never_abbreviated() -> None:
    with pytest.raises(SystemExit):
        read(["--bootstrap=a", "--http=1"])


def test_help_names_variable_default_and_group() -> None:
    parser = new_parser("diptych router", description=Config.__doc__)
    add_options(parser, Config)
    text = " ".join(parser.format_help().split())
    assert "Route requests." in text
    assert "--bootstrap TEXT,... addresses [DIPTYCH_BOOTSTRAP; required]" in text
    assert "--http-port N port; 100% yours [DIPTYCH_HTTP_PORT; default 8000]" in text
    assert "--policy {round_robin,least_load} how to choose [DIPTYCH_POLICY; default round_robin]" in text
    assert "--backend {cpu,gpu} by what [DIPTYCH_BACKEND; default none]" in text
    assert "limits: --ratio X a ratio [DIPTYCH_RATIO; default none]" in text


def test_flags_bring_a_configuration_back_against_any_environment() -> None:
    environ = {"DIPTYCH_BOOTSTRAP": "c:3", "DIPTYCH_HTTP_PORT": "7", "DIPTYCH_FAST": "1", "DIPTYCH_PORTS": "1"}
    for config in (EVERYTHING_GIVEN, Config(bootstrap=("a:1",), fast=False)):
        assert read(to_flags(config), environ) == config
