"""How an answer of /v1/completions looks, and what it has in common with a chat's (`ChoiceLayout`)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from diptych.router.http.exchange.layout import DATA_ONLY, Json, Layout
from diptych.router.http.exchange.timings import timings
from diptych.router.http.fields.attention_fields import AttendedTokens, shown_attention
from diptych.router.http.fields.logprobs import Name, completion_logprobs, id_of, prompt_logprobs, text_of
from diptych.router.values.leg_results import Predicted
from diptych.router.values.output import End, Output, Piece, Usage
from diptych.router.values.request import ServedModel, new_answer_id


class PromptTokens(TypedDict):
    """Parts of the prompt: that whose KV was in a cache, and images, where there are any."""

    cached_tokens: int
    image_tokens: NotRequired[int]


class PredictedTokens(TypedDict):
    """What came of tokens that were guessed before they were computed."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(TypedDict):
    """Token counts. Where nothing was guessed there are no details of the completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: NotRequired[PredictedTokens]


class ShownTokens(TypedDict, total=False):
    """What is asked for of the tokens of an output: ids, and what they looked at, by token and layer."""

    token_ids: list[int]
    attention_tokens: list[list[AttendedTokens]]


class ShownPrompt(TypedDict, total=False):
    """What is asked for of a prompt."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, Any] | None]


class CompletionChoice(ShownTokens, ShownPrompt):
    """One of the outputs."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None


class Completion(TypedDict):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    diptych: NotRequired[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Style:
    """What the client wants to see."""

    include_usage: bool = False  # at the end of a stream
    continuous_usage: bool = False  # in each of its chunks: of the choice so far
    return_token_ids: bool = False
    names_tokens_by_id: bool = False  # in log-probabilities
    logprobs: bool = False  # of the output
    echo_logprobs: bool = False  # of the prompt, in front of them
    prompt_logprobs: bool = False  # of the prompt, by themselves


class ChoiceLayout(Layout):
    """Choices by index, each chunk of which carries the same head."""

    framing = DATA_ONLY

    def __init__(self, prefix: str, kind: str, model: ServedModel, style: Style) -> None:
        created, model_id = int(time.time()), model.model_id
        self._head: Json = {"id": new_answer_id(f"{prefix}-"), "object": kind, "created": created, "model": model_id}
        self._token_bytes = model.tokenizer.token_bytes
        as_text = partial(text_of, token_bytes=self._token_bytes)
        self._name: Name = id_of if style.names_tokens_by_id else as_text
        self._eos_ids = model.tokenizer.eos_ids
        self._num_tokens: dict[int, int] = {}  # of a stream, by choice, so far
        self.style = style

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        choices = self._opening(index) if is_first else []
        chunks = [self._chunk(choice) for choice in choices]
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(piece.token_ids)
        chunks += map(self._chunk, self._deltas(index, piece))
        if piece.end is not None:
            chunks.append(self._last_chunk(self._end(index, piece.end), piece.end))
        return chunks

    def closing(self, usage: Usage) -> list[Json]:
        return [{**self._head, "choices": [], "usage": completion_usage(usage)}] if self.style.include_usage else []

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self.style.continuous_usage:
            chunk["usage"] = self._usage_so_far(choice["index"])
        elif self.style.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage_so_far(self, index: int) -> Json:
        """What was read from the cache is known at the end."""
        prompt_len, num_tokens = len(self.prompts[index]), self._num_tokens.get(index, 0)
        counts = {"prompt_tokens": prompt_len, "completion_tokens": num_tokens}
        return {**counts, "total_tokens": prompt_len + num_tokens}

    def _last_chunk(self, choice: Json, end: End) -> Json:
        """Return the last chunk of a choice."""
        chunk = self._chunk(choice)
        if self.style.continuous_usage:
            chunk["usage"] = completion_usage(end.usage)
        return chunk if end.report is None else {**chunk, "diptych": timings(end.report)}

    def _show_tokens(self, choice: ShownTokens | Json, part: Piece | Output) -> None:
        if self.style.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        if part.insight is not None and part.insight.attention is not None:
            choice["attention_tokens"] = shown_attention(part.insight.attention)

    def _show_prompt_tokens(self, part: ShownPrompt | Json, index: int) -> None:
        if self.style.return_token_ids:
            part["prompt_token_ids"] = list(self.prompts[index])

    def _show_prompt_logprobs(self, part: ShownPrompt, output: Output) -> None:
        if self.style.prompt_logprobs and output.prompt is not None:
            part["prompt_logprobs"] = prompt_logprobs(output.prompt, self._token_bytes)

    def _stop_reason(self, end: End) -> str | int | None:
        """The stop string or token at which it ended, as vLLM has it: the end of sequence is none."""
        return end.stop or (None if end.stop_token in self._eos_ids else end.stop_token)

    def _shows_tokens(self, piece: Piece) -> bool:
        """Whether a piece without text has something to show."""
        shows = self.style.return_token_ids or self.style.logprobs or piece.insight is not None
        return bool(piece.token_ids) and shows

    def _opening(self, index: int) -> list[Json]:
        """The choices that come before the first piece."""
        return []

    @abstractmethod
    def _deltas(self, index: int, piece: Piece) -> list[Json]:
        """The choices of its chunks."""

    @abstractmethod
    def _end(self, index: int, end: End) -> Json: ...


class CompletionLayout(ChoiceLayout):
    """`text_completion`, streamed or not."""

    def __init__(self, model: ServedModel, style: Style) -> None:
        super().__init__("cmpl", "text_completion", model, style)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Completion:
        answer: Completion = {
            "id": self._head["id"],
            "object": "text_completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": [self._whole_choice(index, output) for index, output in enumerate(outputs)],
            "usage": completion_usage(usage),
        }
        if reports := reports_of(outputs):
            answer["diptych"] = reports
        return answer

    def _whole_choice(self, index: int, output: Output) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(output),
            "finish_reason": output.end.finish.value,
            "stop_reason": self._stop_reason(output.end),
        }
        self._show_tokens(choice, output)
        self._show_prompt_tokens(choice, index)
        self._show_prompt_logprobs(choice, output)
        return choice

    def _deltas(self, index: int, piece: Piece) -> list[Json]:
        if not piece.text and not self._shows_tokens(piece):
            return []
        choice = _choice(index, piece.text, self._logprobs(piece))
        self._show_tokens(choice, piece)
        if self._num_tokens[index] == len(piece.token_ids):  # it is the first
            self._show_prompt_tokens(choice, index)
        return [choice]

    def _end(self, index: int, end: End) -> Json:
        return {**_choice(index, ""), "finish_reason": end.finish.value, "stop_reason": self._stop_reason(end)}

    def _logprobs(self, part: Piece | Output) -> Json | None:
        if not self.style.logprobs or part.scores is None:
            return None
        parts = [part.prompt, part.scores] if self.style.echo_logprobs and part.prompt else [part.scores]
        return completion_logprobs(parts, self._name)


def reports_of(outputs: Sequence[Output]) -> Json | None:
    """Return the timings of an answer, by choice if it has several; None where nobody asked for them."""
    reports = [timings(output.end.report) for output in outputs if output.end.report]
    if not reports:
        return None
    return reports[0] if len(outputs) == 1 else {"choices": reports}


def completion_usage(usage: Usage) -> CompletionUsage:
    counts: CompletionUsage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.image_tokens:
        counts["prompt_tokens_details"]["image_tokens"] = usage.image_tokens
    if usage.predicted:
        counts["completion_tokens_details"] = predicted_tokens(usage.predicted)
    return counts


def predicted_tokens(predicted: Predicted) -> PredictedTokens:
    return {
        "accepted_prediction_tokens": predicted.accepted,
        "rejected_prediction_tokens": predicted.rejected,
    }


def _choice(index: int, text: str, logprobs: Json | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
