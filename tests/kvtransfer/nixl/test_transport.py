from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.kvtransfer.nixl import agent
from diptych.kvtransfer.nixl.agent import environment


@pytest.fixture
def ends(make_child_end: Callable[..., Any], has_nixl: None) -> tuple[Any, Any]:
    return make_child_end("nixl-tcp", 1), make_child_end("tcp", 2)


def test_nixl_and_ucx_refuse_each_other_and_say_what_to_change(ends: tuple[Any, Any]) -> None:
    for left, right in (ends, reversed(ends)):
        with pytest.raises(Exception, match="start both with the same --kv-backend"):
            left.connect(right.instance_id, right.metadata())


def test_another_path_than_nixls_own_is_refused(
    make_child_end: Callable[..., Any], link: Callable[[Any, Any], None], has_nixl: None
) -> None:
    left, right = make_child_end("nixl-shm", 1), make_child_end("nixl-shm", 2)
    link(left, right)
    assert left.paths(2) == ["put"]
    left.use_path(2, "put")
    with pytest.raises(Exception, match="NIXL chooses how pages travel"):
        left.use_path(2, "copy")


def test_without_nixl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is set for a process stays out of this one
    monkeypatch.setattr(agent, "PACKAGES", {"no_such_nixl": "no-such-nixl"})
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu13"):
        agent.load("auto")


def test_what_the_user_has_set_stays() -> None:
    present = {"UCX_TCP_TX_SEG_SIZE": "64K", "NIXL_LOG_LEVEL": "INFO"}
    wanted = environment("shm", present)
    assert not present.keys() & wanted.keys()
    assert wanted["UCX_TLS"] == "sysv,posix,cma,self"
    assert "UCX_TLS" not in environment("auto", {})
