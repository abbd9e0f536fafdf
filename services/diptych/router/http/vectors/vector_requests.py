"""What the bodies may contain: OpenAI's embeddings, vLLM's classes and scores, Jina's and Cohere's ranks."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.request_fields import RequestFields
from diptych.router.http.fields.strict_model import ConversationPart
from diptych.router.values.request import PoolingParams, Prompt, TextPrompt, TokenPrompt
from diptych.router.values.validation import MAX_INPUTS

INPUT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
    ]
}
INPUT_TYPES: Final = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
Input = Annotated[Any, WithJsonSchema(INPUT_SCHEMA)]


class VectorFields(RequestFields):
    """What all have in common. `None` is the same as absent."""

    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: as many as the model takes
    truncation_side: Literal["left", "right"] | None = None  # what is cut off; right

    def check(self) -> None:
        super().check()
        if self.stream:
            raise InvalidRequest("a vector has no stream: leave stream out", param="stream")
        if self.truncate_prompt_tokens == 0:
            text = "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes"
            raise InvalidRequest(text, param="truncate_prompt_tokens")

    def pooling_params(self, labels: tuple[int, ...] = ()) -> PoolingParams:
        return PoolingParams(labels, self.truncate_prompt_tokens or 0, self.truncation_side == "left")


class InputFields(VectorFields):
    """Inputs that each get a vector."""

    input: Input
    add_special_tokens: bool | None = None  # to texts, as the model's tokenizer does; true

    def prompts(self) -> list[Prompt]:
        """Return the prompts, at least one. Raises `InvalidRequest` for any other shape."""
        items = self.input if _is_batch(self.input) else [self.input]
        if not 1 <= len(items) <= MAX_INPUTS:
            raise InvalidRequest(f"input takes 1 to {MAX_INPUTS} inputs, not {len(items)}", param="input")
        return [self._prompt(item) for item in items]

    def _prompt(self, item: object) -> Prompt:
        if not item:
            raise InvalidRequest("input is empty, and of nothing there is no vector: leave it out", param="input")
        if isinstance(item, str):
            return TextPrompt(item, self.add_special_tokens is not False)
        if isinstance(item, list) and all(type(token_id) is int for token_id in item):  # a bool is not a token
            return TokenPrompt(item)
        raise InvalidRequest(f"input must be {INPUT_TYPES}", param="input")


class EmbeddingsRequest(InputFields):
    """The body of /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ClassifyRequest(InputFields):
    """The body of /classify."""


class PoolingRequest(InputFields):
    """The body of /pooling."""

    encoding_format: Literal["float", "base64"] | None = None


class ScoreRequest(VectorFields):
    """The body of /v1/score: one text and many, or as many of each."""

    text_1: Text | Texts
    text_2: Text | Texts
    instruction: str | None = None  # of models that are told what makes a pair fit

    def pairs(self) -> list[tuple[str, str]]:
        """Raises `InvalidRequest`."""
        first, second = (each if isinstance(each, list) else [each] for each in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            text = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1, or as many of each"
            raise InvalidRequest(text, param="text_1")
        return list(zip(first, second, strict=True))


class Document(ConversationPart):
    """A document as Cohere's clients may give it."""

    text: Text


class RerankRequest(VectorFields):
    """The body of /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None  # true
    instruction: str | None = None  # of models that are told what makes a document fit
    max_chunks_per_doc: int | None = None  # without effect, as in vLLM: a document is one
    max_tokens_per_doc: int | None = None  # likewise

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _is_batch(value: object) -> bool:
    """Whether it is several inputs: a list of anything but token ids."""
    return isinstance(value, list) and not (value and type(value[0]) is int)
