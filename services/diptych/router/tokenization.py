"""Prompts to tokens: renders chat templates and tokenises, in a small thread pool.

So a long prompt does not stop the streams of others. A short one is done sooner than a thread would begin with it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from diptych.engine.finish import Finish
from diptych.engine.grammar.grammar import Preamble
from diptych.engine.loader.prompt_encoder import PromptEncoder
from diptych.engine.loader.segment_cache import SegmentCache
from diptych.engine.output_text import OutputText
from diptych.engine.packed_tokens import TOKEN_TYPE
from diptych.engine.sampling_params import SamplingParams
from diptych.router.chat_text import render
from diptych.router.parsing.message_formats import NewParser
from diptych.router.request import ChatPrompt, Echo, Prompt, TextPrompt, TokenPrompt
from diptych.router.served_model import ServedModel
from diptych.router.validation import check_ids, check_messages, check_not_empty, to_utf8
from diptych.router.wish import Wish

MAX_INLINE_STEPS: Final = 2048  # of characters to make tokens of, or of tokens to check: less than a millisecond
MAX_INLINE_CHARS: Final = 1 << 20  # to render: likewise
_CHARS_PER_MESSAGE: Final = 1 << 12  # a template takes as long for one, however short

_VERBATIM: Final = SamplingParams(ignore_eos=True, logprobs=0)  # a prompt's tokens have all their text, and offsets

TokenizeAt = Literal["router", "worker"]
Encode: TypeAlias = "Callable[[str, bool], Awaitable[Tokenized]]"  # a text, and whether special tokens are added to it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt as tokens, in an array; or as the text that workers will make tokens of."""

    ids: Sequence[int] = ()
    echo: Echo | None = None
    new_parser: NewParser | None = None  # of its outputs, if they may be more than content
    preamble: Preamble | None = None  # of outputs with a grammar
    text: Text | None = None


class Text(NamedTuple):
    """A prompt that has not been tokenised."""

    utf8: bytes
    add_special_tokens: bool  # as the tokenizer does by itself: not to a rendered chat


class Tokenization:
    """Turns the prompts of wishes into tokens for one model; those that can go as text to the workers, where `at` says
    that they tokenise, only into text.
    """

    def __init__(self, model: ServedModel, *, at: TokenizeAt, num_threads: int, cache_bytes: int) -> None:
        self._model = model
        self._at = at
        tokenizer, marks = model.tokenizer, model.formats.reasoning_marks
        self._thinks_in_text = tokenizer.showing(marks) is tokenizer  # a grammar knows no special tokens
        self._encoder = PromptEncoder(model.tokenizer, cache_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    @property
    def cache(self) -> SegmentCache:
        """The tokens that are remembered."""
        return self._encoder.cache

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Do something in the pool that would stop others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read(self, wish: Wish) -> list[Tokenized]:
        """Return the prompts as workers shall get them. Raises the caller's `DiptychError`."""
        stays_text = self._at == "worker" and not _shows_tokens(wish)
        return await self._read_all(wish, self._leave if stays_text else self._encode)

    async def tokenize(self, wish: Wish) -> list[Tokenized]:
        """Return the prompts as tokens. Raises the caller's `DiptychError`."""
        return await self._read_all(wish, self._encode)

    async def text(self, ids: Sequence[int]) -> str:
        """Return what tokens say, special ones included. Raises `InvalidRequest` for one that is none."""
        check_ids(ids, self._model.vocab_size)
        return await self.run(lambda: self._model.tokenizer.decode(ids, skip_special_tokens=False))

    async def _read_all(self, wish: Wish, encode: Encode) -> list[Tokenized]:
        first, *others = wish.prompts
        tokenized = [await self._read(first, wish, encode)]
        for prompt in others:
            await asyncio.sleep(0)  # many short ones are long together: it is the turn of others
            tokenized.append(await self._read(prompt, wish, encode))
        return tokenized

    async def _read(self, prompt: Prompt, wish: Wish, encode: Encode) -> Tokenized:
        match prompt:
            case TokenPrompt(ids):
                tokenized = await self._do(partial(self._take, ids), len(ids))
            case TextPrompt(text, add_special_tokens):
                tokenized = await encode(text, add_special_tokens)
            case ChatPrompt():
                tokenized = await self._chat(prompt, wish, encode)
        if tokenized.text is None:
            check_not_empty(tokenized.ids)
        if wish.echo:
            echo = await self._do(partial(self._echo, prompt, tokenized.ids), len(tokenized.ids))
            return replace(tokenized, echo=echo)
        return tokenized

    async def _do(self, work: Callable[[], T], num_steps: int, max_steps: int = MAX_INLINE_STEPS) -> T:
        """At once if it is short: a thread that wants to go on must wait for the loop's, and the other way round."""
        return work() if num_steps <= max_steps else await self.run(work)

    def _take(self, ids: Sequence[int]) -> Tokenized:
        check_ids(ids, self._model.vocab_size)
        return Tokenized(array(TOKEN_TYPE, ids))

    async def _chat(self, prompt: ChatPrompt, wish: Wish, encode: Encode) -> Tokenized:
        check_messages(prompt.messages)
        text = await self._do(partial(render, self._model.tokenizer, prompt), _num_chars(prompt), MAX_INLINE_CHARS)
        tokenized = await encode(text, False)
        formats = self._model.formats
        if not wish.is_shaped:
            return replace(tokenized, new_parser=formats.parser(wish.tool_use, text))
        preamble = formats.preamble(text) if self._thinks_in_text else None
        new_parser = formats.parser_of_shape(wish.tool_use, preamble)
        return replace(tokenized, new_parser=new_parser, preamble=preamble)

    async def _leave(self, text: str, add_special_tokens: bool) -> Tokenized:
        if not text:  # it may have tokens all the same, and on the wire it would be none
            return await self._encode(text, add_special_tokens)
        return Tokenized(text=Text(to_utf8(text), add_special_tokens))

    async def _encode(self, text: str, add_special_tokens: bool) -> Tokenized:
        ids = self._encoder.encode_known(text, MAX_INLINE_STEPS, add_special_tokens=add_special_tokens)
        if ids is None:
            ids = await self.run(partial(self._encoder.encode, text, add_special_tokens=add_special_tokens))
        return Tokenized(ids)

    def _echo(self, prompt: Prompt, ids: Sequence[int]) -> Echo:
        delta = OutputText(self._model.tokenizer, _VERBATIM).push(ids, Finish.LENGTH)
        return Echo(prompt.text if isinstance(prompt, TextPrompt) else delta.text, delta.offsets)


def _shows_tokens(wish: Wish) -> bool:
    """Whether the answer shows the prompt's tokens, so that the router must know them."""
    return wish.echo or wish.params.prompt_logprobs is not None


def _num_chars(prompt: ChatPrompt) -> int:
    """About right where it is more than text."""
    return sum(map(_num_chars_of, prompt.messages)) + len(str(prompt.tools or ""))


def _num_chars_of(message: Mapping[str, Any]) -> int:
    shown = [str(message.get(key, "")) for key in ("content", "reasoning_content", "tool_calls")]
    return _CHARS_PER_MESSAGE + sum(map(len, shown))
