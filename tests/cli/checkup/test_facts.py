from __future__ import annotations

import json

import pytest
from openai_server import OpenAiServer, serving

from diptych.cli.checkup.facts import gather
from diptych.cli.doctor import DoctorConfig, main
from diptych.common.errors import ConfigError

NOWHERE = "a" * 64  # no name may have so long a part: nobody is asked


def test_this_machine_is_seen_as_it_is() -> None:
    facts = gather(["localhost", NOWHERE])
    assert facts.num_cores >= 1
    assert (facts.memory_bytes or 0) > 1 << 28
    assert facts.versions["diptych"]
    assert facts.names["localhost"] == ""
    assert facts.names[NOWHERE]
    assert facts.ucx or facts.ucx_problem


def test_a_server_that_tells_no_time_is_an_error() -> None:
    with serving(OpenAiServer()) as server, pytest.raises(ConfigError, match="does not tell its time"):
        gather(servers=[server.url])


def test_the_command_ends_as_the_machine_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(DoctorConfig(json=True))
    found = json.loads(capsys.readouterr().out)
    assert code == int(not found["is_fit"])
    assert {row["level"] for row in found["findings"]} <= {"good", "note", "bad"}
    assert main(DoctorConfig(names=(NOWHERE,))) == 1
    assert "BAD   DNS" in capsys.readouterr().out
