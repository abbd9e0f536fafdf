"""A backend inside the program: the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from diptych.common.errors import DiptychError
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.generation.finish import Finish
from diptych.generation.output_text import TextDelta
from diptych.lang.backend import BackendError, Made, Message


class Runtime:
    """An `Engine` of this program. Close it, or use it as a context manager; one that was given stays open."""

    def __init__(
        self,
        model: str = "smollm2",
        options: EngineOptions | None = None,
        *,
        engine: Engine | None = None,
        **shape: Any,
    ) -> None:
        """Start an engine of `model`, of `prefill` and `decode` schedulers if they are told; or take `engine`."""
        self._engine = engine or Engine(model, options, **shape)
        self._is_own = engine is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine. Idempotent."""
        if self._is_own:
            self._engine.close()

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """See `Backend`."""
        return self._engine.tokenizer.encode(text, add_special_tokens=is_first)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """See `Backend`."""
        if any(message.images for message in messages):
            raise BackendError("an engine inside the program takes no images: ask a router, by RuntimeEndpoint")
        return self._engine.chat_prompt([message.for_chat() for message in messages])

    def generate(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Made:
        """See `Backend`."""
        with _told():
            made = self._engine.generate(prompt, params)
        ids, is_exact = self._said(made.token_ids, params, made.finish)
        meta = {"prompt_tokens": made.prompt_tokens, "cached_tokens": made.cached_tokens}
        return Made(made.text, ids, {**meta, **_ended(made.finish, made.token_ids)}, is_exact)

    def stream(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Iterator[Made]:
        """See `Backend`."""
        num_tokens = 0
        with _told(), closing(self._engine.stream(prompt, params)) as deltas:
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                yield self._piece(delta, params, num_tokens)

    def score(
        self, prompt: Sequence[int], choices: Sequence[Sequence[int]], images: Sequence[str] = ()
    ) -> list[tuple[float, ...]]:
        """See `Backend`."""
        start = max(0, len(prompt) - 1)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start)
        with _told():
            made = self._engine.generate_batch([[*prompt, *choice] for choice in choices], params)
        return [each.prompt_logprobs.logprobs if each.prompt_logprobs else () for each in made]

    def _piece(self, delta: TextDelta, params: SamplingParams, num_tokens: int) -> Made:
        ids, is_exact = self._said(tuple(delta.token_ids), params, delta.finish)
        if delta.finish is None:
            return Made(delta.text, ids)
        meta = {"finish_reason": {"type": delta.finish.value}, "completion_tokens": num_tokens}
        return Made(delta.text, ids, meta, is_exact)

    def _said(
        self, ids: tuple[int, ...], params: SamplingParams, finish: Finish | None
    ) -> tuple[tuple[int, ...], bool]:
        """Return the tokens without the one that ended them, and whether they say exactly the text."""
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._engine.tokenizer.eos_ids)}
        if finish is not Finish.STOP:
            return ids, True
        return (ids[:-1], True) if ids and ids[-1] in ends else (ids, not (params.stop or params.stop_regex))


def _ended(finish: Finish, ids: Sequence[int]) -> dict[str, Any]:
    return {"finish_reason": {"type": finish.value}, "completion_tokens": len(ids)}


class _told:
    """Says what goes wrong in the words of backends."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DiptychError):
            raise BackendError(str(error)) from error
