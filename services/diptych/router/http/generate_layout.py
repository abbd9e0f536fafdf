"""How an answer of /generate looks: text, tokens, and `meta_info` with all that is known about them. Pure.

An event of a stream has what is new since the one before; `index` says of which output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from diptych.common.errors import DiptychError
from diptych.engine.finish import Finish
from diptych.engine.loader.token_bytes import TokenBytes
from diptych.router.http.errors import error_body
from diptych.router.http.framing import DATA_ONLY
from diptych.router.http.logprobs import Entry, entries, text_of
from diptych.router.http.timings import timings
from diptych.router.request import End, Output, Piece, Scores, Usage

Json = dict[str, Any]


class GenerateLayout:
    """One output or several."""

    framing: Final = DATA_ONLY
    prompt_len = 0

    def __init__(self, request_id: str, token_bytes: TokenBytes, *, is_batch: bool) -> None:
        self._request_id = request_id
        self._token_bytes = token_bytes
        self._is_batch = is_batch

    def error_body(self, error: DiptychError) -> Json:
        return error_body(error)

    def failure(self, error: DiptychError) -> Json:
        return error_body(error)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Any:
        answers = [self._answer(index, output) for index, output in enumerate(outputs)]
        return answers if self._is_batch or len(answers) > 1 else answers[0]

    def chunks(self, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
        return [self._answer(index, piece)] if piece.text or piece.token_ids or piece.end else []

    def closing(self, usage: Usage) -> list[Json]:
        return []

    def _answer(self, index: int, part: Piece | Output) -> Json:
        meta = {"id": self._request_id, "finish_reason": None}
        if part.end is not None:
            meta |= self._end(part.end)
        if part.scores is not None:
            meta |= self._logprobs("output", part.scores)
        if part.prompt is not None:
            meta |= self._logprobs("input", part.prompt)
        return {"index": index, "text": part.text, "output_ids": list(part.token_ids), "meta_info": meta}

    def _end(self, end: End) -> Json:
        usage, report = end.usage, {} if end.report is None else {"diptych": timings(end.report)}
        return {
            "finish_reason": self._finish(end),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            **report,
        }

    def _finish(self, end: End) -> Json:
        if end.finish is Finish.LENGTH:
            return {"type": "length", "length": end.usage.completion_tokens}
        return {"type": end.finish.value, "matched": end.stop or None}

    def _logprobs(self, whose: str, scores: Scores) -> Json:
        """SGLang's triples, (log-probability, token, text). The first token of a prompt has none."""
        num_unscored = len(scores.token_ids) - len(scores.logprobs)
        unscored = [(None, token_id, self._text(token_id)) for token_id in scores.token_ids[:num_unscored]]
        scored = list(entries(scores))
        return {
            f"{whose}_token_logprobs": [*unscored, *map(self._triple, scored)],
            f"{whose}_top_logprobs": [*([None] * num_unscored), *map(self._top, scored)],
        }

    def _triple(self, entry: Entry) -> tuple[float, int, str]:
        token_id, value, _ = entry
        return value, token_id, self._text(token_id)

    def _top(self, entry: Entry) -> list[tuple[float, int, str]]:
        return [(value, token_id, self._text(token_id)) for token_id, value in entry[2]]

    def _text(self, token_id: int) -> str:
        return text_of(token_id, self._token_bytes)
