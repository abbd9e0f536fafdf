"""POST /v1/completions: what the body may contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, WithJsonSchema

from diptych.common.errors import InvalidRequest
from diptych.engine.sampling_params import SamplingParams
from diptych.router.http.fields import GenerationFields
from diptych.router.http.strict_model import Unsupported
from diptych.router.request import Prompt, TextPrompt, TokenPrompt

MAX_PROMPTS: Final = 128
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

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "suffix": ("",),
    }

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    best_of: int | None = None
    logprobs: Annotated[int | None, BeforeValidator(_count)] = None
    echo: bool | None = None
    # not supported
    suffix: Unsupported = None

    def check(self) -> None:
        super().check()
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            text = "best_of must equal n in a stream: the best is known when all are complete"
            raise InvalidRequest(text, param="best_of")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def sampling_params(self) -> SamplingParams:
        params = super().sampling_params()
        if self.echoes and params.prompt_logprobs is None:
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
