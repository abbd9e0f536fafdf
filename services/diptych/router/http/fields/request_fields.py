"""The fields that every API has under the same names: of the request itself, how tokens are chosen, and what ends it.

`RequestFields` are those of the request, whatever it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from diptych.common.errors import InvalidRequest
from diptych.generation.logit_processor import MAX_NAME_LEN, ProcessorChoice
from diptych.generation.request_groups import MAX_EXPECTED_TOKENS, MAX_PRIORITY, MAX_TOOL_LEN, Account, Hints
from diptych.generation.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_REGEX,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from diptych.generation.slo import MAX_SLO_S
from diptych.router.http.fields.strict_model import GenerationBody, StrictModel
from diptych.router.keys.cache_namespace import hints_of
from diptych.router.values.slo_tiers import NO_WISH, SloWish

_SAMPLING: Final = {field.name for field in fields(SamplingParams)} - {"max_tokens", "seed"}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _off(value: object) -> object:
    """vLLM and SGLang write -1 for "all tokens"."""
    return 0 if value == -1 and type(value) is int else value


def _by_token(value: object) -> object:
    """JSON has strings for keys only; their numbers and the values are checked afterwards."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"takes at most {MAX_LOGIT_BIAS} tokens, not {len(value)}")
    if not all(key.isascii() and key.isdecimal() for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


StopList = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
StopStrings = Annotated[StopList, Field(max_length=MAX_STOP_STRINGS)]
TopK = Annotated[int, BeforeValidator(_off)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
Milliseconds = Annotated[float, Field(gt=0, le=1000 * MAX_SLO_S)]
Speculate = Literal["suffix", "ngram", "draft", "mtp", "eagle", "off"]
ProcessorName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LEN)]
LogitBias = Annotated[
    dict[Token, float],
    BeforeValidator(_by_token),
    WithJsonSchema(
        {"type": "object", "patternProperties": {"^[0-9]+$": {"type": "number"}}, "additionalProperties": False}
    ),
]


class SloFields(StrictModel):
    """What a request says of its service-level objective. `None` is the same as absent."""

    tier: str | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None


class AgentHints(StrictModel):
    """What an agent says of its request, as Dynamo's clients do. `None` is the same as absent."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    osl: Annotated[int, Field(ge=1, le=MAX_EXPECTED_TOKENS)] | None = None  # tokens that it expects of the output
    tool: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_LEN)] | None = None  # that it will run with the answer


NO_HINTS: Final = AgentHints()


class VendorFields(StrictModel):
    """Dynamo's own fields, of which only the hints are served."""

    agent_hints: AgentHints | None = None


class RequestFields(GenerationBody):
    """`None` is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: str | None = None
    speculate: Speculate | None = None
    slo: SloFields | None = None
    agent_hints: AgentHints | None = None
    nvext: VendorFields | None = None
    rid: Annotated[str, Field(min_length=1, max_length=128)] | None = None  # by which it may be aborted, beside its id

    def check(self) -> None:
        super().check()
        said = self.nvext.agent_hints if self.nvext else None
        if said is not None and self.agent_hints not in (None, said):
            text = "agent_hints and nvext.agent_hints differ: give one of them"
            raise InvalidRequest(text, param="agent_hints")
        priority = self._agent.priority
        if None not in (priority, self.priority) and priority != self.priority:
            text = f"priority is {self.priority} and {priority} in the agent's hints: give one of them"
            raise InvalidRequest(text, param="agent_hints.priority")

    @property
    def _agent(self) -> AgentHints:
        return self.agent_hints or (self.nvext and self.nvext.agent_hints) or NO_HINTS

    @property
    def tool(self) -> str:
        """The tool that whoever asks will run with the answer; empty: what the answer calls."""
        return self._agent.tool or ""

    @property
    def affinity(self) -> str:
        """The group of requests that it belongs to, whose beginnings are likely to be alike; empty: none."""
        return ""

    @property
    def model_name(self) -> str | None:
        return self.model

    @property
    def said_as(self) -> Mapping[str, str]:
        """What this API calls the fields that it calls otherwise than `SamplingParams` and its like."""
        return {}

    def account(self, tenant: str) -> Account:
        return Account(tenant, self.priority or self._agent.priority or 0)

    def wish(self) -> SloWish:
        said = self.slo
        return NO_WISH if said is None else SloWish(said.tier or "", said.ttft_ms or 0.0, said.tpot_ms or 0.0)

    def hints(self, cache_owner: bytes) -> Hints:
        """Raises `InvalidRequest`."""
        return hints_of(cache_owner, self.cache_salt or "", self.speculate or "", self._agent.osl or 0)


class ChoiceFields(GenerationBody):
    """Named as OpenAI does, and what OpenAI has not as vLLM and SGLang do. `None` is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stop_regex: Annotated[StopList, Field(max_length=MAX_STOP_REGEX)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # false: they are shown, but for those that end the output
    spaces_between_special_tokens: bool | None = None  # without effect: nothing is put between them

    @property
    def shows_special(self) -> bool:
        return self.skip_special_tokens is False


def processor_of(name: str | None, params: dict[str, Any] | None) -> ProcessorChoice | None:
    """Return the processor that a request names, in SGLang's words. Raises `InvalidRequest`."""
    if name is None:
        if params:
            raise InvalidRequest("custom_params are for a custom_logit_processor: name one", param="custom_params")
        return None
    return ProcessorChoice(name, json.dumps(params or {}))


def params_of(body: BaseModel, **others: Any) -> SamplingParams:
    """Return what fields say that `SamplingParams` has under the same names, and `others`, which have other names.

    `None` is the default. `max_tokens` and `seed` are left out: they are the request's.
    """
    names = _SAMPLING & body.model_fields_set & type(body).model_fields.keys()
    said = {name: getattr(body, name) for name in names} | others
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return SamplingParams(**given | {name: tuple(value) for name, value in given.items() if isinstance(value, list)})
