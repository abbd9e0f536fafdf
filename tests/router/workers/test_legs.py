from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.slo import NO_SLO, Slo
from diptych.router.workers.legs import Leg, OpenLegs, Work
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1 import inference_pb2
from diptych.v1.worker_pb2 import LegError, LegOutput

FIRST = LegOutput(room=1, token_ids=[5])
LAST = LegOutput(room=1, first_index=1, finish_reason=inference_pb2.FINISH_REASON_STOP)
FAILED = LegOutput(room=1, error=LegError(message="no"))


@dataclass
class Recorder:
    heard: list[LegOutput | str] = field(default_factory=list)
    kinds: set[LegKind] = field(default_factory=set)

    def receive(self, kind: LegKind, output: LegOutput) -> None:
        self.heard.append(output)
        self.kinds.add(kind)

    def lose(self, kind: LegKind, reason: str) -> None:
        self.heard.append(reason)
        self.kinds.add(kind)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def legs(recorder: Recorder) -> OpenLegs:
    legs = OpenLegs()
    legs.add(1, Leg(recorder, LegKind.PREFILL, Work(100)))
    return legs


@pytest.mark.parametrize("last", [LAST, FAILED])
def test_a_leg_is_open_until_its_last_output(legs: OpenLegs, recorder: Recorder, last: LegOutput) -> None:
    leg = legs.deliver(FIRST, 0.0)
    assert [leg is not None, len(legs), legs.deliver(last, 0.0) is leg, len(legs)] == [True, 1, True, 0]
    assert (recorder.heard, recorder.kinds) == ([FIRST, last], {LegKind.PREFILL})
    assert not legs.deliver(last, 0.0)


def test_its_prompt_counts_as_queued_until_it_answers(legs: OpenLegs, recorder: Recorder) -> None:
    legs.add(2, Leg(recorder, LegKind.PREFILL, Work(10)))
    assert legs.queued_tokens == 110
    legs.deliver(FIRST, 0.0)
    legs.deliver(LAST, 0.0)
    assert legs.queued_tokens == 10


def test_only_what_is_to_be_computed_counts(legs: OpenLegs, recorder: Recorder) -> None:
    legs.add(2, Leg(recorder, LegKind.DECODE, Work(50)))
    legs.add(3, Leg(recorder, LegKind.LOCAL, Work(50, cached_tokens=30)))
    assert legs.queued_tokens == 120


def test_an_abort_is_sent_once_and_only_for_an_open_leg(legs: OpenLegs) -> None:
    assert [legs.mark_aborted(1), legs.mark_aborted(1), legs.mark_aborted(2)] == [True, False, False]
    assert len(legs) == 1  # its last output still comes


def test_a_lost_session_loses_every_leg(legs: OpenLegs, recorder: Recorder) -> None:
    legs.lose_all("gone")
    assert (recorder.heard, len(legs), legs.queued_tokens) == (["gone"], 0, 0)
    assert recorder.kinds == {LegKind.PREFILL}
    assert not legs.deliver(FIRST, 0.0)


def test_a_receiver_may_start_another_leg_while_it_is_told(recorder: Recorder) -> None:
    legs = OpenLegs()

    class Restarter(Recorder):
        def lose(self, kind: LegKind, reason: str) -> None:
            legs.add(2, Leg(recorder, LegKind.PREFILL, Work(1)))

    legs.add(1, Leg(Restarter(), LegKind.DECODE, Work(100)))
    legs.lose_all("gone")
    assert (len(legs), legs.queued_tokens) == (1, 1)


def test_what_is_left_of_prompts_is_what_the_worker_told_and_legs_that_it_may_not_have_heard_of() -> None:
    legs, nobody, told = OpenLegs(), Recorder(), WorkerLoad(1, 900, 0, left_tokens=300)
    legs.add(1, Leg(nobody, LegKind.LOCAL, Work(1000)))
    left = [legs.load(told._replace(left_tokens=0)).left_tokens]
    for tokens in (0, 700, 300):
        legs.told()
        left.append(legs.load(told._replace(left_tokens=tokens)).left_tokens)
    legs.add(2, Leg(nobody, LegKind.DECODE, Work(1000)))
    legs.add(3, Leg(nobody, LegKind.PREFILL, Work(500, cached_tokens=100)))
    left.append(legs.load(told).left_tokens)
    assert left == [1000, 1000, 700, 300, 700]
    legs.lose_all("gone")
    assert legs.load(told).left_tokens == 300


def test_outputs_are_counted_by_their_slos_from_the_first_token_to_the_last() -> None:
    legs, tight, nobody = OpenLegs(), Slo(0.3, 0.04, 4.0), Recorder()
    for room, kind in enumerate((LegKind.DECODE, LegKind.LOCAL, LegKind.PREFILL, LegKind.DECODE), 1):
        legs.add(room, Leg(nobody, kind, Work(10, slo=NO_SLO if kind is LegKind.LOCAL else tight)))
    seen = []
    for room, ends in ((2, False), (3, False), (1, False), (4, False), (1, True), (3, True), (4, True), (2, True)):
        finish = inference_pb2.FINISH_REASON_STOP if ends else inference_pb2.FINISH_REASON_UNSPECIFIED
        legs.deliver(LegOutput(room=room, token_ids=[1], finish_reason=finish), 1.0)
        seen.append(dict(legs.load(WorkerLoad(0, 0, 0)).outputs))
    both = {NO_SLO: 1, tight: 2}
    assert seen == [{}, {}, {**both, tight: 1}, both, {**both, tight: 1}, {**both, tight: 1}, {}, {}]
