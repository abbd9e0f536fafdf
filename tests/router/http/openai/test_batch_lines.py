"""What is told of a line at once, and what waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from diptych.common.errors import DiptychError, InvalidRequest, Overloaded, Unavailable
from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.router.admission.session_desk import SessionDesk
from diptych.router.batches.bench import LineCall
from diptych.router.batches.slots import Slot
from diptych.router.errors import ModelNotFound
from diptych.router.http.openai import batch_lines
from diptych.router.http.openai.batch_lines import LineServer
from diptych.router.keys.caller import Callers
from diptych.router.keys.keyring import ApiKey, digest_of
from diptych.router.keys.ledger import Ledger
from diptych.router.serve.models import Models
from diptych.router.values.failure import LegFailure

CALL = LineCall("batch_req_1", "ann", "/v1/completions", b'{"prompt": "p"}', Slot(lambda: None))


class Failing:
    """A pipeline that admits nobody."""

    def __init__(self, error: DiptychError) -> None:
        self._error = error
        self.model = MagicMock()
        self.outcomes = Counter[str]()
        self.metrics = SimpleNamespace(requests=SimpleNamespace(labels=self._label))

    def _label(self, api: str, outcome: str) -> Any:
        return SimpleNamespace(inc=lambda: self.outcomes.update([outcome]))

    def admit(self, client: Any) -> Any:
        raise self._error


def served(error: DiptychError, callers: Callers | None = None) -> int:
    pipeline: Any = Failing(error)
    return asyncio.run(LineServer(Models([pipeline], SessionDesk([], lambda: 0.0)), callers).serve(CALL)).status


@pytest.mark.parametrize("code", [FailureCode.PEER_LOST, FailureCode.TRANSFER_FAILED, FailureCode.ABORTED])
def test_a_line_whose_workers_were_lost_or_failed_is_told_so_that_its_tries_are_counted(code: FailureCode) -> None:
    assert served(LegFailure(LegKind.DECODE, code, "").to_error()) == 503
    assert served(LegFailure(LegKind.PREFILL, code, "", session_lost=True).to_error()) == 503


@pytest.mark.parametrize("code", [FailureCode.OVERLOADED, FailureCode.RETRACTED, FailureCode.HANDED_BACK])
def test_a_line_that_gave_way_waits(code: FailureCode) -> None:
    with pytest.raises((Overloaded, Unavailable)):
        served(LegFailure(LegKind.DECODE, code, "").to_error())


def test_a_model_that_is_not_known_may_still_come_while_the_router_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="may still be coming"):
        served(ModelNotFound("the model 'm' does not exist"))
    monkeypatch.setattr(batch_lines, "LEARNING_S", 0.0)
    assert served(ModelNotFound("the model 'm' does not exist")) == 404


def test_a_line_leaves_a_quarter_of_its_keys_limits_to_requests_that_somebody_waits_for() -> None:
    keyring = {digest_of("k"): ApiKey("ann", requests_per_minute=4)}
    callers = Callers(lambda: keyring, lambda: 0.0, Ledger())
    holder = callers.holder("ann")
    assert holder
    for _ in range(3):
        assert served(InvalidRequest("it came so far"), callers) == 400
        with holder.admit(1):
            pass
    with pytest.raises(Overloaded, match="somebody waits for"):
        served(InvalidRequest("it came so far"), callers)
    with holder.admit(1):
        pass
