"""POST /generate: text or tokens in, text and tokens out, in SGLang's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field

from diptych.common.errors import InvalidRequest
from diptych.generation.embed_rows import rows_of, to_bytes
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams
from diptych.router.http.fields.attention_fields import AttentionFields
from diptych.router.http.fields.grammar_fields import Schema, Tagged, json_grammar, tag_grammar, text_grammar
from diptych.router.http.fields.request_fields import (
    ChoiceFields,
    ProcessorName,
    RequestFields,
    Seed,
    Token,
    params_of,
    processor_of,
)
from diptych.router.http.fields.strict_model import StrictModel
from diptych.router.http.fields.text_parts import PredictionFields, predicted_text
from diptych.router.http.native.generate_layout import GenerateStyle
from diptych.router.values.images import ImageInput, image_or_file
from diptych.router.values.kept_sessions import Follow
from diptych.router.values.request import Prompt, RowsPrompt, TextPrompt, TokenPrompt
from diptych.router.values.validation import MAX_PARTS

MAX_PROMPTS = 128
DEFAULT_MAX_NEW_TOKENS: Final = 128  # as SGLang has it
Ids = Annotated[list[Token], Field(min_length=1)]
Named = Annotated[list[Token], Field(max_length=MAX_LOGPROB_TOKEN_IDS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Row = Annotated[list[Number], Field(min_length=1, fail_fast=True)]
Rows = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
ManyRows = Annotated[list[Rows], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Images = Annotated[list[str], Field(max_length=MAX_PARTS)]  # each a URL, or a file in base64
ManyImages = Annotated[list[str | Images | None], Field(max_length=MAX_PARTS)]


class Sampling(ChoiceFields):
    """How tokens are chosen and when the output ends. `None` is the same as absent."""

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: the prompt is only read
    n: int | None = None
    sampling_seed: Seed | None = None
    min_new_tokens: int | None = None
    custom_params: dict[str, Any] | None = None  # of `custom_logit_processor`
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Tagged | None = None

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def params(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        return params_of(
            self,
            min_tokens=self.min_new_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        grammars = (
            json_grammar(self.json_schema),
            text_grammar(GrammarKind.REGEX, self.regex),
            text_grammar(GrammarKind.EBNF, self.ebnf),
            tag_grammar(self.structural_tag),
        )
        given = [grammar for grammar in grammars if grammar is not None]
        if len(given) > 1:
            raise InvalidRequest(
                "give only one of json_schema, regex, ebnf and structural_tag", param="sampling_params"
            )
        return given[0] if given else None


def _images(given: str | list[str] | None) -> list[ImageInput]:
    texts = [given] if isinstance(given, str) else given or []
    return [image_or_file(text, "image_data") for text in texts]


_SAID_AS: Final[Mapping[str, str]] = {
    **{name: f"sampling_params.{name}" for name in Sampling.model_fields},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprob_token_ids": "token_ids_logprob",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
}


class SessionParams(StrictModel):
    """Which turn of a session it is, in SGLang's words. `None` is the same as absent."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    rid: Annotated[str, Field(max_length=128)] | None = None
    offset: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def follow(self) -> Follow:
        return Follow(self.id, self.rid or "", self.offset or 0, bool(self.replace), bool(self.drop_previous_output))


class GenerateRequest(RequestFields, AttentionFields):
    """The body: `text`, `input_ids` or `input_embeds`, one or several."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    image_data: str | ManyImages | None = None  # of one prompt; or of several, an entry for each
    input_ids: Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_embeds: Rows | ManyRows | None = None  # rows of numbers in place of the embeddings of tokens
    sampling_params: Sampling | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    token_ids_logprob: Named | None = None  # whose log-probabilities each output token tells, too
    return_hidden_states: bool | None = None  # true: what each output token was predicted from
    return_text_in_logprobs: bool | None = None  # false: they have no text
    custom_logit_processor: ProcessorName | None = None  # one that workers have by that name
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # from 0 on: of the prompt from there, too
    incremental_streaming_output: bool | None = None  # true: an event of a stream has what is new
    lora_path: str | None = None  # an adapter's name
    session_params: SessionParams | None = None  # the prompt is what follows a turn of a session
    prediction: PredictionFields | None = None  # of each output

    def check(self) -> None:
        super().check()
        self.sampling.refuse_unsupported("sampling_params.")
        if sum(given is not None for given in (self.text, self.input_ids, self.input_embeds)) != 1:
            raise InvalidRequest("give one of text, input_ids and input_embeds, and no other", param="text")
        if self.input_embeds is not None and self.image_data is not None:
            words = "input_embeds has no place for images: leave out image_data, or give text or input_ids"
            raise InvalidRequest(words, param="image_data")
        if self.session_params is not None and (self.is_batch or (self.sampling.n or 1) > 1):
            raise InvalidRequest("a turn of a session has one prompt and one output", param="session_params")
        if self.scores_prompt and self.stream:
            raise InvalidRequest("logprob_start_len is not available in a stream", param="logprob_start_len")
        if self.return_hidden_states and self.stream and not self.incremental_streaming_output:
            words = "return_hidden_states in a stream needs incremental_streaming_output: all would be sent many times"
            raise InvalidRequest(words, param="return_hidden_states")
        self._check_named()

    def _check_named(self) -> None:
        if self.token_ids_logprob and not self.return_logprob:
            raise InvalidRequest("token_ids_logprob needs return_logprob", param="token_ids_logprob")
        if self.token_ids_logprob and self.scores_prompt:
            words = "token_ids_logprob tells of output tokens: give no logprob_start_len beside it"
            raise InvalidRequest(words, param="token_ids_logprob")

    @property
    def model_name(self) -> str | None:
        return self.lora_path or self.model

    @property
    def said_as(self) -> Mapping[str, str]:
        return {**_SAID_AS, "prompt": "text" if self.input_ids is None else "input_ids"}

    @property
    def affinity(self) -> str:
        return self.session_params.id if self.session_params else ""

    @property
    def follow(self) -> Follow | None:
        return self.session_params.follow() if self.session_params else None

    @property
    def sampling(self) -> Sampling:
        return self.sampling_params or Sampling()

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        if self.input_embeds is not None:
            return isinstance(self.input_embeds[0][0], list)
        given: Any = self.input_ids if self.text is None else self.text
        return not isinstance(given, str) and not isinstance(given[0], int)

    @property
    def style(self) -> GenerateStyle:
        is_incremental = bool(self.incremental_streaming_output)
        has_text = self.return_text_in_logprobs is not False
        return GenerateStyle(self.is_batch, is_incremental, has_text, self.prompt_start)

    @property
    def prompt_start(self) -> int:
        return max(0, self.logprob_start_len or 0)

    @property
    def scores_prompt(self) -> bool:
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    @property
    def predicted_text(self) -> str:
        return predicted_text(self.prediction)

    def prompts(self) -> Sequence[Prompt]:
        """Raises `InvalidRequest`."""
        if self.input_embeds is not None:
            several: Any = self.input_embeds if self.is_batch else [self.input_embeds]
            return [RowsPrompt(to_bytes(rows), rows.shape[1]) for rows in map(rows_of, several)]
        if self.text is not None:
            texts = [self.text] if isinstance(self.text, str) else self.text
            return [TextPrompt(text, images=each) for text, each in zip(texts, self._images(len(texts)), strict=True)]
        ids: Any = self.input_ids if self.is_batch else [self.input_ids]
        return [TokenPrompt(each, images) for each, images in zip(ids, self._images(len(ids)), strict=True)]

    def _images(self, num_prompts: int) -> list[list[ImageInput]]:
        """Return those of each prompt."""
        given = self.image_data
        if given is None:
            return [[] for _ in range(num_prompts)]
        if not self.is_batch:
            return [[image for each in ([given] if isinstance(given, str) else given) for image in _images(each)]]
        if isinstance(given, str) or len(given) != num_prompts:
            words = (
                f"image_data of {num_prompts} prompts is a list of as many: a text, a list of texts or null for each"
            )
            raise InvalidRequest(words, param="image_data")
        return [_images(each) for each in given]

    def params(self) -> SamplingParams:
        num_top = (self.top_logprobs_num or 0) if self.return_logprob else None
        params = self.sampling.params(num_top, num_top if self.scores_prompt else None)
        params = replace(
            params,
            attention=self.attention(),
            hidden_states=bool(self.return_hidden_states),
            logprob_token_ids=tuple(self.token_ids_logprob or ()),
            processor=processor_of(self.custom_logit_processor, self.sampling.custom_params),
        )
        return replace(params, prompt_logprobs_start=self.prompt_start) if self.scores_prompt else params
