"""POST /v1/completions: what the body may contain."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import SamplingParams
from diptych.router.http.fields.fields import GenerationFields
from diptych.router.http.fields.text_parts import PredictionFields, predicted_text
from diptych.router.values.request import Prompt, TextPrompt, TokenPrompt

MAX_PROMPTS: Final = 128
DEFAULT_MAX_TOKENS: Final = 16  # as OpenAI's API has it
PROMPT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}
PROMPT_TYPES: Final = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _count(value: object) -> object:
    """Some clients write false for none."""
    return None if value is False else value


class CompletionRequest(GenerationFields):
    """The body."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    best_of: int | None = None
    logprobs: Annotated[int | None, BeforeValidator(_count)] = None
    echo: bool | None = None
    prediction: PredictionFields | None = None  # of each output

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            text = "max_tokens must be at least 1, or the prompt is wanted: give echo or prompt_logprobs"
            raise InvalidRequest(text, param="max_tokens")
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            text = "best_of must equal n in a stream: the best is known when all are complete"
            raise InvalidRequest(text, param="best_of")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def predicted_text(self) -> str:
        return predicted_text(self.prediction)

    def sampling_params(self) -> SamplingParams:
        params = super().sampling_params()
        if self.echo and params.prompt_logprobs is None:
            return replace(params, prompt_logprobs=params.logprobs)
        return params

    def prompts(self) -> list[Prompt]:
        """Return the prompts, at least one. Raises `InvalidRequest` for any other shape."""
        items = self.prompt if _is_batch(self.prompt) else [self.prompt]
        if not 1 <= len(items) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt takes 1 to {MAX_PROMPTS} prompts, not {len(items)}", param="prompt")
        return [_prompt(item) for item in items]


def _is_batch(prompt: object) -> bool:
    """Whether it is several prompts: a list of anything but token ids."""
    return isinstance(prompt, list) and not (prompt and type(prompt[0]) is int)


def _prompt(item: object) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item)
    if isinstance(item, list) and all(type(token_id) is int for token_id in item):  # a bool is not a token
        return TokenPrompt(item)
    raise InvalidRequest(f"prompt must be {PROMPT_TYPES}", param="prompt")
