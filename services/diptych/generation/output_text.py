"""Turns a request's output tokens into the text that its client may see, and ends it at a stop string or expression.

Tokens that end the request (end of sequence, stop tokens) have no text. Text that may yet become what stops it, or the
rest of a character, waits; so pieces joined are exactly the text, whatever way the tokens arrived. The text of the
first `min_tokens` tokens is never searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.stop.conditions import StopRegex, StopResult, StopStrings
from diptych.generation.stop.pattern import compile_stop
from diptych.tokens.detokenizer import Detokenizer


class TextTokenizer(Protocol):
    """What the text of a model's output depends on."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def detokenizer(self) -> Detokenizer:
        """Return a new one, for one request."""
        ...


class TextDelta(NamedTuple):
    """What a client may see now. `finish` is set with the last delta of a request."""

    text: str
    token_ids: Sequence[int]  # that count: up to the one that completed what stops the request
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if wanted
    offsets: Sequence[int] = ()  # where each of them begins in the text, in characters; likewise
    stop: str = ""  # the stop string that ended it, if one did
    stop_token: int | None = None  # the token that ended it, if one did


class OutputText:
    """The text of one request: `push` its tokens until a delta has `finish`."""

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._silent = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else tokenizer.eos_ids)
        self._stops = _stops(params)
        self._min_tokens = params.min_tokens
        self._needs_single_tokens = bool(self._stops) or params.logprobs is not None
        self._num_tokens = 0
        self._num_chars = 0  # with those held back
        self._last: int | None = None  # the token that came last: the end may be told behind it

    def push(
        self, token_ids: Sequence[int], finish: Finish | None = None, logprobs: TokenLogprobs | None = None
    ) -> TextDelta:
        """Take new tokens, and how the request ended if it did; what stops the text may end it earlier."""
        delta = self._push(token_ids, finish, logprobs)
        self._last = delta.token_ids[-1] if delta.token_ids else self._last
        ended = delta.finish is Finish.STOP and not delta.stop and self._last in self._silent
        return delta._replace(stop_token=self._last) if ended else delta

    def _push(self, token_ids: Sequence[int], finish: Finish | None, logprobs: TokenLogprobs | None) -> TextDelta:
        if not self._needs_single_tokens:
            text = self._detokenizer.push(self._audible(token_ids))
            return TextDelta(text if finish is None else text + self._detokenizer.flush(), token_ids, finish)
        delta = self._push_single(token_ids, finish)
        return delta if logprobs is None else delta._replace(logprobs=logprobs.span(0, len(delta.token_ids)))

    def _push_single(self, token_ids: Sequence[int], finish: Finish | None) -> TextDelta:
        text, offsets = "", []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_tokens += 1
            found = self._cut(self._detokenizer.push(self._audible((token_id,))), is_last=False)
            text += found.text
            if found.stopped:
                return TextDelta(text, token_ids[: len(offsets)], Finish.STOP, offsets=offsets, stop=found.matched)
        if finish is None:
            return TextDelta(text, token_ids, offsets=offsets)
        found = self._cut(self._detokenizer.flush(), is_last=True)
        ended = Finish.STOP if found.stopped else finish
        return TextDelta(text + found.text, token_ids, ended, offsets=offsets, stop=found.matched)

    def _cut(self, text: str, *, is_last: bool) -> StopResult:
        """Pass text through all that may stop it; each holds back what the next must not see yet."""
        self._num_chars += len(text)
        stopped, matched = False, ""
        if self._num_tokens > self._min_tokens:
            for stop in self._stops:
                found = stop.push(text)
                text = found.text if found.stopped or not (stopped or is_last) else found.text + stop.flush()
                if found.stopped:
                    stopped, matched = True, found.matched
        return StopResult(text, stopped, matched)

    def _audible(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [token_id for token_id in token_ids if token_id not in self._silent]


def _stops(params: SamplingParams) -> list[StopStrings | StopRegex]:
    stops: list[StopStrings | StopRegex] = []
    if params.stop:
        stops.append(StopStrings(params.stop))
    if params.stop_regex:
        stops.append(StopRegex(compile_stop(params.stop_regex)))
    return stops
