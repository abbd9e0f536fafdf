"""The fields that the OpenAI APIs share: of the choice of tokens, of what is told of it, and of the output's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from diptych.generation.sampling_params import MAX_ALLOWED_TOKENS, SamplingParams
from diptych.router.http.fields.choice_fields import ChoiceFields, Seed, Token
from diptych.router.http.fields.grammar_fields import GrammarFields


class SamplingFields(ChoiceFields, GrammarFields):
    """`None` is the same as absent."""

    seed: Seed | None = None
    min_tokens: int | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    prompt_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with the log-probability of each output token; None: show nothing."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        return self.params_with(
            min_tokens=self.min_tokens,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.grammar(),
        )
