"""From what a client asks for to requests that workers can run: checked, tokenised, with limits and defaults."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from diptych.common.errors import DeadlineExceeded, InvalidRequest
from diptych.generation.grammar import Grammar, Preamble
from diptych.generation.sampling_params import MAX_SEED, SamplingParams
from diptych.generation.segments import content_len
from diptych.grammars.checks import GrammarChecks
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.text.tokenization import Tokenization
from diptych.router.values.request import ClientRequest, GenerationRequest, PoolingParams, ServedModel
from diptych.router.values.slo_tiers import NO_TIERS, Tiers
from diptych.router.values.validation import (
    check_len,
    check_model,
    check_pool,
    check_request,
    default_max_tokens,
    output_room,
)
from diptych.router.workers.fleet import Fleet

if TYPE_CHECKING:  # of models that are shown images
    from diptych.router.images.reader import ImageReader


COUNTED_CONTEXTS: Final = 4  # that a text may have the tokens of, for whoever wants to know how many they are


class Preparer:
    """Turns what clients ask for into requests that workers can run: checked, tokenised, with limits and defaults."""

    def __init__(
        self,
        model: ServedModel,
        workers: Fleet,
        tokenization: Tokenization,
        grammars: GrammarChecks,
        *,
        timeout_s: float,
        max_choices: int,
        tiers: Tiers = NO_TIERS,
        images: ImageReader | None = None,
        pixels: BodyBudget | None = None,
    ) -> None:
        """`images` of a model that takes some. `pixels`: what these may take, and rows."""
        self._model = model
        self._images = images
        self._pixels = pixels
        self._workers = workers
        self.tokenization = tokenization
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._max_choices = max_choices
        self._tiers = tiers

    def close(self) -> None:
        self.tokenization.close()
        self._grammars.close()
        if self._images is not None:
            self._images.close()

    def hold(self, client: ClientRequest) -> AbstractContextManager[HeldPixels | None]:
        """Hold what images or rows of a request take of the memory, which is nothing yet; None: it has none."""
        if self._pixels is None or not (client.images or client.row_nbytes):
            return nullcontext()
        return HeldPixels(self._pixels, client.caller.name)

    def timeout_s(self, client: ClientRequest) -> float:
        """How long the requests of a client may be without a token."""
        return min(client.life.deadline_s - client.life.arrival_s, self._timeout_s)

    def check(self, client: ClientRequest) -> None:
        """Raise what can be said without looking at the prompt."""
        workers = self._workers
        adapters = {*workers.adapters(), *workers.expected}
        check_request(client, self._model, workers.model_ids, adapters, self._max_choices)
        check_pool(client.routing.pool, workers.pools)
        if self._images is not None and (images := client.images):
            self._images.check(images)
        if self._pixels is not None and client.row_nbytes > self._pixels.share:
            words = f"the rows of {client.num_made} outputs of each prompt take {client.row_nbytes} bytes"
            raise InvalidRequest(
                f"{words}, more than {self._pixels.share}: ask for fewer outputs or fewer rows", param="n"
            )

    def with_tier(self, client: ClientRequest) -> ClientRequest:
        """Return the request with what its wish comes to. Raises `InvalidRequest`."""
        tier = self._tiers.of(client.wish, client.caller.slo_tiers)
        return client if tier == client.tier else replace(client, tier=tier)

    async def tokens(self, client: ClientRequest, held: HeldPixels | None) -> list[Sequence[int]]:
        """Return the tokens of each prompt of a request that was checked. Raises the caller's `DiptychError`."""
        limit = COUNTED_CONTEXTS * self._workers.context_len(self._model.context_len)
        async with self._in_time(client):
            prompts = await self.tokenization.tokenize(client, limit, held)
        return [prompt.shown_ids for prompt in prompts]

    async def prepare(self, client: ClientRequest, held: HeldPixels | None = None) -> list[GenerationRequest]:
        """Return `num_made` requests for each prompt of one that was checked, in that order.

        Raises the caller's `DiptychError`: also for an adapter that is not loaded yet, or not any more.
        """
        check_model(client.model, self._model, self._workers.model_ids, self._workers.adapters())
        limit = self._workers.context_len(self._model.context_len)
        if client.vectors is not None:
            return await self._prepare_vectors(client, client.vectors, limit)
        if held is not None:
            held.charge(client.row_nbytes)
        async with self._in_time(client):
            prompts = await self.tokenization.read(client, limit, held)
        grammar = await self._grammar(client, prompts[0].preamble)
        seed = random.getrandbits(63) if client.seed is None else client.seed
        lens = [max(1, len(prompt.ids) + content_len(prompt.contents)) for prompt in prompts]
        rooms = [output_room(client.prompts[0], prompt_len, limit) for prompt_len in lens]
        if adapter := self.adapter(client.model):
            client = replace(client, hints=replace(client.hints, adapter=adapter))
        if prediction := await self.tokenization.predicted(client, limit):
            client = replace(client, hints=replace(client.hints, prediction=prediction))
        return [
            GenerationRequest(
                client,
                prompt,
                _params(client, self._model.hidden_size, room, (seed + choice) & MAX_SEED, grammar),
                self._timeout_s,
                choice=choice,
            )
            for prompt, room in zip(prompts, rooms, strict=True)
            for choice in range(client.num_made)
        ]

    @asynccontextmanager
    async def _in_time(self, client: ClientRequest) -> AsyncIterator[None]:
        """Raise `DeadlineExceeded` when nobody waits any longer: images may wait for their host, and for threads."""
        left_s = min(client.life.deadline_s - time.monotonic(), self._timeout_s)
        try:
            async with asyncio.timeout(left_s if left_s < math.inf else None):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the request's time passed before its prompt was read") from None

    async def _prepare_vectors(
        self, client: ClientRequest, pooling: PoolingParams, limit: int
    ) -> list[GenerationRequest]:
        prompts = await self.tokenization.of_vectors(client, pooling, limit)
        for prompt in prompts:
            check_len(len(prompt.ids), limit)
        if adapter := self.adapter(client.model):
            client = replace(client, hints=replace(client.hints, adapter=adapter))
        params = replace(client.params, max_tokens=1, seed=0)
        return [GenerationRequest(client, prompt, params, self._timeout_s) for prompt in prompts]

    def adapter(self, name: str) -> str:
        """Return the adapter that a request names; "" for none. A name of the model's is no adapter's."""
        return name if name in self._workers.adapters() and name not in self._model.names else ""

    async def _grammar(self, client: ClientRequest, preamble: Preamble | None) -> Grammar | None:
        """Return what the outputs must match, once it is known to compile."""
        forced = client.tool_use.grammar()
        grammar = forced or client.params.grammar
        if grammar is None:
            return None
        grammar = replace(grammar, preamble=grammar.preamble or preamble)
        try:
            grammar.validate()
            await self._grammars.check(grammar, client.account.tenant)
            client.trace.mark("grammar")
        except InvalidRequest as error:
            if forced is None:
                raise
            raise InvalidRequest(f"a call of these tools can't be forced: {error}", param="tools") from None
        return grammar


def _params(client: ClientRequest, hidden_size: int, room: int, seed: int, grammar: Grammar | None) -> SamplingParams:
    wanted = client.params
    max_tokens = (
        default_max_tokens(client, hidden_size, room) if client.max_tokens is None else min(client.max_tokens, room)
    )
    chosen_by_logprobs = client.num_made > client.num_choices and wanted.logprobs is None
    return replace(
        wanted,
        max_tokens=max_tokens,
        min_tokens=min(wanted.min_tokens, max_tokens),
        seed=seed,
        logprobs=0 if chosen_by_logprobs else wanted.logprobs,
        grammar=grammar,
    )
