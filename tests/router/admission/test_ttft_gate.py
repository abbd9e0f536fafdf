from __future__ import annotations

import pytest

from diptych.common.errors import Overloaded
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.admission.queue import Reason
from diptych.router.admission.ttft_gate import TtftGate
from diptych.router.values.request import ClientRequest, GenerationRequest, Prediction, Routing, Tokenized


class World:
    """A gate before workers that need `ttft_s` for a first token, as far as anybody knows."""

    def __init__(self, ttft_s: float | None, default_deadline_s: float = 0.0) -> None:
        self.ttft_s = ttft_s
        self.now_s = 10.0
        self.refusals: list[Reason] = []
        self.gate = TtftGate(self, default_deadline_s, self.refusals.append, lambda: self.now_s)

    def let_one_through(self) -> None:
        """Else the next one tries."""
        ttft_s, self.ttft_s = self.ttft_s, 0.0
        self.check(deadline_s=1.0)
        self.ttft_s = ttft_s

    def predict_ttft(self, request: GenerationRequest) -> float | None:
        return self.ttft_s

    def check(self, deadline_s: float | None, spent_s: float = 0.0) -> Prediction | None:
        return self.check_call(1, deadline_s, spent_s)[0]

    def check_call(self, num_requests: int, deadline_s: float | None, spent_s: float = 0.0) -> list[Prediction | None]:
        arrival_s = self.now_s - spent_s
        params, routing = SamplingParams(max_tokens=9), Routing(ttft_deadline_s=deadline_s)
        client = ClientRequest("", [], params, life=Life("r", arrival_s, deadline_s=99.0), routing=routing)
        request = GenerationRequest(client, Tokenized([1]), params, silence_s=600.0)
        return [passed.prediction for passed in self.gate.check([request] * num_requests)]


def test_what_will_be_in_time_passes_with_what_is_predicted_for_it() -> None:
    assert World(0.5).check(1.0, spent_s=0.25) == Prediction(10.0, 0.5)


def test_what_will_be_late_is_refused_and_told_when_to_come_back() -> None:
    world = World(3.0)
    world.let_one_through()
    with pytest.raises(Overloaded, match="later than the request allows") as caught:
        world.check(0.5)
    assert (caught.value.retry_after_s, world.refusals) == (3, [Reason.TTFT_DEADLINE])


def test_the_time_in_line_counts() -> None:
    world = World(0.5)
    world.let_one_through()
    with pytest.raises(Overloaded):
        world.check(1.0, spent_s=0.6)


@pytest.mark.parametrize(("ttft_s", "deadline_s"), [(None, 0.001), (99.0, None)])
def test_who_asks_for_nothing_or_of_which_nothing_is_known_passes(
    ttft_s: float | None, deadline_s: float | None
) -> None:
    assert World(ttft_s).check(deadline_s) is None


def test_the_operator_may_set_a_limit_for_those_who_ask_for_none() -> None:
    world = World(3.0, default_deadline_s=2.0)
    assert world.check(4.0) == Prediction(10.0, 3.0)
    with pytest.raises(Overloaded):
        world.check(None)


def test_predictions_are_corrected_by_what_came_true() -> None:
    world = World(0.5)
    params, life = SamplingParams(), Life("r", 10.0, 99.0)
    client = ClientRequest("", [], params, life=life, routing=Routing(ttft_deadline_s=1.0))
    request = GenerationRequest(client, Tokenized([1]), params, 600.0, Prediction(10.0, 0.5))
    world.now_s = 11.5
    for _ in range(20):
        world.gate.learn(request)
    world.let_one_through()
    with pytest.raises(Overloaded):
        world.check(1.0)


def test_when_nobody_was_let_through_for_as_long_as_it_would_wait_a_request_tries() -> None:
    world, passed = World(99.0), []
    for _ in range(30):
        world.now_s += 0.1
        try:
            world.check(1.0)
        except Overloaded:
            continue
        passed.append(round(world.now_s, 1))
    assert len(passed) == 3


def test_the_requests_of_a_call_try_together() -> None:
    world = World(99.0)
    assert world.check_call(3, deadline_s=1.0) == [Prediction(10.0, 99.0)] * 3
    with pytest.raises(Overloaded):
        world.check_call(3, deadline_s=1.0)
    assert world.refusals == [Reason.TTFT_DEADLINE]
