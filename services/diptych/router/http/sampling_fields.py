"""The fields that the OpenAI APIs share: of the choice of tokens, of what is told of it, and of the output's form."""

from __future__ import annotations

from diptych.engine.sampling_params import SamplingParams
from diptych.router.http.choice_fields import ChoiceFields, Seed
from diptych.router.http.grammar_fields import GrammarFields


class SamplingFields(ChoiceFields, GrammarFields):
    """`None` is the same as absent."""

    seed: Seed | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with the log-probability of each output token; None: show nothing."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        return self.params_with(
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.grammar(),
        )
