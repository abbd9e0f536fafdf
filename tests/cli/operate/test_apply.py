from __future__ import annotations

from typing import Any

import pytest

from diptych.cli.main import main
from diptych.cli.operate.apply import report
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

ROUTER = Instance(instance_id=0xD << 60, role=bootstrap_pb2.ROLE_ROUTER, address="h:3")
WORKER = Instance(instance_id=0xC << 60, role=bootstrap_pb2.ROLE_DECODE, address="h:2")
NOTHING: dict[str, Any] = {"changes": [], "problems": {}}


def test_what_was_so_before_is_no_change() -> None:
    assert report([(ROUTER, NOTHING)], [(WORKER, "info")], "info") == (["nothing has changed: all of it was so"], True)


def test_changes_come_before_problems_and_each_says_who() -> None:
    answer = {"changes": ["pool next: weight 5"], "problems": {"sql": "no such folder"}}
    lines, is_well = report(
        [(ROUTER, answer), (ROUTER, "HTTP status 403")], [(WORKER, "info"), (WORKER, "!gone")], "debug"
    )
    assert not is_well
    assert [line.partition("h:")[2][3:] for line in lines] == [
        "pool next: weight 5",
        "log level: info -> debug",
        "adapter sql: no such folder",
        "HTTP status 403",
        "gone",
    ]


def test_the_file_may_stand_behind_f_as_for_kubectl(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["none.toml"], ["-f", "none.toml"]):
        assert main(["apply", *words, "--bootstrap=127.0.0.1:1", "--insecure"]) == 1
        assert "none.toml can't be read" in capsys.readouterr().err
