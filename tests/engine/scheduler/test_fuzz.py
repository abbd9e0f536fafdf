"""Whatever a router, a peer or a rank says: a scheduler answers or refuses it, and allocates nothing that it names."""

from __future__ import annotations

import contextlib
import math
import tracemalloc

import numpy as np
from fuzzing import FLOATS, I32, U32, U64, fuzz, malformed
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import InvalidRequest
from diptych.common.members.roles import Role
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.lora.registry import Loaded
from diptych.engine.schedule.admission import refuse
from diptych.engine.scheduler import codec
from diptych.engine.tensor_parallel import rank_log
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.limits import Limits
from diptych.generation.codec import params_to_wire
from diptych.generation.request_groups import MAX_PRIORITY
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo
from diptych.v1 import inference_pb2, rank_pb2, worker_pb2

MAX_TOKENS, VOCAB = 64, 100
LIMITS = Limits(MAX_TOKENS, VOCAB, frozenset(), MAX_TOKENS, 1)
BARE = Loaded("", -1, "")


def sampling() -> st.SearchStrategy[inference_pb2.SamplingParams]:
    return st.builds(
        inference_pb2.SamplingParams,
        max_tokens=U32,
        temperature=FLOATS,
        top_p=FLOATS,
        top_k=U32,
        seed=U64,
        stop_token_ids=st.lists(U32, max_size=3),
        min_p=FLOATS,
        frequency_penalty=FLOATS,
        presence_penalty=FLOATS,
        repetition_penalty=FLOATS,
        allowed_token_ids=st.lists(U32, max_size=2),
        logit_bias=st.dictionaries(U32, FLOATS, max_size=2),
        min_tokens=U32,
        logprobs=st.none() | U32,
        prompt_logprobs=st.none() | U32,
        grammar=st.none() | st.builds(inference_pb2.Grammar, regex=st.text(max_size=5)),
    )


def plain() -> st.SearchStrategy[inference_pb2.SamplingParams]:
    return st.builds(inference_pb2.SamplingParams, max_tokens=U32, temperature=st.just(1.0), top_p=st.just(1.0))


def legs() -> st.SearchStrategy[worker_pb2.StartLeg]:
    return st.builds(
        worker_pb2.StartLeg,
        room=st.integers(0, 2) | U64,
        prompt_token_ids=st.lists(U32, max_size=80),
        prompt_tokens=st.just(b"") | st.binary(max_size=80),
        prompt_text=st.just("") | st.text(max_size=2),
        sampling=plain() | sampling(),
        peer_instance_id=U64,
        num_prior_output_tokens=st.integers(0, 80) | U32,
        timeout_ms=U32,
        cache_salt=st.binary(max_size=40),
        priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY) | I32,
        tenant=st.text(max_size=5),
        compat=st.sampled_from(("", "other")),
        speculate=st.sampled_from(("", "off", "suffix", "ngram", "mtp")),
        prediction=st.binary(max_size=40),
        kind=I32,
        computed_by_instance_id=U64,
        slo=st.none()
        | st.builds(worker_pb2.Slo, ttft_ms=FLOATS, tpot_ms=FLOATS, weight=FLOATS, sheddable=st.booleans()),
    )


@fuzz
@given(leg=legs())
def test_legs_become_requests_that_can_be_served_or_are_refused(leg: worker_pb2.StartLeg) -> None:
    try:
        request = codec.start_from_wire(leg, BARE, now_s=1.0, max_tokens=MAX_TOKENS).request
    except InvalidRequest:
        return
    assert all(map(math.isfinite, request.slo))
    assert min(request.slo.ttft_s, request.slo.tpot_s) >= 0 < request.slo.weight
    num_tokens = len(leg.prompt_tokens) // 4 + len(leg.prompt_token_ids)
    assert len(request.tokens) <= max(MAX_TOKENS, num_tokens + 1)
    if refuse(request, LIMITS, is_known=False, max_tokens=MAX_TOKENS, num_waiting=0) is None:
        params = request.params
        assert all(map(math.isfinite, (params.temperature, params.top_p, params.min_p, params.repetition_penalty)))
        assert 0 < num_tokens < MAX_TOKENS
        assert request.tokens[: request.prompt_len].max() < VOCAB
        assert 1 <= params.max_tokens <= MAX_TOKENS


def test_a_request_has_the_slo_of_its_leg() -> None:
    slo = worker_pb2.Slo(ttft_ms=250, tpot_ms=40, weight=4, sheddable=True)
    leg = worker_pb2.StartLeg(room=1, prompt_token_ids=[1], sampling=params_to_wire(SamplingParams()), slo=slo)
    request = codec.start_from_wire(leg, BARE, now_s=0.0, max_tokens=MAX_TOKENS).request
    assert request.slo == Slo(0.25, 0.04, 4.0, sheddable=True)


def test_who_computed_a_prompt_is_the_peer_unless_its_leg_says_otherwise() -> None:
    leg = worker_pb2.StartLeg(room=1, prompt_token_ids=[1], sampling=params_to_wire(SamplingParams()))
    leg.peer_instance_id, leg.computed_by_instance_id = 5, 7
    start = codec.start_from_wire(leg, BARE, now_s=0.0, max_tokens=MAX_TOKENS)
    assert (start.peer, start.computed_by) == (5, 7)


def test_what_a_leg_asks_for_is_looked_at_before_room_is_made_for_it() -> None:
    huge = inference_pb2.SamplingParams(max_tokens=2**32 - 1, temperature=1.0, top_p=1.0, prompt_logprobs=2**32 - 1)
    leg = worker_pb2.StartLeg(room=1, prompt_token_ids=[1] * 1000, sampling=huge)
    tracemalloc.start()
    with contextlib.suppress(InvalidRequest):
        codec.start_from_wire(leg, BARE, now_s=0.0, max_tokens=MAX_TOKENS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@fuzz
@given(batches=st.lists(st.tuples(st.booleans(), st.lists(legs(), max_size=6), st.lists(U64, max_size=4)), max_size=4))
def test_two_routers_that_say_anything_keep_their_rooms_apart(
    batches: list[tuple[bool, list[worker_pb2.StartLeg], list[int]]],
) -> None:
    sessions = Sessions(Role.UNIFIED)
    first, second = sessions.open(), sessions.open()
    for is_first, wanted, aborted in batches:
        session = first if is_first else second
        accepted = sessions.start(session, wanted)
        assert {leg.room for leg in accepted} <= session.rooms
        assert set(sessions.owned(session, aborted)) <= session.rooms
    assert not first.rooms & second.rooms
    assert 0 not in first.rooms | second.rooms
    assert sessions.num_open_rooms == len(first.rooms) + len(second.rooms)
    sessions.close(first)
    sessions.close(second)
    assert sessions.num_open_rooms == 0


BATCH = ForwardBatch(
    mode=ForwardMode("decode"),
    input_ids=np.arange(2),
    positions=np.arange(2),
    out_slots=np.arange(2),
    page_table=np.zeros((2, 3), np.int32),
    seq_lens=np.ones(2, np.int64),
    extend_lens=np.ones(2, np.int64),
    num_sampled=np.ones(2, np.int64),
    prompt_rows=None,
)


@fuzz
@given(data=malformed(rank_log.step_to_wire(BATCH).SerializeToString()))
def test_entries_of_the_rank_log(data: bytes) -> None:
    with contextlib.suppress(DecodeError, ValueError):
        step = rank_log.step_from_wire(rank_pb2.Step.FromString(data))
        assert step.page_table.shape[0] == len(step.seq_lens)
