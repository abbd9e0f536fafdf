from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from diptych.generation.attention_tokens import AttentionWish
from diptych.generation.codec import params_from_wire, params_to_wire
from diptych.generation.grammar import Grammar, GrammarKind, Preamble
from diptych.generation.logit_processor import ProcessorChoice
from diptych.generation.sampling_params import SamplingParams
from diptych.v1.inference_pb2 import SamplingParams as WireParams

STOPS = {"stop", "stop_regex"}
ALL_SAID = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    seed=2**63,
    stop_token_ids=(4, 5),
    ignore_eos=True,
    min_p=0.125,
    frequency_penalty=-0.5,
    presence_penalty=0.5,
    repetition_penalty=1.5,
    logit_bias={6: -1.5},
    allowed_token_ids=(6, 7),
    min_tokens=2,
    logprobs=0,
    logprob_token_ids=(8,),
    prompt_logprobs=0,
    prompt_logprobs_start=9,
    attention=AttentionWish(3, (1, 2), 10),
    hidden_states=True,
    processor=ProcessorChoice("mine", '{"a": 1}'),
    grammar=Grammar(GrammarKind.REGEX, "a+", Preamble("<", ">")),
)


def test_every_sampling_parameter_but_the_stops_of_text_survives_the_wire() -> None:
    unsaid = {
        each.name for each in fields(ALL_SAID) if getattr(ALL_SAID, each.name) == getattr(SamplingParams(), each.name)
    }
    assert unsaid == STOPS
    assert params_from_wire(params_to_wire(ALL_SAID)) == ALL_SAID


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"temperature": 100.0},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0},
    ],
)
def test_what_is_allowed_here_is_allowed_behind_the_wire_whose_numbers_are_shorter(params: dict[str, Any]) -> None:
    said = SamplingParams(**params)
    said.validate()
    params_from_wire(params_to_wire(said)).validate()


def test_the_message_says_nothing_else() -> None:
    assert set(WireParams.DESCRIPTOR.fields_by_name) == {each.name for each in fields(SamplingParams)}


def test_what_is_not_said_has_its_default() -> None:
    assert params_from_wire(WireParams(stop=["end"], stop_regex=["e+"])) == SamplingParams()
    assert params_from_wire(WireParams(temperature=0.0)) == SamplingParams(temperature=0.0)
