"""How an answer of /v1/responses looks: a response with its items, whole or as its events. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict

from diptych.generation.finish import Finish
from diptych.router.http.exchange.layout import NAMED, Event, Json, Layout
from diptych.router.http.exchange.timings import timings
from diptych.router.http.fields.blocks import Block, Blocks, Change, Closed, Grown, Kind, Opened
from diptych.router.http.fields.logprobs import chat_entries, text_of
from diptych.router.http.openai.responses_input import Status
from diptych.router.http.openai.responses_request import Echoed
from diptych.router.values.output import End, Output, Piece, Scores, Usage
from diptych.router.values.request import new_answer_id
from diptych.tokens.token_bytes import TokenBytes

ItemType = Literal["message", "reasoning", "function_call"]
ResponseStatus = Literal["completed", "incomplete", "in_progress", "failed"]

_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "call": "fc"}
_TYPES: Final[Mapping[Kind, ItemType]] = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
_WORDS: Final = {"text": "output_text", "reasoning": "reasoning_text"}  # of a block's content, in events


class OutputItem(TypedDict):
    """A message, reasoning, or the call of a function; which, says its type."""

    id: str
    status: Status
    type: ItemType
    role: NotRequired[Literal["assistant"]]  # of a message
    content: NotRequired[list[dict[str, Any]]]  # of a message or reasoning
    summary: NotRequired[list[dict[str, Any]]]  # of reasoning: there is none
    call_id: NotRequired[str]  # of a call, as the next two
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputDetails(TypedDict):
    """What is known of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """What is known of the output tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Echoed):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    usage: ResponseUsage | None


class TextScores:
    """Log-probabilities of an answer's text as it grows.

    Rule: a token's stands beside the text that it begins. It waits while that text is held back, and is never told
    where there is none, as at the end of sequence.
    """

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self._token_bytes = token_bytes  # None: none are wanted
        self._num_chars = 0
        self._waiting: list[tuple[int, Json]] = []  # with the place where the token begins
        self.told: list[Json] = []

    def push(self, text: str, scores: Scores | None) -> list[Json]:
        """Take new text and the tokens that came with it; return what stands beside the text."""
        if self._token_bytes is None:
            return []
        if scores is not None:
            entries = chat_entries(scores, self._token_bytes, partial(text_of, token_bytes=self._token_bytes))
            self._waiting += zip(scores.offsets, entries, strict=True)
        self._num_chars += len(text)
        told = [entry for place, entry in self._waiting if place < self._num_chars]
        del self._waiting[: len(told)]
        self.told += told
        return told


class ResponseLayout(Layout):
    """One response."""

    framing = NAMED

    def __init__(self, model_id: str, echoed: Echoed, token_bytes: TokenBytes | None) -> None:
        self._id = new_answer_id("resp_")
        self._created_at = int(time.time())
        self._model_id = model_id
        self._echoed = echoed
        self._blocks = Blocks()
        self._scores = TextScores(token_bytes)  # of the only block: there are none where there may be others
        self._end: End | None = None
        self._num_events = 0

    def failure(self, body: Event) -> Json:
        words: Any = body["error"]
        failed = {"code": words["code"] or words["type"], "message": words["message"]}
        return self._event("response.failed", response=self._response("failed", None) | {"error": failed})

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Response:
        (output,) = outputs
        self._scores.push(output.text, output.scores)
        self._blocks.push(output.parts)
        return self._ended(output.end, usage)

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        logprobs = self._scores.push(piece.text, piece.scores)
        self._end = piece.end
        changes = self._blocks.push(piece.parts)
        if piece.end is not None:
            changes += self._blocks.close()
        events = self._opening() if is_first else []
        for change in changes:
            events += self._events(change, logprobs)
        return events

    def closing(self, usage: Usage) -> list[Json]:
        assert self._end is not None, "a stream ends with its last piece"
        response = self._ended(self._end, usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def _opening(self) -> list[Json]:
        response = self._response("in_progress", None)
        return [self._event(f"response.{news}", response=response) for news in ("created", "in_progress")]

    def _ended(self, end: End, usage: Usage) -> Response:
        is_cut = end.finish is Finish.LENGTH
        response = self._response("incomplete" if is_cut else "completed", usage)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if end.report is not None:
            response["diptych"] = timings(end.report)
        return response

    def _response(self, status: ResponseStatus, usage: Usage | None) -> Response:
        is_done = status != "in_progress"
        is_cut = status != "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "model": self._model_id,
            **self._echoed,
            "status": status,
            "output": [self._ended_item(block, is_cut=is_cut) for block in self._blocks.all] if is_done else [],
            "usage": None if usage is None else _usage(usage),
        }

    def _item(self, block: Block, status: Status) -> OutputItem:
        """Return the item as it is now: one in progress shows nothing yet."""
        item: OutputItem = {"id": self._item_id(block), "status": status, "type": _TYPES[block.kind]}
        is_begun, text = status != "in_progress", block.text
        parts = [_content_part(block, text, self._scores.told)] if is_begun else []
        match block.kind:
            case "call":
                item |= {"call_id": block.call_id, "name": block.name, "arguments": text if is_begun else ""}
            case "reasoning":
                item |= {"summary": [], "content": parts}
            case "text":
                item |= {"role": "assistant", "content": parts}
        return item

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id.removeprefix('resp_')}{block.index:04x}"

    def _ended_item(self, block: Block, *, is_cut: bool) -> OutputItem:
        """What cuts a response off cuts its last block."""
        return self._item(block, "incomplete" if is_cut and block is self._blocks.all[-1] else "completed")

    def _events(self, change: Change, logprobs: Sequence[Json]) -> list[Json]:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind == "call":
            return self._call_events(change, place)
        place["content_index"] = 0
        word = f"response.{_WORDS[block.kind]}"
        scores = {"logprobs": list(logprobs)} if block.kind == "text" else {}
        match change:
            case Opened():
                part = _content_part(block, "", [])
                return [self._added(block), self._event("response.content_part.added", **place, part=part)]
            case Grown(_, text):
                return [self._event(f"{word}.delta", **place, delta=text, **scores)]
            case Closed():
                part = _content_part(block, block.text, self._scores.told)
                scores = {"logprobs": self._scores.told} if scores else {}
                return [
                    self._event(f"{word}.done", **place, text=block.text, **scores),
                    self._event("response.content_part.done", **place, part=part),
                    self._done(block),
                ]

    def _call_events(self, change: Change, place: Json) -> list[Json]:
        word = "response.function_call_arguments"
        match change:
            case Opened(block):
                return [self._added(block)]
            case Grown(_, text):
                return [self._event(f"{word}.delta", **place, delta=text)]
            case Closed(block):
                done = self._event(f"{word}.done", **place, name=block.name, arguments=block.text)
                return [done, self._done(block)]

    def _added(self, block: Block) -> Json:
        item = self._item(block, "in_progress")
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _done(self, block: Block) -> Json:
        is_cut = self._end is not None and self._end.finish is Finish.LENGTH
        item = self._ended_item(block, is_cut=is_cut)
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _content_part(block: Block, text: str, logprobs: Sequence[Json]) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage(usage: Usage) -> ResponseUsage:
    details: OutputDetails = {"reasoning_tokens": 0}
    if predicted := usage.predicted:
        details["accepted_prediction_tokens"] = predicted.accepted
        details["rejected_prediction_tokens"] = predicted.rejected
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
