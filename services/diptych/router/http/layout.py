"""How answers look on the wire, one class an API. Pure: text and counts in, JSON-ready values out.

`Layout` is what an answer needs of any API; `ChoiceLayout` is what OpenAI's chat and completions have in common.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from diptych.common.errors import DiptychError
from diptych.engine.finish import Finish
from diptych.router.http.errors import error_body
from diptych.router.http.framing import DATA_ONLY, Framing
from diptych.router.http.logprobs import completion_logprobs, prompt_logprobs
from diptych.router.http.timings import timings
from diptych.router.request import Output, Piece, Report, Usage
from diptych.router.request_id import new_answer_id
from diptych.router.served_model import ServedModel

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """What the client wants to see."""

    include_usage: bool = False  # in a stream
    return_token_ids: bool = False
    logprobs: bool = False  # of the output
    echo_logprobs: bool = False  # of the prompt, in front of them
    prompt_logprobs: bool = False  # of the prompt, by themselves


class Layout(Protocol):
    """The parts of one answer, whole or as a stream of chunks."""

    prompt_len: int  # of a stream's prompts together, in tokens; 0: nobody knows yet

    @property
    def framing(self) -> Framing: ...

    def error_body(self, error: DiptychError) -> Json:
        """The body of an answer that is an error."""
        ...

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Json:
        """The answer in one piece."""
        ...

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        """The chunks for a piece of output `index`."""
        ...

    def closing(self, usage: Usage) -> list[Json]:
        """The last chunks, after all outputs have ended."""
        ...

    def failure(self, error: DiptychError) -> Json:
        """The last chunk of a stream that fails."""
        ...


class ChoiceLayout(ABC):
    """Choices by index, each chunk of which carries the same head."""

    framing: Final = DATA_ONLY
    prompt_len = 0

    def __init__(self, prefix: str, kind: str, model: ServedModel, style: Style) -> None:
        created, model_id = int(time.time()), model.model_id
        self._head = {"id": new_answer_id(f"{prefix}-"), "object": kind, "created": created, "model": model_id}
        self._token_bytes = model.tokenizer.token_bytes
        self.style = style

    def error_body(self, error: DiptychError) -> Json:
        return error_body(error)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Json:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        body = {**self._head, "choices": choices, "usage": _usage(usage)}
        reports = [timings(output.end.report) for output in outputs if output.end.report]
        if reports:
            body["diptych"] = reports[0] if len(outputs) == 1 else {"choices": reports}
        return body

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        chunks = self._opening(index) if is_first else []
        chunks += map(self._chunk, self._deltas(index, piece))
        if piece.end is not None:
            chunks.append(self._with_report(self._chunk(self._end(index, piece.end.finish)), piece.end.report))
        return chunks

    def closing(self, usage: Usage) -> list[Json]:
        return [{**self._head, "choices": [], "usage": _usage(usage)}] if self.style.include_usage else []

    def failure(self, error: DiptychError) -> Json:
        return error_body(error)

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._head, "choices": [choice]}
        if self.style.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_tokens(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return {**choice, "token_ids": list(token_ids)} if self.style.return_token_ids else choice

    def _shows_tokens(self, piece: Piece) -> bool:
        """Whether a piece without text has something to show."""
        return bool(piece.token_ids) and (self.style.return_token_ids or self.style.logprobs)

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
    def _deltas(self, index: int, piece: Piece) -> list[Json]:
        """The choices of its chunks."""
        ...

    @abstractmethod
    def _end(self, index: int, finish: Finish) -> Json: ...


class CompletionLayout(ChoiceLayout):
    """`text_completion`, streamed or not."""

    def __init__(self, model: ServedModel, style: Style) -> None:
        super().__init__("cmpl", "text_completion", model, style)

    def _whole_choice(self, index: int, output: Output) -> Json:
        choice = _completion_choice(index, output.text, self._logprobs(output), output.end.finish)
        return self._with_prompt(self._with_tokens(choice, output.token_ids), output)

    def _opening(self, index: int) -> list[Json]:
        return []

    def _deltas(self, index: int, piece: Piece) -> list[Json]:
        if not piece.text and not self._shows_tokens(piece):
            return []
        choice = _completion_choice(index, piece.text, self._logprobs(piece), None)
        return [self._with_tokens(choice, piece.token_ids)]

    def _end(self, index: int, finish: Finish) -> Json:
        return _completion_choice(index, "", None, finish)

    def _logprobs(self, part: Piece | Output) -> Json | None:
        if not self.style.logprobs or part.scores is None:
            return None
        parts = [part.prompt, part.scores] if self.style.echo_logprobs and part.prompt else [part.scores]
        return completion_logprobs(parts, self._token_bytes)


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _completion_choice(index: int, text: str, logprobs: Json | None, finish: Finish | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.value if finish else None}
