"""The whole model stack inside your program: prefill and decode in one scheduler process, no servers.

    with Engine("smollm2") as engine:
        print(engine.generate("The capital of France is").text)

A background thread runs the asyncio side; the scheduler is a process of its own, so the model's work never holds the
program's GIL. Methods are safe to call from several threads: requests that overlap are batched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError, InvalidRequest, NotFound
from diptych.common.members.roles import Role
from diptych.engine.embedded.data_parallel_controller import DataParallelController
from diptych.engine.embedded.detokenizer_manager import DetokenizerManager
from diptych.engine.embedded.dispatch import DispatchName, new_policy
from diptych.engine.embedded.tokenizer_manager import Scheduler, TokenizerManager
from diptych.engine.frontend.scheduler_client import SchedulerClient, start_scheduler
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.codec import logprobs_from_wire
from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.generation.output_text import TextDelta
from diptych.generation.sampling_params import SamplingParams
from diptych.v1 import admin_pb2, inference_pb2, worker_pb2

T = TypeVar("T")
Prompt = str | Sequence[int]
Made = tuple[TextDelta, worker_pb2.LegOutput]

GREEDY: Final = SamplingParams(max_tokens=64, temperature=0.0)

_FINISH_FROM_WIRE: Final = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: Finish.STOP,
    inference_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    inference_pb2.FINISH_REASON_ABORTED: Finish.ABORTED,
}


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


class Engine:
    """An embedded engine. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str = "smollm2",
        options: EngineOptions | None = None,
        *,
        dispatch: DispatchName = "cache_aware",
    ) -> None:
        """Load `model`; `options.model` is ignored. Raises `ConfigError` if it can't be loaded.

        `dispatch` shares requests out among the `options.dp` schedulers.
        """
        options = replace(options or EngineOptions(), model=model, kv_events="off")
        source = open_model(model, options.load_format)
        self.model_id = source.config.model_id
        self.tokenizer = source.tokenizer()
        self._adapters = {name for name, _ in options.loras()}
        self._num_groups = options.dp
        self._detokenizer = DetokenizerManager(self.tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diptych-engine", daemon=True)
        self._thread.start()
        try:
            self._scheduler, self.context_len = self._wait(_start(options, dispatch))
        except BaseException:
            self._stop_loop()
            raise
        self._manager = TokenizerManager(self.tokenizer, self._scheduler)
        self._relay = asyncio.run_coroutine_threadsafe(self._manager.relay(), self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def scheduler_pids(self) -> tuple[int, ...]:
        """The processes that compute."""
        return self._scheduler.pids

    def generate(self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = "") -> Generation:
        """Return the whole output for one prompt, given as text or as token ids. `adapter` is a loaded one's name."""
        return self._wait(self._generate(prompt, params, adapter))

    def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams = GREEDY, *, adapters: Sequence[str] | None = None
    ) -> list[Generation]:
        """Return the outputs for several prompts, computed together, in the order of the prompts.

        `adapters` names one for each prompt; empty: none.
        """
        return self._wait(self._gather(prompts, params, adapters or [""] * len(prompts)))

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, adapter: str = ""
    ) -> Generator[TextDelta, None, None]:
        """Yield the output as it is made. Closing the iterator early aborts the request."""
        outputs = self._outputs(self._tokenize(prompt), params, adapter)
        try:
            while (made := self._wait(_next(outputs))) is not None:
                yield made[0]
        finally:
            self._wait(outputs.aclose())

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter while requests run. Raises `InvalidRequest` that says what is wrong with it."""
        request = admin_pb2.LoadLoraRequest(name=name, path=str(folder))
        self._wait(self._administer(admin_pb2.AdminCommand(load_lora=request)))
        self._adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that run with it finish. Raises `NotFound`."""
        request = admin_pb2.UnloadLoraRequest(name=name)
        self._wait(self._administer(admin_pb2.AdminCommand(unload_lora=request)))
        self._adapters.remove(name)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt that the model's chat template makes of `messages`, as token ids."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(list(messages)))

    def close(self) -> None:
        """Stop the scheduler process. Idempotent."""
        if self._thread.is_alive():
            self._relay.cancel()
            self._wait(self._scheduler.stop())
            self._stop_loop()

    async def _generate(self, prompt: Prompt, params: SamplingParams, adapter: str) -> Generation:
        prompt_ids = self._tokenize(prompt)
        deltas: list[TextDelta] = []
        cached_tokens, prompt_logprobs = 0, None
        async for delta, output in self._outputs(prompt_ids, params, adapter):
            deltas.append(delta)
            cached_tokens = output.stats.cached_tokens
            if output.HasField("prompt_logprobs"):
                prompt_logprobs = logprobs_from_wire(output.prompt_logprobs)
        finish = deltas[-1].finish
        assert finish is not None
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        parts = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        logprobs = join(parts) if parts else None
        return Generation(text, token_ids, finish, len(prompt_ids), cached_tokens, logprobs, prompt_logprobs)

    async def _gather(
        self, prompts: Sequence[Prompt], params: SamplingParams, adapters: Sequence[str]
    ) -> list[Generation]:
        pairs = zip(prompts, adapters, strict=True)
        return await asyncio.gather(*(self._generate(prompt, params, adapter) for prompt, adapter in pairs))

    async def _administer(self, command: admin_pb2.AdminCommand) -> None:
        if self._num_groups > 1:
            raise ConfigError("adapters can't be changed with dp above 1: name them in EngineOptions.lora")
        await self._manager.administer(command)

    async def _outputs(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str
    ) -> AsyncGenerator[Made, None]:
        params.validate()
        if adapter and adapter not in self._adapters:
            raise NotFound(f"no adapter {adapter!r} is loaded")
        stream = self._detokenizer.open(params)
        async with aclosing(self._manager.generate(prompt_ids, params, adapter)) as outputs:
            async for output in outputs:
                logprobs = logprobs_from_wire(output.logprobs) if output.HasField("logprobs") else None
                delta = stream.push(output.token_ids, _FINISH_FROM_WIRE[output.finish_reason], logprobs)
                yield delta, output
                if delta.finish is not None:
                    return

    def _tokenize(self, prompt: Prompt) -> list[int]:
        encode = self.tokenizer.encode
        prompt_ids = encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        if len(prompt_ids) >= self.context_len:
            words = f"the prompt has {len(prompt_ids)} tokens; this engine takes fewer than {self.context_len}"
            raise InvalidRequest(words, param="prompt")
        return prompt_ids

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(outputs: AsyncGenerator[Made, None]) -> Made | None:
    return await anext(outputs, None)


async def _start(options: EngineOptions, dispatch: DispatchName) -> tuple[Scheduler, int]:
    """Start the scheduler; return it and the context length once its model is loaded."""
    options.validate()
    groups = [await _start_group(options.of_group(group)) for group in range(options.dp)]
    scheduler: Scheduler = groups[0]
    if options.dp > 1:
        scheduler = DataParallelController(groups, new_policy(dispatch, options.page_size))
    try:
        return scheduler, (await scheduler.ready()).context_len
    except BaseException:
        await scheduler.stop()
        raise


async def _start_group(options: EngineOptions) -> SchedulerClient:
    config = SchedulerConfig(
        component="engine",
        log_format="auto",
        log_level="warning",
        instance_id=1,
        transports="auto",
        transfer=TransferRules(),
        engine=options,
        role=Role.LOCAL.value,
    )
    return await start_scheduler(config)
