"""Draft models beside a tiny model: its own weights, or others; and a drafter that asks them in every step it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from diptych.architectures.config import DraftLayers
from diptych.checkpoints.source import ChangedModel, ModelSource
from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.drafting.ahead import AheadSource, Wanted
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.running import Drafter
from diptych.engine.scheduler.stepping import fill_in
from diptych.engine.values.batch import DraftModel, ForwardBatch, OverlapRunner, SamplingBatch, StepResult
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts, Step

MOST: Final = 4


def with_draft(source: ModelSource, draft: ModelSource) -> ModelSource:
    """Return `source` with the layers of `draft` behind its own."""
    return ChangedModel(source, replace(source.config, draft=DraftLayers(draft.config, draft.config.num_kv_heads)))


def runner_with_draft(source: ModelSource, draft: ModelSource | None, kv: torch.Tensor) -> ModelRunner:
    """`source` is `with_draft`."""
    sizes: dict[str, Any] = {"max_requests": 64, "row_tokens": 1 + MOST}
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2, draft=draft, **sizes)


class AskAlways(Drafter):
    """Implements `Drafter`: has a draft model guess for all requests in two of three steps, from 1 to `MOST` tokens.

    Or in one of `seldom` steps, so that it does not follow those between.

    `came` and `compared` count guesses whose tokens are known, each up to the first that was wrong.
    """

    asks_model = True
    new_source = AheadSource
    _source: AheadSource

    def __init__(self, seldom: int = 0) -> None:
        self._seldom = seldom
        self._num_asked = self.num_unfollowed = 0
        self._guessed: list[tuple[Request, int, tuple[int, ...]]] = []
        self.came = self.compared = self.num_early = self.num_first = 0
        self.guesses: list[tuple[int, ...]] = []

    def begin(self, model: DraftModel | None, cache: KvCache) -> None:
        """Before anything else: ask this model, for requests of this cache."""
        assert model is not None
        self._source = self.new_source(model, cache.page_table, cache.page_size)

    def propose(self, requests: Sequence[Request]) -> Drafts:
        self._settle()
        self._num_asked += 1
        if self._num_asked % self._seldom if self._seldom else self._num_asked % 3 == 0:
            return {}
        wanted = [each for request in requests if (each := self._wanted(request)).num_tokens > 0]
        if not wanted:
            return {}
        guesses = self._source.fulfil(wanted, lambda: 0.0)
        self.guesses += guesses
        self.num_first += sum(request.num_tokens == request.prompt_len + 1 for request, _ in wanted)
        self.num_early += sum(not request.extend_len for request, _ in wanted)
        pairs = list(zip(wanted, guesses, strict=True))
        self._guessed = [(each.request, each.request.num_tokens, guess) for each, guess in pairs]
        return {each.request.room: guess for each, guess in pairs}

    def follows(self, step: Step) -> bool:
        follows = self._source.follows(step)
        self.num_unfollowed += not follows
        return follows

    def row_behind(self, request: Request) -> bytes:
        return self._source.row_behind(request)

    def go_on_behind(self, request: Request, row: bytes) -> None:
        self._source.go_on_behind(request, row)

    def _wanted(self, request: Request) -> Wanted:
        left = request.max_len - request.num_tokens - 1
        at_most = min(left, 1 + (request.room + self._num_asked) % MOST)
        return Wanted(request, len(self._source.guess(request, at_most).token_ids))

    def _settle(self) -> None:
        for request, before, guess in self._guessed:
            came = tuple(request.tokens[before : request.num_tokens].tolist())
            num_came = next((at for at, pair in enumerate(zip(guess, came, strict=False)) if pair[0] != pair[1]), None)
            self.compared += min(len(guess), len(came)) if num_came is None else num_came + 1
            self.came += min(len(guess), len(came)) if num_came is None else num_came
        self._guessed = []


class InOneThread:
    """Implements `ModelWorker` by a runner whose passes run when they are handed over, as a GPU's are queued then."""

    def __init__(self, runner: OverlapRunner) -> None:
        self._runner = runner
        self._newest: I64 = np.zeros(0, np.int64)
        self._passes: deque[tuple[ForwardBatch, Any]] = deque()
        self._results: deque[StepResult] = deque()

    def forward(self, batch: ForwardBatch) -> None:
        self._passes.append((batch, self._runner.logits(fill_in(batch, self._newest))))

    def sample(self, sampling: SamplingBatch) -> None:
        batch, logits = self._passes.popleft()
        self._results.append(self._runner.sample(batch, logits, sampling)())
        self._newest = self._results[-1].token_ids

    def result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing runs on."""
