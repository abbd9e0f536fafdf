"""Decides where a request's output ends: at a token, at a length, before a stop string or a match of an expression.

Of several stop strings the one complete first counts; of those complete at the same character, the longest. Expressions
are looked for as if after each character: the match complete first counts, and of those complete at the same character
the leftmost; `$` means the end of the text so far. So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.generation.finish import Finish
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.stop.pattern import MAX_HELD, StopPattern


def end_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end an output."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else eos_ids | own if own else eos_ids


def token_finish(
    token_id: int, num_output_tokens: int, params: SamplingParams, eos_ids: frozenset[int]
) -> Finish | None:
    """Tell whether the request ends with `token_id`, its `num_output_tokens`-th output token."""
    if token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos):
        return Finish.STOP
    return Finish.LENGTH if num_output_tokens >= params.max_tokens else None


class StopResult(NamedTuple):
    """What may be shown now. After `stopped` nothing follows."""

    text: str
    stopped: bool
    matched: str = ""  # the stop string at which it ended


@dataclass(eq=False, slots=True)
class _Node:
    """The text so far ends in `stop[:depth]`, and in no longer beginning of a stop string."""

    stop: str
    depth: int
    match_len: int = 0  # of the longest stop string that ends here; 0: none does
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None  # the next shorter beginning that the text also ends in; None: the root


class StopStrings:
    """Cuts streamed text before the first stop string: an Aho-Corasick automaton, linear in text and stop strings.

    Text that may yet become a stop string is held back, and nothing else is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _automaton(stops)
        self._node = self._root
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; return what is now known to come before any stop string."""
        if self._stopped:
            return StopResult("", stopped=True)
        node = self._node
        for index, char in enumerate(text):
            node = _advance(node, char)
            if node.match_len:
                self._stopped = True
                matched = node.stop[node.depth - node.match_len : node.depth]
                return StopResult(self._shown(text[: index + 1], node.match_len), stopped=True, matched=matched)
        shown = self._shown(text, node.depth)
        self._node = node
        return StopResult(shown, stopped=False)

    def flush(self) -> str:
        """Return what was held back: no more text comes to complete it."""
        held = "" if self._stopped else self._shown("", 0)
        self._node = self._root
        return held

    def _shown(self, text: str, num_kept: int) -> str:
        """Return the held text and `text`, without the last `num_kept` characters of both together."""
        held, held_len = self._node.stop, self._node.depth
        num_shown = held_len + len(text) - num_kept
        return held[: min(num_shown, held_len)] + text[: max(0, num_shown - held_len)]


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node("", 0)
    for stop in stops:
        node = root
        for depth, char in enumerate(stop, start=1):
            node = node.children.setdefault(char, _Node(stop, depth))
        node.match_len = len(stop)
    waiting = deque([root])  # breadth first: a fallback is shorter, hence already complete
    while waiting:
        node = waiting.popleft()
        for char, child in node.children.items():
            child.fallback = _advance(node.fallback, char) if node.fallback else root
            child.match_len = child.match_len or child.fallback.match_len
            waiting.append(child)
    return root


def _advance(node: _Node, char: str) -> _Node:
    while char not in node.children and node.fallback:
        node = node.fallback
    return node.children.get(char, node)


class StopRegex:
    """Cuts streamed text before the first match. Text that may yet become one is held back, up to `MAX_HELD`.

    A piece is searched once for a match and once for the beginning of one; a piece with a match a few times more, as it
    is the last.
    """

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._text = b""  # the character before, and what is held back
        self._start = 0  # of what is held back

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; return what is now known to come before any match."""
        if not text:
            return StopResult("", stopped=False)
        before, self._text = self._text, self._text + _encoded(text)
        if self._pattern.match_start(self._text, self._start) is not None:
            return self._stop(before, text)
        held = self._pattern.held_start(self._text, self._start)
        return StopResult(self._show(max(held, self._start_of_last(MAX_HELD))), stopped=False)

    def flush(self) -> str:
        """Return what was held back: no more text comes to complete it."""
        return self._show(len(self._text))

    def _stop(self, before: bytes, text: str) -> StopResult:
        """Find the first character at which a match is complete; once complete, one is found in all longer texts."""

        def match_start(length: int) -> int | None:
            return self._pattern.match_start(before + _encoded(text[:length]), self._start)

        length = 1 + bisect_left(range(1, len(text)), True, key=lambda length: match_start(length) is not None)
        shown = self._text[self._start : match_start(length)]
        self._text, self._start = b"", 0
        return StopResult(_decoded(shown), stopped=True)

    def _start_of_last(self, num_chars: int) -> int:
        """Return where the last `num_chars` characters begin."""
        if len(self._text) - self._start <= num_chars:
            return self._start
        return len(self._text) - len(_encoded(_decoded(self._text[self._start :])[-num_chars:]))

    def _show(self, end: int) -> str:
        """Return the text up to `end`, and forget what nobody can ask for any more."""
        shown = _decoded(self._text[self._start : end])
        kept = _encoded(shown[-1:]) or self._text[: self._start]
        self._text, self._start = kept + self._text[end:], len(kept)
        return shown


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode(errors="surrogatepass")
