"""How answers look on the wire, one class an API. Pure: text and counts in, JSON-ready values out."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.engine.finish import Finish
from diptych.router.http.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from diptych.router.http.timings import timings
from diptych.router.prepare import ServedModel
from diptych.router.request import Output, Piece, Report, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """What the client wants to see."""

    include_usage: bool = False  # in a stream
    return_token_ids: bool = False
    logprobs: bool = False  # of the output
    echo_logprobs: bool = False  # of the prompt, in front of them
    prompt_logprobs: bool = False  # of the prompt, by themselves


class Layout(ABC):
    """The parts of one answer, whole or as a stream of chunks."""

    def __init__(self, prefix: str, kind: str, model: ServedModel, style: Style) -> None:
        created, model_id = int(time.time()), model.model_id
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": created, "model": model_id}
        self._token_bytes = model.tokenizer.token_bytes
        self.style = style

    def whole(self, outputs: Sequence[Output], usage: Json) -> Json:
        """The answer in one piece."""
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        body = {**self._head, "choices": choices, "usage": usage}
        reports = [timings(output.end.report) for output in outputs if output.end.report]
        if reports:
            body["diptych"] = reports[0] if len(outputs) == 1 else {"choices": reports}
        return body

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        """The chunks for a piece of choice `index`."""
        chunks = self._opening(index) if is_first else []
        if piece.text or (piece.token_ids and (self.style.return_token_ids or self.style.logprobs)):
            chunks.append(self._chunk(self._with_tokens(self._delta(index, piece), piece.token_ids)))
        if piece.end is not None:
            chunks.append(self._with_report(self._chunk(self._end(index, piece.end.finish)), piece.end.report))
        return chunks

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, for a client that wants to know."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self.style.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_tokens(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return {**choice, "token_ids": list(token_ids)} if self.style.return_token_ids else choice

    def _with_prompt(self, part: Json, output: Output) -> Json:
        if not self.style.prompt_logprobs or output.prompt is None:
            return part
        return {**part, "prompt_logprobs": prompt_logprobs(output.prompt, self._token_bytes)}

    def _with_report(self, chunk: Json, report: Report | None) -> Json:
        return chunk if report is None else {**chunk, "diptych": timings(report)}

    @abstractmethod
    def _whole_choice(self, index: int, output: Output) -> Json: ...

    @abstractmethod
    def _opening(self, index: int) -> list[Json]: ...

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> Json: ...

    @abstractmethod
    def _end(self, index: int, finish: Finish) -> Json: ...


def usage_of(usages: Sequence[Usage], num_made: int) -> Json:
    """Return the sum; a prompt counts once, however many outputs (`num_made`) were made of it."""
    prompts = usages[::num_made]
    num_prompt = sum(usage.prompt_tokens for usage in prompts)
    num_output = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }


class ChatLayout(Layout):
    """`chat.completion`, or `chat.completion.chunk` when streamed."""

    def __init__(self, model: ServedModel, style: Style, *, stream: bool) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model, style)

    def whole(self, outputs: Sequence[Output], usage: Json) -> Json:
        return self._with_prompt(super().whole(outputs, usage), outputs[0])

    def _whole_choice(self, index: int, output: Output) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(output)}
        return self._with_tokens({**choice, "finish_reason": output.end.finish.value}, output.token_ids)

    def _opening(self, index: int) -> list[Json]:
        return [self._chunk(_chat_choice(index, {"role": "assistant", "content": "", "refusal": None}))]

    def _delta(self, index: int, piece: Piece) -> Json:
        return {**_chat_choice(index, {"content": piece.text}), "logprobs": self._logprobs(piece)}

    def _end(self, index: int, finish: Finish) -> Json:
        return {**_chat_choice(index, {}), "finish_reason": finish.value}

    def _logprobs(self, part: Piece | Output) -> Json | None:
        return chat_logprobs(part.scores, self._token_bytes) if self.style.logprobs and part.scores else None


class CompletionLayout(Layout):
    """`text_completion`, streamed or not."""

    def __init__(self, model: ServedModel, style: Style) -> None:
        super().__init__("cmpl", "text_completion", model, style)

    def _whole_choice(self, index: int, output: Output) -> Json:
        choice = _completion_choice(index, output.text, self._logprobs(output), output.end.finish)
        return self._with_prompt(self._with_tokens(choice, output.token_ids), output)

    def _opening(self, index: int) -> list[Json]:
        return []

    def _delta(self, index: int, piece: Piece) -> Json:
        return _completion_choice(index, piece.text, self._logprobs(piece), None)

    def _end(self, index: int, finish: Finish) -> Json:
        return _completion_choice(index, "", None, finish)

    def _logprobs(self, part: Piece | Output) -> Json | None:
        if not self.style.logprobs or part.scores is None:
            return None
        parts = [part.prompt, part.scores] if self.style.echo_logprobs and part.prompt else [part.scores]
        return completion_logprobs(parts, self._token_bytes)


def _chat_choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _completion_choice(index: int, text: str, logprobs: Json | None, finish: Finish | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.value if finish else None}
