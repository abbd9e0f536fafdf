"""Who waits for whom where prompts become tokens, and how much of a prompt that is too long is looked at."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import tokenizers

from diptych.common.errors import InvalidRequest
from diptych.generation.request_groups import Account
from diptych.generation.sampling_params import SamplingParams
from diptych.router.errors import ContextLengthExceeded
from diptych.router.text.tokenization import MAX_INLINE_STEPS, MAX_SHORT_STEPS, Tokenization
from diptych.router.values import validation
from diptych.router.values.kept_sessions import TOKEN_TYPE, Follow, Tokens, Turn
from diptych.router.values.request import (
    ChatPrompt,
    ClientRequest,
    FramedPrompt,
    PairPrompt,
    PoolingParams,
    Prompt,
    ServedModel,
    TextPrompt,
    TokenPrompt,
)
from diptych.tokens.tokenizer import Tokenizer

NUM_THREADS = 2
PATIENCE_S = 200
NO_LIMIT = 10**9
MANY = 100  # texts: more than any test has


class SlowTokenizer(Tokenizer):
    """Makes tokens of long texts only when it is told to, of one each time, and notes how much it was given."""

    go_on: threading.Semaphore
    num_begun: threading.Semaphore
    begun: str  # the first letter of each long text
    num_chars = 0

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        self.num_chars += sum(map(len, texts))
        if max(map(len, texts)) > MAX_SHORT_STEPS:
            self.begun += max(texts, key=len)[0]
            self.num_begun.release()
            assert self.go_on.acquire(timeout=PATIENCE_S)
        return super().encode_all(texts, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> list[int]:
        self.num_chars += len(first) + len(second)
        return super().encode(first) + super().encode(second)


@pytest.fixture
def tokenizer(byte_tokenizer: Tokenizer) -> SlowTokenizer:
    assert byte_tokenizer.chat_template is not None
    template = byte_tokenizer.chat_template.source
    tokenizer = SlowTokenizer(byte_tokenizer._backend, eos_ids=[256], chat_template=template)
    tokenizer.go_on, tokenizer.num_begun, tokenizer.begun = threading.Semaphore(0), threading.Semaphore(0), ""
    return tokenizer


@pytest.fixture
def tokenization(tokenizer: SlowTokenizer) -> Iterator[Tokenization]:
    model = ServedModel("m", tokenizer, 257, NO_LIMIT)
    made = Tokenization(model, at="router", num_threads=NUM_THREADS, cache_bytes=0)
    yield made
    tokenizer.go_on.release(MANY)
    made.close()


def asked(prompt: Prompt, *, echo: bool = False) -> ClientRequest:
    return ClientRequest("", [prompt], SamplingParams(), None, None, echo=echo)


def test_long_prompts_never_hold_all_threads(tokenization: Tokenization, tokenizer: SlowTokenizer) -> None:
    async def num_tokens() -> int:
        long = asked(TextPrompt("x" * (MAX_SHORT_STEPS + 1)))
        waiting = [asyncio.create_task(tokenization.tokenize(long, NO_LIMIT)) for _ in range(4 * NUM_THREADS)]
        await asyncio.to_thread(tokenizer.num_begun.acquire)
        short = asked(TextPrompt("y" * (MAX_INLINE_STEPS + 1)))
        (tokenized,) = await asyncio.wait_for(tokenization.tokenize(short, NO_LIMIT), PATIENCE_S)
        assert not any(task.done() for task in waiting)
        tokenizer.go_on.release(MANY)
        await asyncio.gather(*waiting)
        return len(tokenized.ids)

    assert asyncio.run(num_tokens()) == MAX_INLINE_STEPS + 1


def test_a_long_prompt_of_another_tenant_waits_for_one_of_a_flood(
    tokenization: Tokenization, tokenizer: SlowTokenizer
) -> None:
    async def tokenize(tenant: str, letter: str) -> None:
        long = replace(asked(TextPrompt(letter * (MAX_SHORT_STEPS + 1))), account=Account(tenant))
        await tokenization.tokenize(long, NO_LIMIT)

    async def in_line(count: int) -> None:
        while tokenization._long_threads.num_waiting < count:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)

    async def test() -> None:
        flood = [asyncio.create_task(tokenize("flood", "f")) for _ in range(10 * NUM_THREADS)]
        for _ in range(NUM_THREADS):
            await asyncio.to_thread(tokenizer.num_begun.acquire)
        await in_line(len(flood) - NUM_THREADS)
        bob = asyncio.create_task(tokenize("bob", "b"))
        await in_line(len(flood) - NUM_THREADS + 1)
        for _ in range(2):
            tokenizer.go_on.release()
            await asyncio.to_thread(tokenizer.num_begun.acquire)
        tokenizer.go_on.release(MANY)
        await asyncio.gather(bob, *flood)

    asyncio.run(test())
    assert tokenizer.begun[: NUM_THREADS + 2] == "fffb"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt("x" * 2**22), "prompt"),
        (ChatPrompt([{"role": "user", "content": "x" * 2**22}]), "messages"),
    ],
    ids=["text", "a chat"],
)
def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(
    tokenization: Tokenization, tokenizer: SlowTokenizer, prompt: Prompt, param: str
) -> None:
    tokenizer.go_on.release(MANY)
    begun_chars = tokenizer.num_chars
    with pytest.raises(ContextLengthExceeded, match="more than 1000 tokens") as raised:
        asyncio.run(tokenization.read(asked(prompt), 1000))
    assert raised.value.param == param
    assert tokenizer.num_chars - begun_chars < 2**14


def test_of_too_many_tokens_no_text_is_made_to_repeat(tokenization: Tokenization) -> None:
    with pytest.raises(ContextLengthExceeded, match="more than 1000 tokens"):
        asyncio.run(tokenization.read(asked(TokenPrompt([1] * 1001), echo=True), 1000))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("make", [PairPrompt, lambda first, second: FramedPrompt("", (first, second), "")])
def test_of_texts_that_are_compared_no_more_is_looked_at_than_a_prompt_may_have(
    tokenization: Tokenization, tokenizer: SlowTokenizer, make: Callable[[str, str], Prompt], is_cut: bool
) -> None:
    tokenizer.go_on.release(MANY)
    pooling = PoolingParams(most_tokens=-1 if is_cut else 0)
    for texts in (("x" * 10**6, "a"), ("a", "x" * 10**6)):
        with pytest.raises(ContextLengthExceeded):
            asyncio.run(tokenization.of_vectors(asked(make(*texts)), pooling, 100))
    assert tokenizer.num_chars < 10**5
    (found,) = asyncio.run(tokenization.of_vectors(asked(make("ab", "c")), pooling, 100))
    assert list(found.ids) == tokenizer.encode("abc")


def test_the_prompts_of_one_request_have_a_bound_together(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_PAIRED_TOKENS", 9)
    client = replace(asked(PairPrompt("abcd", "e")), prompts=[PairPrompt("abcd", "e")] * 2)
    with pytest.raises(InvalidRequest, match="9 tokens together: send fewer documents at once"):
        asyncio.run(tokenization.of_vectors(client, PoolingParams(), 100))


async def never_kept(prompt: Tokens, output: Tokens) -> None:
    raise AssertionError("it has not ended")


@pytest.mark.parametrize(("before", "ids"), [([], [1, 0]), ([7, 7], [7, 7, 0])])
def test_a_turn_in_the_middle_of_a_text_gets_no_special_tokens_and_one_that_begins_does(
    before: list[int], ids: list[int]
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = Tokenization(
        ServedModel("m", Tokenizer(backend, eos_ids=[1], chat_template=None), 9, NO_LIMIT),
        at="worker",
        num_threads=1,
        cache_bytes=0,
    )
    turn = Turn(array(TOKEN_TYPE, before), never_kept)
    client = replace(asked(TextPrompt("a")), follow=Follow("s", "first"), turn=turn)
    assert [list(each.ids) for each in asyncio.run(made.read(client, NO_LIMIT))] == [ids]
    made.close()
