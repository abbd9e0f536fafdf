"""How answers look on the wire, one class an API. Pure: text and counts in, JSON-ready values out."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.engine.finish import Finish
from diptych.router.http.timings import timings
from diptych.router.request import End, Piece, Report, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """What the client wants to see."""

    num_choices: int = 1  # of each prompt
    include_usage: bool = False  # in a stream
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of an answer that is not streamed."""

    text: str
    token_ids: Sequence[int]
    end: End


class Layout(ABC):
    """The parts of one answer, whole or as a stream of chunks."""

    def __init__(self, prefix: str, kind: str, model: str, style: Style) -> None:
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self.style = style

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer in one piece."""
        parts = [
            self._with_tokens(self._whole_choice(index, choice.text, choice.end.finish), choice.token_ids)
            for index, choice in enumerate(choices)
        ]
        body = {**self._head, "choices": parts, "usage": self._usage([choice.end.usage for choice in choices])}
        reports = [timings(choice.end.report) for choice in choices if choice.end.report]
        if reports:
            body["diptych"] = reports[0] if len(choices) == 1 else {"choices": reports}
        return body

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        """The chunks for a piece of choice `index`."""
        chunks = self._opening(index) if is_first else []
        if piece.text or (piece.token_ids and self.style.return_token_ids):
            chunks.append(self._chunk(self._with_tokens(self._delta(index, piece.text), piece.token_ids)))
        if piece.end is not None:
            chunks.append(self._with_report(self._chunk(self._end(index, piece.end.finish)), piece.end.report))
        return chunks

    def usage_chunk(self, usages: Sequence[Usage]) -> Json:
        """The last chunk, for a client that wants to know."""
        return {**self._head, "choices": [], "usage": self._usage(usages)}

    def _usage(self, usages: Sequence[Usage]) -> Json:
        """The sum; a prompt counts once, however many choices it has."""
        prompts = usages[:: self.style.num_choices]
        num_prompt = sum(usage.prompt_tokens for usage in prompts)
        num_output = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self.style.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_tokens(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return {**choice, "token_ids": list(token_ids)} if self.style.return_token_ids else choice

    def _with_report(self, chunk: Json, report: Report | None) -> Json:
        return chunk if report is None else {**chunk, "diptych": timings(report)}

    @abstractmethod
    def _whole_choice(self, index: int, text: str, finish: Finish) -> Json: ...

    @abstractmethod
    def _opening(self, index: int) -> list[Json]: ...

    @abstractmethod
    def _delta(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _end(self, index: int, finish: Finish) -> Json: ...


class ChatLayout(Layout):
    """`chat.completion`, or `chat.completion.chunk` when streamed."""

    def __init__(self, model: str, style: Style, *, stream: bool) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model, style)

    def _whole_choice(self, index: int, text: str, finish: Finish) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish.value}

    def _opening(self, index: int) -> list[Json]:
        return [self._chunk(_chat_choice(index, {"role": "assistant", "content": "", "refusal": None}))]

    def _delta(self, index: int, text: str) -> Json:
        return _chat_choice(index, {"content": text})

    def _end(self, index: int, finish: Finish) -> Json:
        return {**_chat_choice(index, {}), "finish_reason": finish.value}


class CompletionLayout(Layout):
    """`text_completion`, streamed or not."""

    def __init__(self, model: str, style: Style) -> None:
        super().__init__("cmpl", "text_completion", model, style)

    def _whole_choice(self, index: int, text: str, finish: Finish) -> Json:
        return {**self._delta(index, text), "finish_reason": finish.value}

    def _opening(self, index: int) -> list[Json]:
        return []

    def _delta(self, index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _end(self, index: int, finish: Finish) -> Json:
        return self._whole_choice(index, "", finish)


def _chat_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
