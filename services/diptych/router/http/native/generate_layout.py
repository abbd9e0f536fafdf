"""How an answer of /generate looks: text, tokens, and `meta_info` with all that is known about them. Pure.

An event of a stream has all of an output so far, as SGLang's does, or what is new since the one before; `index` says of
which output. All of it is told again when it has grown by a part of itself: so the bytes of a stream grow with the
length of its outputs, not with the square of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NotRequired

from typing_extensions import TypeAliasType, TypedDict

from diptych.generation.finish import Finish
from diptych.generation.insight import Insight
from diptych.router.http.exchange.layout import DATA_ONLY, Json, Layout
from diptych.router.http.exchange.timings import timings
from diptych.router.http.fields.attention_fields import AttendedTokens, shown_attention
from diptych.router.http.fields.logprobs import asked_entries, entries, text_of
from diptych.router.values.output import End, Output, Piece, Scores, Usage
from diptych.tokens.token_bytes import TokenBytes

Triple = tuple[float | None, int, str | None]  # a token's log-probability, the token, and its text

TOLD_AGAIN: Final = 256  # times at most that a stream has as many bytes as a whole answer; the first tokens come singly


class Counts(TypedDict, total=False):
    """Token counts, of an output so far."""

    prompt_tokens: int
    completion_tokens: int


class MetaInfo(Counts):
    """What is known of an output."""

    id: str
    finish_reason: dict[str, Any] | None
    cached_tokens: NotRequired[int]
    weight_version: NotRequired[str]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]
    diptych: NotRequired[dict[str, Any]]
    output_token_logprobs: NotRequired[list[Triple]]
    output_top_logprobs: NotRequired[list[list[Triple] | None]]
    output_token_ids_logprobs: NotRequired[list[list[Triple]]]  # of each output token, those of `token_ids_logprob`
    input_token_logprobs: NotRequired[list[Triple]]
    input_top_logprobs: NotRequired[list[list[Triple] | None]]
    attention_tokens: NotRequired[list[list[AttendedTokens]]]  # of each output token, an entry for each layer
    hidden_states: NotRequired[list[list[float]]]  # of each output token, what it was predicted from


class GeneratedOutput(TypedDict):
    """One output."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


Generated = TypeAliasType("Generated", GeneratedOutput | list[GeneratedOutput])  # a list if several were asked for


@dataclass(frozen=True, slots=True)
class GenerateStyle:
    """What the client wants to see."""

    is_batch: bool = False  # the answer is a list
    is_incremental: bool = False  # an event of a stream has what is new
    logprobs_have_text: bool = True
    prompt_start: int = 0  # of the prompt's log-probabilities: the token there has none, as in SGLang


@dataclass(slots=True)
class _Grown:
    """An output of a stream so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    meta: Json = field(default_factory=dict)
    num_told: int = 0  # tokens

    def add(self, new: GeneratedOutput) -> None:
        self.texts.append(new["text"])
        self.token_ids += new["output_ids"]
        for key, value in new["meta_info"].items():
            if isinstance(value, list):
                self.meta.setdefault(key, []).extend(value)
            else:
                self.meta[key] = value

    @property
    def is_news(self) -> bool:
        return (len(self.token_ids) - self.num_told) * TOLD_AGAIN >= len(self.token_ids) > self.num_told

    def told(self, index: int) -> Json:
        self.num_told, self.texts = len(self.token_ids), ["".join(self.texts)]
        return {"index": index, "text": self.texts[0], "output_ids": self.token_ids, "meta_info": self.meta}


class GenerateLayout(Layout):
    """One output or several."""

    framing = DATA_ONLY

    def __init__(self, request_id: str, token_bytes: TokenBytes, style: GenerateStyle) -> None:
        self._request_id = request_id
        self._token_bytes = token_bytes
        self._style = style
        self._num_tokens: dict[int, int] = {}  # of a stream, by output, so far
        self._so_far: dict[int, _Grown] = {}  # likewise

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Generated:
        answers = [self._answer(index, output) for index, output in enumerate(outputs)]
        return answers if self._style.is_batch or len(answers) > 1 else answers[0]

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> Sequence[GeneratedOutput | Json]:
        if not (piece.text or piece.token_ids or piece.end):
            return []
        self._num_tokens[index] = num_tokens = self._num_tokens.get(index, 0) + len(piece.token_ids)
        new = self._answer(index, piece)
        if piece.end is None:
            new["meta_info"] |= {"prompt_tokens": len(self.prompts[index]), "completion_tokens": num_tokens}
        if self._style.is_incremental:
            return [new]
        grown = self._so_far.setdefault(index, _Grown())
        grown.add(new)
        return [grown.told(index)] if piece.end or grown.is_news else []

    def closing(self, usage: Usage) -> list[Json]:
        return []

    def _answer(self, index: int, part: Piece | Output) -> GeneratedOutput:
        meta: MetaInfo = {"id": self._request_id, "finish_reason": None}
        if part.end is not None:
            self._note_end(meta, part.end)
        if part.scores is not None:
            meta["output_token_logprobs"], meta["output_top_logprobs"] = self._logprobs(part.scores)
            if part.scores.logprobs.asked_ids:
                meta["output_token_ids_logprobs"] = self._asked(part.scores)
        if part.insight is not None:
            self._tell_insight(meta, part.insight)
        if part.prompt is not None:
            meta["input_token_logprobs"], meta["input_top_logprobs"] = self._of_prompt(part.prompt)
        return {"index": index, "text": part.text, "output_ids": list(part.token_ids), "meta_info": meta}

    def _tell_insight(self, meta: MetaInfo, told: Insight) -> None:
        if told.attention is not None:
            meta["attention_tokens"] = shown_attention(told.attention)
        if told.hidden_states is not None:
            meta["hidden_states"] = told.hidden_states.rows()

    def _note_end(self, meta: MetaInfo, end: End) -> None:
        meta["finish_reason"] = self._finish(end)
        meta["prompt_tokens"] = end.usage.prompt_tokens
        meta["completion_tokens"] = end.usage.completion_tokens
        meta["cached_tokens"] = end.usage.cached_tokens
        if end.weights_version:
            meta["weight_version"] = end.weights_version
        if predicted := end.usage.predicted:
            meta["accepted_prediction_tokens"] = predicted.accepted
            meta["rejected_prediction_tokens"] = predicted.rejected
        if end.report is not None:
            meta["diptych"] = timings(end.report)

    def _finish(self, end: End) -> Json:
        if end.finish is Finish.LENGTH:
            return {"type": "length", "length": end.usage.completion_tokens}
        return {"type": end.finish.value, "matched": end.stop or end.stop_token}

    def _of_prompt(self, scores: Scores) -> tuple[list[Triple], list[list[Triple] | None]]:
        """From where the client wants them; the first of those follows nothing that it sees."""
        token_ids, known = scores.token_ids[self._style.prompt_start :], len(scores.logprobs)
        num_scored = min(known, max(0, len(token_ids) - 1))  # an older worker tells those of the whole prompt
        return self._logprobs(Scores(token_ids, scores.logprobs.span(known - num_scored, known), ()))

    def _logprobs(self, scores: Scores) -> tuple[list[Triple], list[list[Triple] | None]]:
        """SGLang's triples, of tokens and of their alternatives. The first token of a prompt has none."""
        num_unscored = len(scores.token_ids) - len(scores.logprobs)
        triples = [self._triple(token_id, None) for token_id in scores.token_ids[:num_unscored]]
        tops: list[list[Triple] | None] = [None] * num_unscored
        for token_id, value, top in entries(scores):
            triples.append(self._triple(token_id, value))
            tops.append([self._triple(*other) for other in top])
        return triples, tops

    def _asked(self, scores: Scores) -> list[list[Triple]]:
        return [[self._triple(token_id, value) for token_id, value in each] for each in asked_entries(scores)]

    def _triple(self, token_id: int, value: float | None) -> Triple:
        return value, token_id, text_of(token_id, self._token_bytes) if self._style.logprobs_have_text else None
