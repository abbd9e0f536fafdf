"""Guesses from the request's own text, and from earlier answers to requests of the same tenant, salt and adapter.

Of both, the guess that more is expected of counts. No answer helps anybody else: what is shared is kept by tenant and
by the key of its cached KV, which salt and adapter are part of. All that is kept has a limit in bytes; earlier answers
give way to running requests, those of whom was heard the longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

from diptych.common.arrays import I64
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.drafting.suffix_index import NO_TOKEN, SuffixIndex, SuffixReader, nbytes_for
from diptych.engine.values.request import Request

MAX_BYTES: Final = 256 * 2**20
MAX_OWN_TOKENS: Final = 2**17  # the newest ones of a request
MAX_SHARED_TOKENS: Final = 2**16  # the newest ones of a namespace's answers
MAX_ANSWER_TOKENS: Final = 2**12  # the newest ones of an answer
MIN_ANSWER_TOKENS: Final = 8
CATCH_UP_TOKENS: Final = 1024  # that one guess may take in: some 10 us
SPARE_TOKENS: Final = 256  # of output, that a request has room for from the start

Namespace: TypeAlias = tuple[str, bytes]  # tenant, and the key of its cached KV


@dataclass(slots=True)
class _Life:
    """What is kept of a request while it runs. A place in its index is one in its text."""

    text: I64
    index: SuffixIndex
    reader: SuffixReader
    shared_reader: SuffixReader
    newest: int  # the last token that was seen, and how many there were
    seen: int
    larger: SuffixIndex | None = None  # takes the index's place when it has caught up

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + (self.larger.nbytes if self.larger is not None else 0)

    def goes_on_in(self, request: Request) -> bool:
        """Whether the request has what was seen, and perhaps more."""
        is_same = self.text is request.tokens and self.seen <= request.num_tokens
        return is_same and self.newest == int(self.text[self.seen - 1])

    def see(self, num_tokens: int) -> None:
        self.newest, self.seen = int(self.text[num_tokens - 1]), num_tokens
        self._catch_up(self.index)
        if self.larger is not None:
            self._catch_up(self.larger)
            if self.larger.size >= self.index.size:
                self.index, self.larger = self.larger, None

    def _catch_up(self, index: SuffixIndex) -> None:
        index.append(self.text[index.size : min(self.seen, index.size + CATCH_UP_TOKENS)])


class SuffixSource:
    """Implements `DraftSource`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lives: dict[int, _Life] = {}  # by room
        self._answers: OrderedDict[Namespace, SuffixIndex] = OrderedDict()  # the one used last at the end
        self._shared_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._shared_bytes + sum(life.nbytes for life in self._lives.values())

    def guess(self, request: Request, at_most: int) -> Guess:
        life = self._life(request)
        if life is None:
            return NO_GUESS
        life.see(request.num_tokens)
        own = life.reader.guess(life.index, request.num_tokens, at_most)
        namespace = _namespace(request)
        answers = self._answers.get(namespace)
        if answers is None:
            return own
        self._answers.move_to_end(namespace)
        shared = life.shared_reader.guess(answers, request.num_tokens, at_most)
        return max(own, shared, key=_expected)

    def end(self, request: Request) -> None:
        self._lives.pop(request.room, None)
        begin = request.prompt_len - request.num_prior_output_tokens
        answer = request.tokens[max(begin, request.num_tokens - MAX_ANSWER_TOKENS) : request.num_tokens]
        if len(answer) >= MIN_ANSWER_TOKENS:
            self._learn(_namespace(request), answer)

    # running requests

    def _life(self, request: Request) -> _Life | None:
        """Return what is kept of a request; None while there is no room for it."""
        life = self._lives.get(request.room)
        if life is not None and not life.goes_on_in(request):
            del self._lives[request.room]
            life = None
        if life is None:
            return self._begin(request)
        if life.larger is None and life.index.is_full and life.index.capacity < MAX_OWN_TOKENS:
            self._enlarge(life)
        return life

    def _begin(self, request: Request) -> _Life | None:
        num_tokens = min(request.num_tokens + SPARE_TOKENS, MAX_OWN_TOKENS)
        if not self._make_room(nbytes_for(num_tokens)):
            return None
        text, last = request.tokens, int(request.tokens[request.num_tokens - 1])
        readers = SuffixReader(text, is_own=True), SuffixReader(text, is_own=False)
        life = self._lives[request.room] = _Life(text, SuffixIndex(num_tokens), *readers, last, request.num_tokens)
        return life

    def _enlarge(self, life: _Life) -> None:
        """Have a larger index take over; where there is no room for one, the oldest tokens give way."""
        num_tokens = 2 * life.index.capacity
        if self._make_room(nbytes_for(num_tokens)):
            life.larger = SuffixIndex(num_tokens)

    # earlier answers

    def _learn(self, namespace: Namespace, answer: I64) -> None:
        known = self._answers.pop(namespace, None)
        num_known = 0 if known is None else min(known.size, known.capacity)
        num_tokens = min(num_known + 1 + len(answer), MAX_SHARED_TOKENS)
        if known is None or known.capacity < num_tokens:
            self._shared_bytes -= 0 if known is None else known.nbytes
            if not self._make_room(nbytes_for(num_tokens)):
                return
            index = SuffixIndex(num_tokens)
            if known is not None:
                index.append(known.held)
            self._shared_bytes += index.nbytes
        else:
            index = known
        index.append(NO_TOKEN)
        index.append(answer)
        self._answers[namespace] = index

    def _make_room(self, num_bytes: int) -> bool:
        too_many = self.nbytes + num_bytes - self._max_bytes
        while self._answers and too_many > 0:
            _, index = self._answers.popitem(last=False)
            self._shared_bytes -= index.nbytes
            too_many -= index.nbytes
        return too_many <= 0


def _namespace(request: Request) -> Namespace:
    return request.account.tenant, request.extra_key


def _expected(guess: Guess) -> float:
    """How many tokens of it should come true."""
    return sum(guess.chances)
