from __future__ import annotations

import pytest

from diptych.common.members.roles import Role
from diptych.engine.frontend.sessions import Sessions
from diptych.generation.leg_size import MAX_CHARS_A_TOKEN, MAX_NAME_LEN, MAX_SALT_BYTES, too_large
from diptych.generation.sampling_params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from diptych.v1 import worker_pb2
from diptych.v1.inference_pb2 import SamplingParams
from diptych.v1.worker_pb2 import ContentSegment, StartLeg

CONTEXT_LEN = 64

FITTING = {
    "contents": StartLeg(contents=[ContentSegment(num_tokens=CONTEXT_LEN - 2)], prompt_token_ids=[1]),
    "empty contents": StartLeg(contents=[ContentSegment()] * (CONTEXT_LEN - 1)),
    "ids": StartLeg(prompt_token_ids=[1] * (CONTEXT_LEN - 1)),
    "packed": StartLeg(prompt_tokens=bytes(4 * (CONTEXT_LEN - 1))),
    "text": StartLeg(prompt_text="a" * MAX_CHARS_A_TOKEN * CONTEXT_LEN),
    "salt": StartLeg(cache_salt=bytes(MAX_SALT_BYTES)),
    "tenant": StartLeg(tenant="t" * MAX_NAME_LEN),
    "lora": StartLeg(lora="l" * MAX_NAME_LEN),
    "request id": StartLeg(request_id="r" * MAX_NAME_LEN),
    "speculate": StartLeg(speculate="s" * MAX_NAME_LEN),
    "prediction": StartLeg(prediction=bytes(4 * CONTEXT_LEN)),
    "stop": StartLeg(sampling=SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS)),
    "bias": StartLeg(sampling=SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))),
    "allowed": StartLeg(sampling=SamplingParams(allowed_token_ids=range(MAX_ALLOWED_TOKENS))),
}
ONE_MORE = {
    "contents": StartLeg(contents=[ContentSegment(num_tokens=1)]),
    "empty contents": StartLeg(contents=[ContentSegment()]),
    "ids": StartLeg(prompt_token_ids=[1]),
    "packed": StartLeg(prompt_token_ids=[1]),
    "text": StartLeg(prompt_text=FITTING["text"].prompt_text + "a"),
    "salt": StartLeg(cache_salt=bytes(MAX_SALT_BYTES + 1)),
    "tenant": StartLeg(tenant="t" * (MAX_NAME_LEN + 1)),
    "lora": StartLeg(lora="l" * (MAX_NAME_LEN + 1)),
    "request id": StartLeg(request_id="r" * (MAX_NAME_LEN + 1)),
    "speculate": StartLeg(speculate="s" * (MAX_NAME_LEN + 1)),
    "prediction": StartLeg(prediction=bytes(4 * (CONTEXT_LEN + 1))),
    "stop": StartLeg(sampling=SamplingParams(stop_token_ids=[1])),
    "bias": StartLeg(sampling=SamplingParams(logit_bias={MAX_LOGIT_BIAS: 1.0})),
    "allowed": StartLeg(sampling=SamplingParams(allowed_token_ids=[1])),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_leg_may_be_as_large_as_a_router_lets_it_be_and_no_larger(name: str) -> None:
    leg = StartLeg()
    leg.MergeFrom(FITTING[name])
    assert too_large(leg, CONTEXT_LEN) is None
    leg.MergeFrom(ONE_MORE[name])
    assert too_large(leg, CONTEXT_LEN) is not None


def test_a_leg_that_is_too_large_never_reaches_the_scheduler_and_those_beside_it_do() -> None:
    sessions = Sessions(Role.UNIFIED)
    sessions.context_len = CONTEXT_LEN
    session = sessions.open()
    legs = [StartLeg(room=1, prompt_token_ids=[1] * CONTEXT_LEN), StartLeg(room=2, prompt_token_ids=[1])]
    legs[1].kind = worker_pb2.LEG_KIND_LOCAL
    assert [leg.room for leg in sessions.start(session, legs)] == [2]
    assert session.rooms == {2}
