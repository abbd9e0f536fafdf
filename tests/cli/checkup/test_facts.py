from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from openai_server import OpenAiServer, serving

from diptych.cli.checkup.facts import gather
from diptych.cli.setup.doctor import DoctorConfig, main
from diptych.common.errors import ConfigError

pytestmark = pytest.mark.integration

NOWHERE = "a" * 64  # no name may have so long a part: nobody is asked


def test_this_machine_is_seen_as_it_is() -> None:
    facts = gather(["localhost", NOWHERE])
    assert facts.num_cores >= 1
    assert (facts.memory_bytes or 0) > 1 << 28
    assert facts.versions["diptych"]
    assert facts.names["localhost"] == ""
    assert facts.names[NOWHERE]
    assert facts.ucx or facts.ucx_problem


@pytest.mark.parametrize(
    ("said", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "13.0"),  # as PyPI's wheels
        ("cuda = '12.8'", "12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'", ""),
        ("", None),
    ],
)
def test_what_torch_was_built_for_is_read_from_its_files_without_its_import(
    said: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError")
    (folder / "version.py").write_text(f"__all__ = ['__version__', 'cuda']\n__version__ = '9.8.7'\n{said}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    facts = gather()
    assert (facts.versions["torch"], facts.torch_cuda) == ("9.8.7", cuda)


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
