"""What a request asks for, how it ends, and log-probabilities, to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from diptych.generation.attention_tokens import AttentionWish, TokenAttention
from diptych.generation.embed_rows import EmbedRows
from diptych.generation.finish import Finish
from diptych.generation.grammar import Grammar, GrammarKind, Preamble
from diptych.generation.insight import HiddenStates, Insight
from diptych.generation.logit_processor import ProcessorChoice
from diptych.generation.logprobs import TokenLogprobs
from diptych.generation.request_groups import NO_ACCOUNT, NO_HINTS, Account, Hints, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment
from diptych.generation.slo import NO_SLO, Slo
from diptych.v1 import inference_pb2, worker_pb2

FINISH_TO_WIRE: Final[Mapping[Finish, inference_pb2.FinishReason]] = {
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: inference_pb2.FINISH_REASON_ABORTED,
}
MAX_TIMEOUT_MS: Final = 2**32 - 1  # that a leg holds


def account_from_wire(wire: inference_pb2.GenerateRequest | worker_pb2.StartLeg) -> Account:
    """Clients of the gRPC API and routers say it in the same words."""
    return Account(wire.tenant, wire.priority) if wire.tenant or wire.priority else NO_ACCOUNT


def hints_from_wire(leg: worker_pb2.StartLeg) -> Hints:
    said = leg.cache_salt, leg.lora, leg.prediction, leg.speculate, leg.expected_output_tokens
    return Hints(*said) if any(said) else NO_HINTS


def life_from_wire(leg: worker_pb2.StartLeg, now_s: float) -> Life:
    return Life(leg.request_id, now_s, now_s + leg.timeout_ms / 1000 if leg.timeout_ms else math.inf)


def slo_from_wire(leg: worker_pb2.StartLeg) -> Slo:
    if not leg.HasField("slo"):
        return NO_SLO
    wire = leg.slo
    return Slo(wire.ttft_ms / 1000, wire.tpot_ms / 1000, wire.weight or NO_SLO.weight, wire.sheddable)


def slo_to_wire(slo: Slo) -> worker_pb2.Slo | None:
    """Return nothing of one that says nothing."""
    if slo == NO_SLO:
        return None
    return worker_pb2.Slo(
        ttft_ms=1000 * slo.ttft_s, tpot_ms=1000 * slo.tpot_s, weight=slo.weight, sheddable=slo.sheddable
    )


def leg_to_wire(account: Account, hints: Hints, life: Life, slo: Slo, now_s: float) -> worker_pb2.StartLeg:
    """Return a leg that says this, and nothing else yet."""
    return worker_pb2.StartLeg(
        tenant=account.tenant,
        priority=account.priority,
        cache_salt=hints.cache_namespace,
        lora=hints.adapter,
        prediction=hints.prediction,
        speculate=hints.speculate,
        expected_output_tokens=hints.expected_tokens,
        request_id=life.request_id,
        timeout_ms=_timeout_ms(life.deadline_s - now_s),
        slo=slo_to_wire(slo),
    )


def content_to_wire(content: ContentSegment) -> worker_pb2.ContentSegment:
    image = content.image
    return worker_pb2.ContentSegment(
        start=content.start,
        num_tokens=content.num_tokens,
        digest=content.digest,
        image=worker_pb2.Image(height=image.height, width=image.width, rgb=image.rgb) if image else None,
        encoder_instance_id=content.encoder,
        rows=None if content.rows is None else _rows_to_wire(content.rows),
    )


def _rows_to_wire(rows: EmbedRows) -> worker_pb2.EmbedRows:
    return worker_pb2.EmbedRows(width=rows.width, names=rows.names, data=rows.data)


def _timeout_ms(left_s: float) -> int:
    """Return what a leg is told of its client's deadline; of silence the router judges, who hears both legs."""
    return 0 if left_s == math.inf else min(MAX_TIMEOUT_MS, max(1, round(left_s * 1000)))


def params_from_wire(wire: inference_pb2.SamplingParams) -> SamplingParams:
    """Return what is said; but for stop strings and regular expressions, as below."""
    said: dict[str, Any] = {}
    for field, value in wire.ListFields():
        name = field.name
        if name not in _STOPS:
            said[name] = _FROM_WIRE[name](value) if name in _FROM_WIRE else value
    return SamplingParams(**said)


def params_to_wire(params: SamplingParams) -> inference_pb2.SamplingParams:
    """Complete but for stop strings and regular expressions: those are matched where text is made."""
    return inference_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        logprob_token_ids=params.logprob_token_ids,
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprobs_start=params.prompt_logprobs_start or None,
        attention=None if params.attention is None else _wish_to_wire(params.attention),
        hidden_states=params.hidden_states,
        processor=None if params.processor is None else _processor_to_wire(params.processor),
        grammar=None if params.grammar is None else grammar_to_wire(params.grammar),
    )


def _processor_from_wire(wire: inference_pb2.LogitProcessor) -> ProcessorChoice:
    return ProcessorChoice(wire.name, wire.params or "{}")


def _processor_to_wire(choice: ProcessorChoice) -> inference_pb2.LogitProcessor:
    return inference_pb2.LogitProcessor(name=choice.name, params=choice.params)


def grammar_from_wire(wire: inference_pb2.Grammar) -> Grammar | None:
    kind = wire.WhichOneof("kind")
    if kind is None:
        return None
    preamble = Preamble(wire.preamble_opening, wire.preamble_closing) if wire.preamble_closing else None
    return Grammar(GrammarKind(kind), getattr(wire, kind), preamble)


def grammar_to_wire(grammar: Grammar) -> inference_pb2.Grammar:
    wire = inference_pb2.Grammar(**{grammar.kind.value: grammar.text})
    if grammar.preamble is not None:
        wire.preamble_opening, wire.preamble_closing = grammar.preamble.opening, grammar.preamble.closing
    return wire


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprobs=logprobs.logprobs,
        num_top=logprobs.num_top,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        asked_ids=logprobs.asked_ids,
        asked_logprobs=logprobs.asked_logprobs,
    )


def logprobs_from_wire(wire: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    tops = tuple(wire.top_ids), tuple(wire.top_logprobs)
    return TokenLogprobs(tuple(wire.logprobs), wire.num_top, *tops, tuple(wire.asked_ids), tuple(wire.asked_logprobs))


def _wish_from_wire(wire: inference_pb2.AttentionWish) -> AttentionWish:
    return AttentionWish(wire.top_k or AttentionWish().top_k, tuple(wire.layers), wire.window)


def _wish_to_wire(wish: AttentionWish) -> inference_pb2.AttentionWish:
    return inference_pb2.AttentionWish(top_k=wish.top_k, layers=wish.layers, window=wish.window)


_STOPS: Final = frozenset({"stop", "stop_regex"})
_FROM_WIRE: Final[Mapping[str, Callable[[Any], Any]]] = {  # sampling parameters that are no plain values
    "stop_token_ids": tuple,
    "logprob_token_ids": tuple,
    "logit_bias": dict,
    "allowed_token_ids": tuple,
    "attention": _wish_from_wire,
    "processor": _processor_from_wire,
    "grammar": grammar_from_wire,
}


def _attention_to_wire(told: TokenAttention) -> inference_pb2.TokenAttention:
    return inference_pb2.TokenAttention(
        layers=told.layers, top_k=told.top_k, positions=told.positions, weights=told.weights
    )


def _attention_from_wire(wire: inference_pb2.TokenAttention) -> TokenAttention:
    return TokenAttention(tuple(wire.layers), wire.top_k, tuple(wire.positions), tuple(wire.weights))


def insight_to_wire(told: Insight | None) -> dict[str, Any]:
    """Return the fields that a message with tokens has for it."""
    if told is None:
        return {}
    attention, states = told.attention, told.hidden_states
    return {
        "attention": None if attention is None else _attention_to_wire(attention),
        "hidden_states": None if states is None else inference_pb2.HiddenStates(size=states.size, values=states.values),
    }


def insight_from_wire(wire: worker_pb2.LegOutput) -> Insight | None:
    has_attention, has_states = wire.HasField("attention"), wire.HasField("hidden_states")
    if not (has_attention or has_states):
        return None
    states = wire.hidden_states
    return Insight(
        _attention_from_wire(wire.attention) if has_attention else None,
        HiddenStates(states.size, states.values) if has_states else None,
    )
