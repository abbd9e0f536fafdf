"""The fields that say how tokens are chosen, when the output ends, and what is told of the choice."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from diptych.engine.sampling_params import SamplingParams
from diptych.router.http.grammar_fields import GrammarFields

_TAKEN_OVER: Final = (  # mean the same in `SamplingParams`
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _by_token(value: object) -> object:
    """JSON has strings for keys only; their numbers and the values are checked afterwards."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdecimal() for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


StopList = Annotated[list[str], BeforeValidator(_listed)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
LogitBias = Annotated[dict[Token, float], BeforeValidator(_by_token)]


class SamplingFields(GrammarFields):
    """Named as OpenAI does, and what OpenAI has not as vLLM and SGLang do. `None` is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopList | None = None
    stop_token_ids: list[Token] | None = None
    stop_regex: StopList | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with the log-probability of each output token; None: show nothing."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        taken_over: dict[str, Any] = {name: getattr(self, name) for name in _TAKEN_OVER}
        return SamplingParams(
            **{name: value for name, value in taken_over.items() if value is not None},
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=tuple(self.stop_regex or ()),
            logprobs=self.num_logprobs,
            grammar=self.grammar(),
        )
