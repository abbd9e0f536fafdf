"""From what a client sent to requests that workers can run: chat template, tokens, limits, defaults.

Everything that can be wrong with a request is found here, before a worker hears of it. The chat template and the
tokenizer run in a small thread pool, so that a long prompt does not stop the streams of others.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol

from diptych.common.errors import InvalidRequest
from diptych.engine.finish import Finish
from diptych.engine.grammar import compiler
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.output_text import OutputText
from diptych.engine.sampling_params import MAX_SEED, SamplingParams
from diptych.router.errors import ContextLengthExceeded, ModelNotFound
from diptych.router.request import ChatPrompt, Echo, GenerationRequest, Prompt, TextPrompt, TokenPrompt

MAX_CHOICES: Final = 8
MAX_PRIORITY: Final = 100
MAX_TENANT_LEN: Final = 256
MAX_SALT_LEN: Final = 256
ROLES: Final = ("system", "user", "assistant")
_VERBATIM: Final = SamplingParams(ignore_eos=True, logprobs=0)  # a prompt's tokens have all their text, and offsets


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves."""

    model_id: str
    tokenizer: Tokenizer
    vocab_size: int
    context_len: int  # tokens, prompt + output, that the model takes; workers may take fewer


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for, still as it was said: `None` is the model's default."""

    model: str  # or an adapter; empty: the only model
    prompts: Sequence[Prompt]
    params: SamplingParams  # but for `max_tokens` and `seed`
    max_tokens: int | None
    seed: int | None
    num_choices: int = 1  # of each prompt
    request_id: str = ""
    timeout_s: float | None = None
    wants_report: bool = False
    priority: int = 0  # higher first
    tenant: str = ""  # whose share of the workers the requests count against; empty: the common one
    cache_salt: str = ""  # prompts with different salts share no cached KV
    best_of: int | None = None  # outputs to make of each prompt, of which `num_choices` are chosen; None: those only
    echo: bool = False  # answers begin with the prompt

    @property
    def num_made(self) -> int:
        """Outputs to make of each prompt."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_requests(self) -> int:
        return len(self.prompts) * self.num_made


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A prompt as tokens."""

    ids: Sequence[int]
    echo: Echo | None


class WorkersNow(Protocol):
    """What of the workers bears on a request before one is chosen."""

    def adapters(self) -> Sequence[str]: ...

    @property
    def model_ids(self) -> Sequence[str]: ...

    def context_len(self, default: int) -> int: ...


class Preparer:
    """Turns wishes into requests for one model."""

    def __init__(self, model: ServedModel, workers: WorkersNow, *, num_threads: int, timeout_s: float) -> None:
        self._model = model
        self._workers = workers
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, wish: Wish) -> list[GenerationRequest]:
        """Return `num_made` requests for each prompt, in that order. Raises the caller's `DiptychError`."""
        arrival_s = time.monotonic()
        self._check(wish)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._threads, self._tokenize, wish)
        if wish.params.grammar is not None:
            await loop.run_in_executor(self._threads, compiler.check, wish.params.grammar)
        seed = secrets.randbits(63) if wish.seed is None else wish.seed
        timeout_s = self._timeout_s if wish.timeout_s is None else min(wish.timeout_s, self._timeout_s)
        limit = self._workers.context_len(self._model.context_len)
        return [
            GenerationRequest(
                request_id=wish.request_id,
                prompt_ids=prompt.ids,
                params=self._params(wish, len(prompt.ids), limit, (seed + choice) & MAX_SEED),
                arrival_s=arrival_s,
                deadline_s=arrival_s + timeout_s,
                wants_report=wish.wants_report,
                priority=wish.priority,
                tenant=wish.tenant,
                cache_salt=wish.cache_salt.encode(),
                adapter=wish.model if wish.model in self._workers.adapters() else "",
                echo=prompt.echo,
            )
            for prompt in prompts
            for choice in range(wish.num_made)
        ]

    def _check(self, wish: Wish) -> None:
        """What can be said without looking at the prompt."""
        names = self._workers.model_ids
        if wish.model and wish.model not in (*names, *self._workers.adapters()):
            raise ModelNotFound(f"the model {wish.model!r} does not exist; this router serves {' and '.join(names)}")
        if not 1 <= wish.num_choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, not {wish.num_choices}", param="n")
        if not wish.num_choices <= wish.num_made <= MAX_CHOICES:
            text = f"best_of must be between n ({wish.num_choices}) and {MAX_CHOICES}, not {wish.best_of}"
            raise InvalidRequest(text, param="best_of")
        if wish.max_tokens is not None and wish.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {wish.max_tokens}", param="max_tokens")
        if abs(wish.priority) > MAX_PRIORITY:
            text = f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {wish.priority}"
            raise InvalidRequest(text, param="priority")
        if len(wish.tenant) > MAX_TENANT_LEN:
            raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_LEN} characters", param="tenant")
        if len(wish.cache_salt) > MAX_SALT_LEN:
            raise InvalidRequest(f"cache_salt takes at most {MAX_SALT_LEN} characters", param="cache_salt")
        params = replace(wish.params, max_tokens=wish.max_tokens or self._model.context_len)
        params.validate()
        params.validate_for(self._model.vocab_size)

    def _params(self, wish: Wish, prompt_len: int, context_len: int, seed: int) -> SamplingParams:
        room = context_len - prompt_len
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens; with at least one token of output that is more than the context "
                f"of {context_len} tokens",
                param="messages" if isinstance(wish.prompts[0], ChatPrompt) else "prompt",
            )
        max_tokens = room if wish.max_tokens is None else min(wish.max_tokens, room)
        params = replace(
            wish.params, max_tokens=max_tokens, min_tokens=min(wish.params.min_tokens, max_tokens), seed=seed
        )
        if wish.num_made > wish.num_choices and params.logprobs is None:
            return replace(params, logprobs=0)  # to choose by
        return params

    def _tokenize(self, wish: Wish) -> list[_Tokenized]:
        prompts = []
        for prompt in wish.prompts:
            ids = self._tokens(prompt)
            prompts.append(_Tokenized(ids, self._echo(prompt, ids) if wish.echo else None))
        return prompts

    def _echo(self, prompt: Prompt, ids: Sequence[int]) -> Echo:
        delta = OutputText(self._model.tokenizer, _VERBATIM).push(ids, Finish.LENGTH)
        return Echo(prompt.text if isinstance(prompt, TextPrompt) else delta.text, delta.offsets)

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self._model.tokenizer
        match prompt:
            case TextPrompt(text):
                ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=True)
            case ChatPrompt(messages):
                _check_messages(messages)
                ids = tokenizer.encode(tokenizer.apply_chat_template(messages))
            case TokenPrompt(ids):
                _check_ids(ids, self._model.vocab_size)
        if not ids:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        return ids


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            text = f"role must be one of {', '.join(ROLES)}, not {message['role']!r}"
            raise InvalidRequest(text, param=f"messages[{index}].role")


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"{wrong} is not a token: ids are 0 to {vocab_size - 1}", param="prompt")
