"""Prompts to tokens: renders chat templates and tokenises, in a small thread pool.

So a long prompt does not stop the streams of others. A short one is done sooner than a thread would begin with it; one
in between finds threads that no long one ever holds. Long ones of many tenants take turns.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from diptych.common.errors import InvalidRequest
from diptych.generation.embed_rows import NUMBER_BYTES, check_finite
from diptych.generation.finish import Finish
from diptych.generation.output_text import OutputText
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, content_of_row_bytes
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.errors import ContextLengthExceeded
from diptych.router.text.chat_text import render
from diptych.router.text.fair_threads import FairThreadPool
from diptych.router.text.image_places import check_places, check_written, with_contents
from diptych.router.values.request import (
    ChatPrompt,
    ClientRequest,
    Echo,
    FramedPrompt,
    PairPrompt,
    PoolingParams,
    Prompt,
    PromptText,
    RowsPrompt,
    ServedModel,
    TextPrompt,
    Tokenized,
    TokenPrompt,
    images_of,
)
from diptych.router.values.validation import (
    check_ids,
    check_messages,
    check_not_empty,
    check_total,
    far_too_long,
    output_room,
    param_of,
    to_utf8,
)
from diptych.tokens.packed_tokens import TOKEN_TYPE, pack
from diptych.tokens.prompt_encoder import PromptEncoder
from diptych.tokens.segment_cache import SegmentCache

if TYPE_CHECKING:  # of models that are shown images
    from diptych.router.images.decode import OpenedImage
    from diptych.router.images.reader import ImageReader


CUT_CONTEXTS: Final = 16  # that a text which is to be cut may have the tokens of
MAX_INLINE_STEPS: Final = 2048  # of characters to make tokens of, or of tokens to check: less than a millisecond
MAX_INLINE_CHARS: Final = 1 << 20  # to render: likewise
MAX_SHORT_STEPS: Final = 1 << 16  # likewise of text to make tokens of: tens of milliseconds
_CHARS_PER_MESSAGE: Final = 1 << 12  # a template takes as long for one, however short

_VERBATIM: Final = SamplingParams(ignore_eos=True, logprobs=0)  # a prompt's tokens have all their text, and offsets

TokenizeAt = Literal["router", "worker"]
Encode: TypeAlias = "Callable[[Prompt, str, bool], Awaitable[Tokenized]]"  # its text; if special tokens are added to it
T = TypeVar("T")


class _Bounds(NamedTuple):
    """The bounds of a request's text, as it is made into tokens."""

    namespace: bytes  # within which tokens are remembered
    max_tokens: int
    tenant: str  # in whose turn


class Tokenization:
    """Turns the prompts of clients into tokens for one model; those that can go as text to the workers, where `at` says
    that they tokenise, only into text.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        at: TokenizeAt,
        num_threads: int,
        cache_bytes: int,
        images: ImageReader | None = None,
    ) -> None:
        """`images` of a model that takes some."""
        self._model = model
        self._images = images
        self._at = at
        tokenizer, marks = model.tokenizer, model.formats.reasoning_marks
        self._thinks_in_text = tokenizer.showing(marks) is tokenizer  # a grammar knows no special tokens
        self._encoder = PromptEncoder(model.tokenizer, cache_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._long_threads = FairThreadPool(num_threads, "tokenize-long")

    @property
    def cache(self) -> SegmentCache:
        """The tokens that are remembered."""
        return self._encoder.cache

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_threads.close()

    async def run(self, work: Callable[[], T], tenant: str, num_steps: int) -> T:
        """Do something in a thread that would stop others; what takes many steps has threads of its own."""
        if num_steps > MAX_SHORT_STEPS:
            return await self._long_threads.run(work, tenant, num_steps)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read(self, client: ClientRequest, max_tokens: int, held: HeldPixels | None = None) -> list[Tokenized]:
        """Return the prompts as workers shall get them, those of far more tokens excepted.

        `held` is what images may take, where there are any. Raises the caller's `DiptychError`.
        """
        stays_text = self._at == "worker" and not _shows_tokens(client)
        encode = self._leave if stays_text else self._encode
        return await self._read_all(client, partial(encode, _bounds(client, max_tokens)), max_tokens, held)

    async def tokenize(self, client: ClientRequest, max_tokens: int, held: HeldPixels | None = None) -> list[Tokenized]:
        """The same, as tokens in any case."""
        return await self._read_all(client, partial(self._encode, _bounds(client, max_tokens)), max_tokens, held)

    async def of_vectors(self, client: ClientRequest, pooling: PoolingParams, context_len: int) -> list[Tokenized]:
        """Return prompts as tokens of which no text is made, cut as is asked. Raises the caller's `DiptychError`."""
        most = context_len if pooling.most_tokens < 0 else pooling.most_tokens
        bounds = _bounds(client, CUT_CONTEXTS * context_len if most else context_len)
        found, num_tokens = [], 0
        for prompt in client.prompts:
            found.append(Tokenized(await self._of_vector(bounds, prompt, most, pooling.keeps_end)))
            check_not_empty(found[-1].ids)
            num_tokens += len(found[-1].ids)
            check_total(num_tokens)
            await asyncio.sleep(0)  # many short ones are long together: it is the turn of others
        client.trace.mark("tokenize")
        return found

    async def _of_vector(self, bounds: _Bounds, prompt: Prompt, most: int, keeps_end: bool) -> array[int]:
        match prompt:
            case TokenPrompt(ids):
                read = await self._do(partial(self._from_ids, ids), bounds.tenant, len(ids))
                return self._cut(array(TOKEN_TYPE, read.ids), most, keeps_end, is_framed=False)
            case TextPrompt(text, add_special_tokens):
                tokens = await self._ids(bounds, prompt, text, add_special_tokens)
                return self._cut(tokens, most, keeps_end, is_framed=add_special_tokens)
            case PairPrompt(first, second):
                await self._check_texts(bounds, prompt, (first, second))
                encode = partial(self._model.tokenizer.encode_pair, first, second)
                tokens = array(TOKEN_TYPE, await self._do(encode, bounds.tenant, len(first) + len(second)))
                return self._cut(tokens, most, keeps_end, is_framed=True)
            case FramedPrompt(before, parts, behind):
                await self._check_texts(bounds, prompt, parts)
                frame = [await self._ids(bounds, prompt, part, False) for part in (before, behind)]
                room = max(1, most - sum(map(len, frame))) if most else 0
                tokens = await self._ids(bounds, prompt, "".join(parts), False)
                return frame[0] + self._cut(tokens, room, keeps_end, is_framed=False) + frame[1]
            case ChatPrompt():
                raise InvalidRequest("a chat has no vector: give a text", param="messages")
            case RowsPrompt():
                raise InvalidRequest("rows have no vector: give a text", param="input_embeds")

    async def _check_texts(self, bounds: _Bounds, prompt: Prompt, texts: Sequence[str]) -> None:
        """Raise `ContextLengthExceeded` if one of them is far too long by itself: no copy of such a text is made."""
        has_more = partial(self._encoder.has_more_than, bounds.max_tokens)
        if await self._do(lambda: any(map(has_more, texts)), bounds.tenant, sum(map(len, texts))):
            raise far_too_long(prompt, bounds.max_tokens)

    async def _ids(self, bounds: _Bounds, prompt: Prompt, text: str, add_special_tokens: bool) -> array[int]:
        return array(TOKEN_TYPE, (await self._encode(bounds, prompt, text, add_special_tokens)).ids)

    def _cut(self, ids: array[int], most: int, keeps_end: bool, *, is_framed: bool) -> array[int]:
        return self._encoder.cut(ids, most, keeps_end=keeps_end, is_framed=is_framed) if most else ids

    async def predicted(self, client: ClientRequest, max_tokens: int) -> bytes:
        """Return the tokens of what a client thinks that its outputs will be, as `pack` does; empty: it said nothing.

        Raises `InvalidRequest` for far more than `max_tokens`; beyond as many it is cut.
        """
        text = client.predicted_text
        if not text:
            return b""
        try:
            tokenized = await self._encode(_bounds(client, max_tokens), TextPrompt(text), text, False)
        except ContextLengthExceeded:
            words = f"prediction has far more than the {max_tokens} tokens that an output can have"
            raise InvalidRequest(words, param="prediction") from None
        return pack(tokenized.ids[:max_tokens])

    async def text(self, ids: Sequence[int], tenant: str) -> str:
        """Return what tokens say, special ones included. Raises `InvalidRequest` for one that is none."""
        check_ids(ids, self._model.vocab_size, "tokens")
        decode = partial(self._model.tokenizer.decode, ids, skip_special_tokens=False)
        return await self.run(decode, tenant, len(ids))

    async def _read_all(
        self, client: ClientRequest, encode: Encode, max_tokens: int, held: HeldPixels | None
    ) -> list[Tokenized]:
        tokenized: list[Tokenized] = []
        for prompt in client.prompts:
            if tokenized:
                await asyncio.sleep(0)  # many short ones are long together: it is the turn of others
            tokenized.append(await self._read(prompt, client, encode))
            if client.turn is not None:
                tokenized[-1] = replace(tokenized[-1], ids=client.turn.before + array(TOKEN_TYPE, tokenized[-1].ids))
            if held is not None and images_of(prompt):
                tokenized[-1] = await self._with_images(tokenized[-1], prompt, client, max_tokens, held)
            if client.echo:
                tokenized[-1] = await self._with_echo(prompt, tokenized[-1], client.account.tenant, max_tokens)
        return tokenized

    async def _read(self, prompt: Prompt, client: ClientRequest, encode: Encode) -> Tokenized:
        match prompt:
            case TokenPrompt(ids):
                tokenized = await self._do(partial(self._from_ids, ids), client.account.tenant, len(ids))
            case TextPrompt(text, add_special_tokens):
                text = self._framed(prompt, text)
                goes_on = client.turn is not None and len(client.turn.before) > 0  # in the middle of a text
                tokenized = await encode(prompt, text, add_special_tokens and not goes_on)
            case ChatPrompt():
                tokenized = await self._chat(prompt, client, encode)
            case RowsPrompt(data):
                read = partial(_content, prompt)
                return Tokenized(contents=(await self._do(read, client.account.tenant, len(data) // NUMBER_BYTES),))
            case PairPrompt() | FramedPrompt():
                raise AssertionError("of such prompts no text is made")
        if tokenized.text is None:
            check_not_empty(tokenized.ids)
        client.trace.mark("tokenize")
        return tokenized

    async def _with_images(
        self, tokenized: Tokenized, prompt: Prompt, client: ClientRequest, max_tokens: int, held: HeldPixels
    ) -> Tokenized:
        """Put images where their tokens stand. No pixels are made for a prompt that is too long with them."""
        assert self._images is not None, "the request was checked"
        vision, images = self._images.vision, images_of(prompt)
        check_places(tokenized.ids, images, vision)

        def check_len(opened: Sequence[OpenedImage]) -> None:
            num_places = sum(vision.tokens_of(each.height, each.width) for each in opened)
            output_room(prompt, len(tokenized.ids) - len(images) + num_places, max_tokens)

        read = await self._images.read(images, held, client.account.tenant, client.num_made, check_len)
        ids, contents = with_contents(tokenized.ids, read, vision)
        client.trace.mark("images")
        return replace(tokenized, ids=ids, contents=contents, pad_id=vision.pad.token_id)

    async def _with_echo(self, prompt: Prompt, tokenized: Tokenized, tenant: str, max_tokens: int) -> Tokenized:
        if len(tokenized.ids) > max_tokens:
            raise far_too_long(prompt, max_tokens)
        echo = await self._do(partial(self._echo, prompt, tokenized.ids), tenant, len(tokenized.ids))
        return replace(tokenized, echo=echo)

    async def _do(self, work: Callable[[], T], tenant: str, num_steps: int, max_steps: int = MAX_INLINE_STEPS) -> T:
        """At once if it is short: a thread that wants to go on must wait for the loop's, and the other way round."""
        return work() if num_steps <= max_steps else await self.run(work, tenant, num_steps)

    def _from_ids(self, ids: Sequence[int]) -> Tokenized:
        check_ids(ids, self._model.vocab_size)
        return Tokenized(array(TOKEN_TYPE, ids))

    async def _chat(self, prompt: ChatPrompt, client: ClientRequest, encode: Encode) -> Tokenized:
        check_messages(prompt.messages)
        if prompt.images and self._model.vision is not None:
            check_written(prompt, self._model.vision)
        draw_up = partial(render, self._model.tokenizer, prompt)
        text = await self._do(draw_up, client.account.tenant, _num_chars(prompt), MAX_INLINE_CHARS)
        text = self._framed(prompt, text)
        client.trace.mark("render")
        tokenized = await encode(prompt, text, False)
        formats = self._model.formats
        if not client.is_shaped:
            new_parser = formats.parser(client.tool_use, text)
            return replace(tokenized, new_parser=new_parser) if new_parser else tokenized
        preamble = formats.preamble(text) if self._thinks_in_text else None
        new_parser = formats.parser_of_shape(client.tool_use, preamble)
        return replace(tokenized, new_parser=new_parser, preamble=preamble)

    def _framed(self, prompt: Prompt, text: str) -> str:
        """Return a prompt's text with what the model sees around its images."""
        return text if self._model.vision is None or not images_of(prompt) else self._model.vision.framed(text)

    async def _leave(self, bounds: _Bounds, prompt: Prompt, text: str, add_special_tokens: bool) -> Tokenized:
        if not text:  # it may have tokens all the same, and on the wire it would be none
            return await self._encode(bounds, prompt, text, add_special_tokens)
        return Tokenized(text=PromptText(to_utf8(text), add_special_tokens, bounds.max_tokens, param_of(prompt)))

    async def _encode(self, bounds: _Bounds, prompt: Prompt, text: str, add_special_tokens: bool) -> Tokenized:
        how: Any = {"add_special_tokens": add_special_tokens, "namespace": bounds.namespace}
        ids = self._encoder.encode_known(text, MAX_INLINE_STEPS, **how)
        if ids is None:
            encode = partial(self._encode_new, bounds.max_tokens, prompt, text, how)
            ids = await self.run(encode, bounds.tenant, len(text))
        return Tokenized(ids)

    def _encode_new(self, max_tokens: int, prompt: Prompt, text: str, how: Any) -> array[int]:
        if self._encoder.has_more_than(max_tokens, text):
            raise far_too_long(prompt, max_tokens)
        return self._encoder.encode(text, **how)

    def _echo(self, prompt: Prompt, ids: Sequence[int]) -> Echo:
        delta = OutputText(self._model.tokenizer, _VERBATIM).push(ids, Finish.LENGTH)
        return Echo(prompt.text if isinstance(prompt, TextPrompt) else delta.text, delta.offsets)


def _bounds(client: ClientRequest, max_tokens: int) -> _Bounds:
    return _Bounds(client.hints.cache_namespace, max_tokens, client.account.tenant)


def _content(prompt: RowsPrompt) -> ContentSegment:
    """Raises `InvalidRequest` for numbers that are not finite."""
    check_finite(np.frombuffer(prompt.data, "<f4"))
    return content_of_row_bytes(prompt.data, prompt.width)


def _shows_tokens(client: ClientRequest) -> bool:
    """Whether the answer shows the prompt's tokens, so that the router must know them."""
    shows = client.echo or client.shows_prompt or client.turn is not None
    return shows or client.params.prompt_logprobs is not None or bool(client.images)


def _num_chars(prompt: ChatPrompt) -> int:
    """About right where it is more than text."""
    return sum(map(_num_chars_of, prompt.messages)) + len(str(prompt.tools or ""))


def _num_chars_of(message: Mapping[str, Any]) -> int:
    shown = [str(message.get(key, "")) for key in ("content", "reasoning_content", "tool_calls")]
    return _CHARS_PER_MESSAGE + sum(map(len, shown))
