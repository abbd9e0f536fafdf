from __future__ import annotations

import dataclasses

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.attention_tokens import MAX_ENTRIES, AttentionWish, TokenAttention, join
from diptych.generation.codec import insight_from_wire, insight_to_wire, params_from_wire, params_to_wire
from diptych.generation.insight import Insight
from diptych.generation.sampling_params import SamplingParams
from diptych.v1.worker_pb2 import LegOutput

TOLD = TokenAttention((1, 4), 2, (5, 3, 0, -1, 6, 3, 1, 0), (0.5, 0.25, 0.125, 0.0, 0.5, 0.25, 0.75, 0.125))


@pytest.mark.parametrize("wish", [None, AttentionWish(), AttentionWish(32, (3, 1), 9)])
def test_a_wish_survives_the_leg(wish: AttentionWish | None) -> None:
    assert params_from_wire(params_to_wire(SamplingParams(attention=wish))).attention == wish


def test_what_is_told_survives_the_leg_and_comes_apart_by_token() -> None:
    told = Insight(TOLD)
    assert insight_from_wire(LegOutput(**insight_to_wire(told))) == told
    assert len(TOLD) == 2
    assert join([TOLD.span(0, 1), TOLD.span(1, 2)]) == TOLD
    assert TOLD.span(1, 2).positions == (6, 3, 1, 0)
    assert len(TokenAttention((), 0, (), ())) == 0


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (AttentionWish(top_k=0), "top_k_attention"),
        (AttentionWish(top_k=33), "top_k_attention"),
        (AttentionWish(layers=(*range(9),)), "attention_layers"),
        (AttentionWish(layers=(1, 1)), "attention_layers"),
        (AttentionWish(layers=(-1,)), "attention_layers"),
        (AttentionWish(window=-1), "attention_window"),
        (AttentionWish(top_k=32, layers=(*range(8),)), "top_k_attention"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(wish: AttentionWish, param: str) -> None:
    params = SamplingParams(max_tokens=MAX_ENTRIES // 256 + 1, attention=wish)
    with pytest.raises(InvalidRequest) as refused:
        params.validate()
    assert refused.value.param == param


def test_the_outputs_of_a_request_are_bounded_together() -> None:
    wish = AttentionWish(32, (*range(8),))
    wish.validate(MAX_ENTRIES // 512, num_outputs=2)
    for max_tokens, num_outputs in ((MAX_ENTRIES // 256, 2), (MAX_ENTRIES // 512 + 1, 2), (1, MAX_ENTRIES)):
        with pytest.raises(InvalidRequest, match="at most 131072, not 32 ") as refused:
            wish.validate(max_tokens, num_outputs)
        assert refused.value.param == "top_k_attention"
    assert wish.most_tokens(2) == MAX_ENTRIES // 512
    assert wish.most_tokens(MAX_ENTRIES) == 0


def test_the_longest_output_is_as_long_as_is_listed_of_it() -> None:
    params = SamplingParams(max_tokens=MAX_ENTRIES // 256, attention=AttentionWish(32, (*range(8),)))
    params.validate()
    assert not params.is_plain
    assert dataclasses.replace(params, attention=None).is_plain
