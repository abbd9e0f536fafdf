from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diptych.common.errors import ConfigError
from diptych.kvtransfer.layout import PoolLayout
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


def test_images_of_a_state_have_memory_from_the_first_state_on(
    make_child_end: Callable[..., Any], link: Callable[[Any, Any], None], has_nixl: None
) -> None:
    pages = [PoolLayout.kv(16, 2, page_size, 2, 32, "bfloat16") for page_size in (16, 4)]
    src, dst = (replace(each, state_nbytes=pages[0].page_nbytes) for each in pages)
    left, right = make_child_end("nixl-shm", 1, src), make_child_end("nixl-shm", 2, dst)
    link(left, right)
    left.fill(1)
    assert left.wait_done(left.write(2, [1], [0, 1, 2, 3])).error is None
    assert left.ask("num_stagings") == 1
    assert left.wait_done(left.write(2, [2], [4, 5, 6, 7], as_bytes=True)).error is None
    assert left.ask("num_stagings") == 2
    assert right.read([4, 5, 6, 7]) == left.read([2])
