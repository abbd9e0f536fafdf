"""Steps that are launched and not committed, and the requests that ended meanwhile.

Rule: a request's pages are given back only when no launched step touches them any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.request import Request
from diptych.engine.values.step import Step
from diptych.kvtransfer.ownership import Pages


class StepsInFlight:
    """At most one without overlap, two with it: the step that runs and the one launched behind it."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._steps: deque[Step] = deque()
        self._leaving: list[tuple[Request, Callable[[Request], None]]] = []
        self._duplicates: list[tuple[Step, Pages]] = []  # with the last step that reads them

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def newest(self) -> Step:
        return self._steps[-1]

    @property
    def leaving(self) -> list[Request]:
        """Requests that have ended but still hold their pages."""
        return [request for request, _ in self._leaving]

    @property
    def keep_any(self) -> bool:
        """Whether pages are kept for steps alone."""
        return bool(self._leaving or self._duplicates)

    def samples(self) -> Mapping[int, int]:
        """Return by room where in the samples of the newest step the token is that is not known yet."""
        if not self._steps:
            return {}
        assert not self._steps[-1].drafts, "how many of several samples count is not known yet"
        return {request.room: i for i, request in enumerate(self._steps[-1].sampled)}

    def launch(self, step: Step) -> None:
        step.launch()
        self._steps.append(step)

    def commit(self) -> Step:
        """Take out the oldest step, which has run, and give back what only it kept."""
        step = self._steps.popleft()
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for request, release in leaving:
                self._release(request, release)
        if self._duplicates:
            for pages in [pages for reader, pages in self._duplicates if reader is step]:
                self._cache.release_duplicates(pages)
            self._duplicates = [(reader, pages) for reader, pages in self._duplicates if reader is not step]
        return step

    def share(self, request: Request, num_tokens: int) -> None:
        """Let others reuse the request's first `num_tokens` tokens, which steps that are over have computed."""
        duplicates = self._cache.share(request, num_tokens)
        if not len(duplicates):
            return
        if self._steps:
            self._duplicates.append((self._steps[-1], duplicates))
        else:
            self._cache.release_duplicates(duplicates)

    def read_state(self, request: Request) -> None:
        """The step launched last reads the state that a peer wrote for the request: its pages go when that is over."""
        self._duplicates.append((self._steps[-1], self._cache.read_state(request)))

    def retire(self, request: Request) -> None:
        """Give the pages back as soon as possible, keeping what is computed as a cached prefix.

        What a launched step computes behind the request's last token does not count.
        """
        request.computed_len = min(request.computed_len, request.num_tokens - 1)
        self._release(request, self._cache.retire)

    def drop(self, request: Request) -> None:
        """Give the pages back as soon as possible."""
        self._release(request, self._cache.drop)

    def involve(self, request: Request) -> bool:
        """Whether a step that is launched computes something of it."""
        return any(step.involves(request) for step in self._steps)

    def _release(self, request: Request, release: Callable[[Request], None]) -> None:
        if self._steps and self.involve(request):
            self._leaving.append((request, release))
        else:
            release(request)
