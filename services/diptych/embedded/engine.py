"""The whole model stack inside your program: the schedulers of workers, and no servers.

    with Engine("smollm2") as engine:
        print(engine.generate("The capital of France is").text)

A background thread runs the asyncio side; each scheduler is a process of its own, so the model's work never holds the
program's GIL. Methods are safe to call from several threads, and the `async_` ones from any event loop: requests that
overlap are batched.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError, InternalError, InvalidRequest, NotFound
from diptych.embedded.data_parallel_controller import DataParallelController, EnginePrompt
from diptych.embedded.group import launched, roles_of
from diptych.embedded.life import Life
from diptych.embedded.prompt_tokens import packed_ids
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.engine.options.config import EngineOptions
from diptych.generation import insight as insights
from diptych.generation.attention_tokens import TokenAttention
from diptych.generation.embed_rows import NUMBER_BYTES, check_shape, checked_rows
from diptych.generation.finish import Finish
from diptych.generation.insight import HiddenStates, Insight
from diptych.generation.leg_prompt import words_far_too_long, words_too_long
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.output_text import OutputText, TextDelta
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import content_of_rows
from diptych.router.choose.policies import POLICIES
from diptych.router.serve.attempt import AttemptFailed
from diptych.router.values.leg_results import NOTHING_PREDICTED, Predicted
from diptych.v1 import admin_pb2

Prompt = str | Sequence[int] | npt.NDArray[Any]  # tokens; or rows of floats, [num_rows, hidden_size]

GREEDY: Final = SamplingParams(max_tokens=64, temperature=0.0)
MAX_ROW_BYTES: Final = 1 << 30  # of a prompt, as float32: protobuf takes less than 2 GiB
TOKENIZER_THREADS: Final = 2
TOKENIZER_CACHE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request."""

    text: str
    token_ids: tuple[int, ...]  # with the end-of-sequence token, if that ended it
    finish: Finish
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    logprobs: TokenLogprobs | None = None  # of `token_ids`, if asked for
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt but its first token, if asked for
    predicted: Predicted = NOTHING_PREDICTED  # what came of guesses, with `EngineOptions.speculate`
    attention: TokenAttention | None = None  # of `token_ids`, if asked for
    hidden_states: HiddenStates | None = None  # likewise


class _Part(NamedTuple):
    """What has come of a request since the part before."""

    delta: TextDelta
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: TokenLogprobs | None
    predicted: Predicted
    insight: Insight | None


class Engine:
    """An embedded engine. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str = "smollm2",
        options: EngineOptions | None = None,
        *,
        prefill: int = 0,
        decode: int = 0,
        dispatch: str = "cache_aware",
    ) -> None:
        """Load `model`; `options.model` is ignored. Raises `ConfigError` if it can't be loaded.

        There are `options.dp` schedulers that serve whole requests; or `prefill` and `decode` ones, between which KV
        moves as between workers. `dispatch`, a routing policy by its name, shares requests out among them.
        """
        options = replace(options or EngineOptions(), model=model, kv_events="off")
        options.validate()
        roles = roles_of(options.dp, prefill, decode)
        if dispatch not in POLICIES:
            raise ConfigError(f"dispatch must be one of {', '.join(POLICIES)}, not {dispatch!r}")
        source = open_model(model, options.load_format)
        self.model_id = source.config.model_id
        self.tokenizer = source.tokenizer()
        _ = self.tokenizer.chat_template  # compiled now, not in the first chat: what is wrong with it is told now
        self._adapters = {name for name, _ in options.loras()}
        tokenizer = self.tokenizer
        self._tokenizers = TokenizerManager(
            lambda: tokenizer, num_threads=TOKENIZER_THREADS, cache_bytes=TOKENIZER_CACHE_BYTES
        )
        self._life = Life("diptych-engine")
        self._life.stack.callback(self._tokenizers.close)
        try:
            launching = self._life.stack.enter_async_context(launched(options, roles))
            self._groups, self.context_len = self._life.wait(launching)
        except BaseException:
            self._life.end()
            raise
        weakref.finalize(self, self._life.begin_to_end).atexit = False  # the interpreter's end waits for it
        self._controller = DataParallelController(self._groups, dispatch, options.page_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def scheduler_pids(self) -> tuple[int, ...]:
        """The processes that compute, those that prefill first."""
        return tuple(pid for group in self._groups for pid in group.scheduler.pids)

    def generate(self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = "") -> Generation:
        """Return the whole output for one prompt, given as text, as token ids or as rows of floats `[num_rows, width]`.

        Rows stand in place of the embeddings of tokens. `adapter` is a loaded one's name.
        """
        return self._life.wait(self._generate(prompt, params, adapter))

    async def async_generate(self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = "") -> Generation:
        """The same for a coroutine. Cancelling it aborts the request."""
        return await asyncio.wrap_future(self._life.submit(self._generate(prompt, params, adapter)))

    def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams = GREEDY, *, adapters: Sequence[str] | None = None
    ) -> list[Generation]:
        """Return the outputs for several prompts, computed together, in the order of the prompts.

        `adapters` names one for each prompt; empty: none.
        """
        return self._life.wait(self._gather(prompts, params, adapters or [""] * len(prompts)))

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = ""
    ) -> Generator[TextDelta, None, None]:
        """Yield the output as it is made. Closing the iterator early aborts the request."""
        parts = self._parts(prompt, params, adapter)
        try:
            while (part := self._life.wait(_next(parts))) is not None:
                yield part.delta
        finally:
            self._life.finish(parts.aclose())

    async def async_stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = ""
    ) -> AsyncGenerator[TextDelta, None]:
        """The same for a coroutine. Cancelling it aborts the request, too."""
        parts = self._parts(prompt, params, adapter)
        try:
            while (part := await asyncio.wrap_future(self._life.submit(_next(parts)))) is not None:
                yield part.delta
        finally:
            with contextlib.suppress(InternalError):
                await asyncio.wrap_future(self._life.submit(parts.aclose()))

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter while requests run. Raises `InvalidRequest` that says what is wrong with it."""
        request = admin_pb2.LoadLoraRequest(name=name, path=str(folder))
        self._life.wait(self._administer(admin_pb2.AdminCommand(load_lora=request)))
        self._adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that run with it finish. Raises `NotFound`."""
        request = admin_pb2.UnloadLoraRequest(name=name)
        self._life.wait(self._administer(admin_pb2.AdminCommand(unload_lora=request)))
        self._adapters.remove(name)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt that the model's chat template makes of `messages`, as token ids."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(list(messages)))

    def close(self) -> None:
        """Stop the scheduler processes. Idempotent, and for any thread.

        Requests that are under way are told at once, and those that come later. An engine that nobody holds any more is
        closed, and so is one at the interpreter's end.
        """
        self._life.end()

    async def _generate(self, prompt: Prompt, params: SamplingParams, adapter: str) -> Generation:
        parts = [part async for part in self._parts(prompt, params, adapter)]
        deltas = [part.delta for part in parts]
        finish = deltas[-1].finish
        assert finish is not None
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        told = [part.insight for part in parts if part.insight is not None]
        insight = insights.join(told) if told else Insight()
        return Generation(
            "".join(delta.text for delta in deltas),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish,
            parts[0].prompt_tokens,
            parts[-1].cached_tokens,
            join(logprobs) if logprobs else None,
            next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
            parts[-1].predicted,
            insight.attention,
            insight.hidden_states,
        )

    async def _gather(
        self, prompts: Sequence[Prompt], params: SamplingParams, adapters: Sequence[str]
    ) -> list[Generation]:
        pairs = zip(prompts, adapters, strict=True)
        return await asyncio.gather(*(self._generate(prompt, params, adapter) for prompt, adapter in pairs))

    async def _administer(self, command: admin_pb2.AdminCommand) -> None:
        if len(self._groups) > 1:
            words = "adapters can't be changed with dp above 1, or prefill and decode: name them in EngineOptions.lora"
            raise ConfigError(words)
        await self._groups[0].queries.administer(command)

    async def _parts(self, prompt: Prompt, params: SamplingParams, adapter: str) -> AsyncGenerator[_Part, None]:
        params.validate()
        if adapter and adapter not in self._adapters:
            raise NotFound(f"no adapter {adapter!r} is loaded")
        given = await self._read(prompt)
        text, num_tokens = OutputText(self.tokenizer, params), 0
        attempt = self._controller.start(given, params, adapter)
        try:
            while True:
                made = await attempt.next()
                delta, stats = text.push(made.token_ids, made.finish, made.logprobs), attempt.prompt_stats
                cached_tokens = stats.cached_tokens if stats is not None else 0
                num_tokens += len(delta.token_ids)
                predicted = attempt.predicted(num_tokens)
                insight = made.insight and made.insight.span(0, len(delta.token_ids))
                yield _Part(delta, given.num_tokens, cached_tokens, made.prompt_logprobs, predicted, insight)
                if delta.finish is not None:
                    return
        except AttemptFailed as failed:
            raise self._controller.error_of(failed.failure) from None
        finally:
            attempt.close()

    async def _read(self, prompt: Prompt) -> EnginePrompt:
        if isinstance(prompt, np.ndarray) and not _are_tokens(prompt):
            return await self._of_rows(prompt)
        found = EnginePrompt(await self._encode(prompt) if isinstance(prompt, str) else packed_ids(prompt))
        self._check_len(found.num_tokens)
        return found

    async def _of_rows(self, rows: npt.NDArray[Any]) -> EnginePrompt:
        """Return the prompt of an array, whose numbers are read in a thread, once their number is known to be right."""
        check_shape(rows)
        self._check_len(len(rows))
        if rows.size * NUMBER_BYTES > MAX_ROW_BYTES:
            words = f"the rows of input_embeds take {rows.size * NUMBER_BYTES} bytes as float32"
            raise InvalidRequest(f"{words}: give {MAX_ROW_BYTES} at most, so fewer rows", param="input_embeds")
        content = await self._tokenizers.run(lambda: content_of_rows(checked_rows(rows)))
        return EnginePrompt(contents=(content,))

    def _check_len(self, num_tokens: int) -> None:
        if num_tokens >= self.context_len:
            raise InvalidRequest(words_too_long(num_tokens, self.context_len), param="prompt")

    async def _encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, with those that the model wants at its beginning."""
        token_ids = await self._tokenizers.encode(text, self.context_len, add_special_tokens=True, namespace=b"")
        if token_ids is None:
            raise InvalidRequest(words_far_too_long(self.context_len), param="prompt")
        return token_ids


def _are_tokens(numbers: npt.NDArray[Any]) -> bool:
    return numbers.ndim == 1 and np.issubdtype(numbers.dtype, np.integer)


async def _next(parts: AsyncGenerator[_Part, None]) -> _Part | None:
    return await anext(parts, None)
