"""Which encode workers are asked for an image: those whose rows somebody may read who computes prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.common.members.roles import Role
from diptych.common.members.terms import Feature, bits
from diptych.router.choose.pairing import TEXT_KINDS
from diptych.router.workers.availability import Availability
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.known_worker import KnownWorker
from diptych.router.workers.worker_view import Pair
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance, KvLayout, KvRegion, Terms, TransferInfo, WorkerLoad

ROWS = bits(Feature.PULL, Feature.ROWS)
READY, DRAINING = bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_DRAINING


def record(number: int, role: Role, *links: int, features: int = ROWS, page_size: int = 16, **others: Any) -> Instance:
    layout = KvLayout(page_size=page_size, regions=[KvRegion(dtype="bfloat16")])
    known: dict[str, Any] = {
        "state": READY,
        "compat": "terms",
        "model_id": "sees",
        "load": WorkerLoad(linked_instances=links),
    }
    return Instance(
        instance_id=number,
        role=role.wire,
        terms=Terms(features=features),
        transfer=TransferInfo(layout=layout),
        **(known | others),
    )


def encoders(*records: Instance, pairs: tuple[Pair, ...] = (Pair(1, 2),)) -> dict[int, int]:
    """Return who may encode where these are reached, of which the pairs may serve."""
    fleet = SimpleNamespace(
        _sessions={
            each.instance_id: SimpleNamespace(
                instance_id=each.instance_id, is_open=True, num_open_legs=4, worker=KnownWorker(each)
            )
            for each in records
        },
        pairs=lambda: pairs,
    )
    fleet._of_role = lambda role: Fleet._of_role(fleet, role)  # type: ignore[arg-type]
    return Fleet.encoders(fleet)  # type: ignore[arg-type]


PREFILL, DECODE = record(1, Role.PREFILL, 2, 3), record(2, Role.DECODE, 1, 3)


def test_who_is_linked_to_one_that_reads_its_rows_may_encode() -> None:
    assert encoders(PREFILL, DECODE, record(3, Role.ENCODE, 1)) == {3: 4}


@pytest.mark.parametrize(
    "changed",
    [
        {"features": bits(Feature.PULL)},  # several ranks, or of an earlier version
        {"features": bits(Feature.ROWS)},  # without pulls
        {"page_size": 32},
        {"compat": "of other weights"},
        {"load": WorkerLoad(linked_instances=[2])},
    ],
)
def test_where_nobody_who_computes_prompts_could_read_the_rows_nobody_is_asked(changed: dict[str, Any]) -> None:
    encoder = record(3, Role.ENCODE, 1)
    unable = record(1, Role.PREFILL, 2, 3, **changed)
    assert encoders(unable, DECODE, encoder) == {}
    both = encoders(unable, record(4, Role.PREFILL, 2, 3), DECODE, encoder, pairs=(Pair(1, 2), Pair(4, 2)))
    assert both == {3: 4}


@pytest.mark.parametrize(
    "changed", [{"paused": True}, {"load": WorkerLoad(linked_instances=[1], silent_s=2)}, {"state": DRAINING}]
)
def test_one_that_takes_nothing_or_is_silent_is_not_asked(changed: dict[str, Any]) -> None:
    assert encoders(PREFILL, DECODE, record(3, Role.ENCODE, 1, **changed)) == {}


def test_while_no_pair_may_serve_nobody_is_asked() -> None:
    assert encoders(PREFILL, DECODE, record(3, Role.ENCODE, 1), pairs=()) == {}


def test_pages_of_encode_workers_are_no_pages_of_prompts_and_one_that_is_not_reached_cuts_nobody_off() -> None:
    workers = [KnownWorker(each) for each in (PREFILL, DECODE, record(3, Role.ENCODE, 1, page_size=64))]

    def available(reached: Callable[[KnownWorker], bool]) -> Availability:
        sessions: Any = {
            number: SimpleNamespace(worker=worker, view=partial(worker.view, is_reached=reached(worker)))
            for number, worker in enumerate(workers)
        }
        return Availability(sessions, "sees", TEXT_KINDS, {})

    here = available(lambda worker: worker.role is not Role.ENCODE)
    assert here.page_sizes == {16}
    assert not here.is_cut_off()
    assert available(lambda worker: False).is_cut_off()
