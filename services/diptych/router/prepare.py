"""From what a client sent to requests that workers can run: checked, tokenised, with limits and defaults."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from diptych.common.errors import InvalidRequest
from diptych.engine.grammar import compiler
from diptych.engine.grammar.grammar import Grammar, Preamble
from diptych.engine.sampling_params import MAX_SEED, SamplingParams
from diptych.router.request import GenerationRequest, PromptText
from diptych.router.served_model import ServedModel
from diptych.router.tokenization import Tokenization, Tokenized
from diptych.router.validation import check_wish, output_room, param_of
from diptych.router.wish import Wish


class WorkersNow(Protocol):
    """What of the workers bears on a request before one is chosen."""

    def adapters(self) -> Sequence[str]: ...

    @property
    def model_ids(self) -> Sequence[str]: ...

    def context_len(self, default: int) -> int: ...


class Preparer:
    """Turns wishes into requests for one model."""

    def __init__(
        self, model: ServedModel, workers: WorkersNow, tokenization: Tokenization, *, timeout_s: float
    ) -> None:
        self._model = model
        self._workers = workers
        self._tokenization = tokenization
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._tokenization.close()

    def timeout_s(self, wish: Wish) -> float:
        """How long the requests of a wish may take."""
        return self._timeout_s if wish.timeout_s is None else min(wish.timeout_s, self._timeout_s)

    def check(self, wish: Wish) -> None:
        """Raise what can be said without looking at the prompt."""
        check_wish(wish, self._model, self._workers.model_ids, self._workers.adapters())

    async def tokens(self, wish: Wish) -> list[Sequence[int]]:
        """Return the tokens of each prompt of a wish that was checked. Raises the caller's `DiptychError`."""
        return [prompt.ids for prompt in await self._tokenization.tokenize(wish)]

    async def text(self, ids: Sequence[int]) -> str:
        """Return what tokens say, special ones included. Raises `InvalidRequest` for one that is none."""
        return await self._tokenization.text(ids)

    async def prepare(self, wish: Wish, arrival_s: float) -> list[GenerationRequest]:
        """Return `num_made` requests for each prompt of a wish that was checked, in that order.

        Raises the caller's `DiptychError`.
        """
        prompts = await self._tokenization.read(wish)
        grammar = await self._grammar(wish, prompts[0].preamble)
        seed = random.getrandbits(63) if wish.seed is None else wish.seed
        limit = self._workers.context_len(self._model.context_len)
        rooms = [output_room(wish.prompts[0], max(1, len(prompt.ids)), limit) for prompt in prompts]
        return [
            self._request(wish, prompt, _params(wish, room, (seed + choice) & MAX_SEED, grammar), arrival_s, limit)
            for prompt, room in zip(prompts, rooms, strict=True)
            for choice in range(wish.num_made)
        ]

    def _request(
        self, wish: Wish, prompt: Tokenized, params: SamplingParams, arrival_s: float, context_len: int
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=wish.request_id,
            prompt_ids=prompt.ids,
            params=params,
            arrival_s=arrival_s,
            deadline_s=arrival_s + self.timeout_s(wish),
            wants_report=wish.wants_report,
            priority=wish.priority,
            tenant=wish.tenant,
            cache_salt=wish.cache_salt.encode(),
            adapter=wish.model if wish.model in self._workers.adapters() else "",
            echo=prompt.echo,
            new_parser=prompt.new_parser,
            caller=wish.caller,
            routing=wish.routing,
            trace=wish.trace,
            text=prompt.text and PromptText(*prompt.text, context_len, param_of(wish.prompts[0])),
        )

    async def _grammar(self, wish: Wish, preamble: Preamble | None) -> Grammar | None:
        """Return what the outputs must match, once it is known to compile."""
        forced = wish.tool_use.grammar()
        grammar = forced or wish.params.grammar
        if grammar is None:
            return None
        grammar = replace(grammar, preamble=grammar.preamble or preamble)
        try:
            grammar.validate()
            await self._tokenization.run(functools.partial(compiler.check, grammar))
        except InvalidRequest as error:
            if forced is None:
                raise
            raise InvalidRequest(f"a call of these tools can't be forced: {error}", param="tools") from None
        return grammar


def _params(wish: Wish, room: int, seed: int, grammar: Grammar | None) -> SamplingParams:
    wanted = wish.params
    max_tokens = room if wish.max_tokens is None else min(wish.max_tokens, room)
    chosen_by_logprobs = wish.num_made > wish.num_choices and wanted.logprobs is None
    return replace(
        wanted,
        max_tokens=max_tokens,
        min_tokens=min(wanted.min_tokens, max_tokens),
        seed=seed,
        logprobs=0 if chosen_by_logprobs else wanted.logprobs,
        grammar=grammar,
    )
