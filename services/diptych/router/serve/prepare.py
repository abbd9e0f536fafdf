"""From what a client sent to requests that workers can run: checked, tokenised, with limits and defaults."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar, Preamble
from diptych.generation.sampling_params import MAX_SEED, SamplingParams
from diptych.generation.segments import content_len
from diptych.grammars.checks import GrammarChecks
from diptych.router.request import GenerationRequest, PromptText
from diptych.router.serve.validation import check_wish, output_room, param_of
from diptych.router.served_model import ServedModel
from diptych.router.text.tokenization import Tokenization, Tokenized
from diptych.router.wish import Wish

COUNTED_CONTEXTS: Final = 4  # that a text may have the tokens of, for whoever wants to know how many they are


class WorkersNow(Protocol):
    """What of the workers bears on a request before one is chosen."""

    def adapters(self) -> Sequence[str]: ...

    @property
    def model_ids(self) -> Sequence[str]: ...

    def context_len(self, default: int) -> int: ...


class Preparer:
    """Turns wishes into requests for one model."""

    def __init__(
        self,
        model: ServedModel,
        workers: WorkersNow,
        tokenization: Tokenization,
        grammars: GrammarChecks,
        *,
        timeout_s: float,
        max_choices: int,
    ) -> None:
        self._model = model
        self._workers = workers
        self._tokenization = tokenization
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._max_choices = max_choices

    def close(self) -> None:
        self._tokenization.close()
        self._grammars.close()

    def timeout_s(self, wish: Wish) -> float:
        """How long the requests of a wish may be without a token."""
        return self._timeout_s if wish.timeout_s is None else min(wish.timeout_s, self._timeout_s)

    def check(self, wish: Wish) -> None:
        """Raise what can be said without looking at the prompt."""
        workers = self._workers
        check_wish(wish, self._model, workers.model_ids, workers.adapters(), self._max_choices)

    async def tokens(self, wish: Wish) -> list[Sequence[int]]:
        """Return the tokens of each prompt of a wish that was checked. Raises the caller's `DiptychError`."""
        limit = COUNTED_CONTEXTS * self._workers.context_len(self._model.context_len)
        return [prompt.ids for prompt in await self._tokenization.tokenize(wish, limit)]

    async def text(self, ids: Sequence[int], tenant: str) -> str:
        """Return what tokens say, special ones included. Raises `InvalidRequest` for one that is none."""
        return await self._tokenization.text(ids, tenant)

    async def prepare(self, wish: Wish, arrival_s: float) -> list[GenerationRequest]:
        """Return `num_made` requests for each prompt of a wish that was checked, in that order.

        Raises the caller's `DiptychError`.
        """
        limit = self._workers.context_len(self._model.context_len)
        prompts = await self._tokenization.read(wish, limit)
        grammar = await self._grammar(wish, prompts[0].preamble)
        seed = random.getrandbits(63) if wish.seed is None else wish.seed
        rooms = [
            output_room(wish.prompts[0], max(1, len(prompt.ids) + content_len(prompt.contents)), limit)
            for prompt in prompts
        ]
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
            contents=prompt.contents,
            params=params,
            arrival_s=arrival_s,
            deadline_s=math.inf if wish.timeout_s is None else arrival_s + wish.timeout_s,
            silence_s=self._timeout_s,
            wants_report=wish.wants_report,
            priority=wish.priority,
            tenant=wish.tenant,
            cache_namespace=wish.cache_namespace,
            adapter=self._adapter(wish.model),
            echo=prompt.echo,
            only_reads=wish.only_reads,
            shows_special=wish.shows_special,
            new_parser=prompt.new_parser,
            caller=wish.caller,
            routing=wish.routing,
            trace=wish.trace,
            text=prompt.text and PromptText(*prompt.text, context_len, param_of(wish.prompts[0])),
        )

    def _adapter(self, name: str) -> str:
        """Return the adapter that a request names; "" for none. A name of the model's is no adapter's."""
        return name if name in self._workers.adapters() and name not in self._model.names else ""

    async def _grammar(self, wish: Wish, preamble: Preamble | None) -> Grammar | None:
        """Return what the outputs must match, once it is known to compile."""
        forced = wish.tool_use.grammar()
        grammar = forced or wish.params.grammar
        if grammar is None:
            return None
        grammar = replace(grammar, preamble=grammar.preamble or preamble)
        try:
            grammar.validate()
            await self._grammars.check(grammar, wish.tenant)
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
