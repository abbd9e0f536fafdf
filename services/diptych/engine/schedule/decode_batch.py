"""The requests that decode: who takes part in a step, what drafts fit behind them, and who gives way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.limits import MAX_ROW_DRAFTS
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts


class DecodeBatch:
    """Requests that get tokens in each step: their KV is computed, or about to be, but for their last token."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.by_room: dict[int, Request] = {}  # by room, oldest first

    def __len__(self) -> int:
        return len(self.by_room)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.by_room.values())

    def __contains__(self, request: Request) -> bool:
        return self.by_room.get(request.room) is request

    def add(self, request: Request) -> None:
        self.by_room[request.room] = request

    def remove(self, request: Request) -> None:
        """Take out a request. Its pages stay with the caller."""
        del self.by_room[request.room]

    def due(self) -> list[Request]:
        """Return those whose next token a step can compute: all but those that end with a token on its way."""
        return [request for request in self.by_room.values() if request.computed_len + 1 < request.max_len]

    def make_room(self, requests: list[Request]) -> bool:
        """Give every request a slot for its newest token; False, and nothing changed, when there are too few pages."""
        page_size = self._cache.page_size
        return self._cache.grow_each([r for r in requests if r.computed_len >= r.num_pages * page_size])

    def admit_drafts(self, guesses: Iterable[tuple[Request, tuple[int, ...]]], most: int) -> Drafts:
        """Return what of guesses may stand behind the requests' newest tokens, and give it slots; `most` tokens in all.

        A guess begins behind the newest token that is known: while that token's successor is on its way, the guess of
        it is only what the others stand behind. What the grammar forbids can't come true. Nobody gets more than one
        page for a guess, and none unless everybody could get one more: until a page of a wrong guess is of use to its
        request, each of the others needs one at most. So none of them is retracted for it, unless prompts that are
        admitted meanwhile take what was left.
        """
        page_size = self._cache.page_size
        admitted: dict[int, tuple[int, ...]] = {}
        short: list[Request] = []
        for request, guess in guesses:
            begin, end = request.computed_len + 1, request.num_pages * page_size
            allowed = guess if request.matcher is None else guess[: request.matcher.count_allowed(guess)]
            fitting = min(most, MAX_ROW_DRAFTS, request.max_len - 1 - begin, end + page_size - begin)
            if fitting > 0 and (drafts := allowed[begin - request.num_tokens :][:fitting]):
                admitted[request.room] = drafts
                most -= len(drafts)
                if begin + len(drafts) > end:
                    short.append(request)
        if short and not self._cache.grow_each(short, spare=len(self.by_room)):
            cut = {each.room: each.num_pages * page_size - each.computed_len - 1 for each in short}
            admitted = {room: drafts[: cut.get(room)] for room, drafts in admitted.items() if cut.get(room) != 0}
        return admitted

    def victim(self) -> Request:
        """Return whom to retract; at least one runs."""
        return min(self.by_room.values(), key=lambda request: (request.account.priority, request.num_output_tokens))
