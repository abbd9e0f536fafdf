"""A link of NIXL, without NIXL: what it owes its caller when something fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.nixl.link import Link


def test_a_write_that_can_not_be_staged_is_still_to_be_ended() -> None:
    def stage(pack: Any) -> Any:
        raise TransferError("no memory")

    agent: Any = SimpleNamespace()
    done: Any = None
    link = Link(1, done, agent, done, done, "", 0, done, stage)
    operation: Any = SimpleNamespace(copies=[SimpleNamespace(pack="of a state", max_pages=0)])
    link.submitted.append(operation)
    with pytest.raises(TransferError, match="no memory"):
        link.advance(0.0)
    assert [*link.streams.all(), *link.submitted] == [operation]
