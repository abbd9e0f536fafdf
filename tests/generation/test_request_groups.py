from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.codec import account_from_wire, hints_from_wire, leg_to_wire, life_from_wire, slo_from_wire
from diptych.generation.request_groups import MAX_PRIORITY, MAX_TENANT_LEN, NO_LIFE, Account, Hints, Life
from diptych.generation.slo import MAX_SLO_S, MAX_WEIGHT, NO_SLO, Slo
from diptych.v1.inference_pb2 import GenerateRequest

SAID: dict[type[Any], Any] = {str: "said", bytes: b"said", int: 7, float: 7.0}


def said(group: type[Any]) -> Any:
    """A group of which every field says something."""
    default = group()
    return group(**{each.name: SAID[type(getattr(default, each.name))] for each in fields(group)})


@pytest.mark.parametrize("now_s", [7.0, 5.0])
def test_every_field_of_every_group_survives_the_leg(now_s: float) -> None:
    account, hints, slo = said(Account), said(Hints), Slo(0.25, 0.0078125, 7.0, sheddable=True)
    leg = leg_to_wire(account, hints, Life("said", arrival_s=1.0, deadline_s=9.0), slo, now_s)
    assert account_from_wire(leg) == account
    assert hints_from_wire(leg) == hints
    assert slo_from_wire(leg) == slo
    assert life_from_wire(leg, 100.0) == Life("said", arrival_s=100.0, deadline_s=100.0 + 9.0 - now_s)


@pytest.mark.parametrize("deadline_s", [math.inf, 1.0, 0.0, 1e9])
def test_a_deadline_that_has_passed_or_is_far_is_a_leg_s_too(deadline_s: float) -> None:
    leg = leg_to_wire(said(Account), said(Hints), Life(deadline_s=deadline_s), NO_SLO, 1.0)
    assert not leg.HasField("slo")
    assert slo_from_wire(leg) == NO_SLO
    assert leg.timeout_ms == {math.inf: 0, 1e9: 2**32 - 1}.get(deadline_s, 1)
    assert (life_from_wire(leg, 0.0).deadline_s == NO_LIFE.deadline_s) == (deadline_s == math.inf)


def test_a_client_of_the_grpc_api_says_its_account_in_the_same_words() -> None:
    account = said(Account)
    assert account_from_wire(GenerateRequest(tenant=account.tenant, priority=account.priority)) == account


@pytest.mark.parametrize(
    ("account", "param"),
    [
        (Account("t" * (MAX_TENANT_LEN + 1)), "tenant"),
        (Account(priority=MAX_PRIORITY + 1), "priority"),
        (Account(priority=-MAX_PRIORITY - 1), "priority"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(account: Account, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        account.validate()
    assert refused.value.param == param


@pytest.mark.parametrize("speculate", ["", "off", "suffix", "ngram", "mtp", "eagle"])
def test_a_request_may_say_who_guesses(speculate: str) -> None:
    Hints(speculate=speculate).validate()


@pytest.mark.parametrize("speculate", ["draft:/models/small", "eagle:/models/head", "on", "Suffix"])
def test_what_nobody_guesses_by_is_refused_with_what_there_is(speculate: str) -> None:
    with pytest.raises(InvalidRequest, match="suffix, ngram, draft, mtp, eagle and off are served") as refused:
        Hints(speculate=speculate).validate()
    assert refused.value.param == "speculate"


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        (Slo(ttft_s=-1.0), "slo.ttft_ms"),
        (Slo(ttft_s=math.nan), "slo.ttft_ms"),
        (Slo(tpot_s=2 * MAX_SLO_S), "slo.tpot_ms"),
        (Slo(weight=0.0), "slo.weight"),
        (Slo(weight=2 * MAX_WEIGHT), "slo.weight"),
    ],
)
def test_an_slo_that_is_out_of_range_is_refused_by_name(slo: Slo, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        slo.validate()
    assert refused.value.param == param
