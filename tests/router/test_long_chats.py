"""A chat of many pieces takes time by its length, and other requests do not wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from diptych.generation.sampling_params import SamplingParams
from diptych.router.http.anthropic.messages_request import MessagesRequest
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.text.chat_text import told_in_words
from diptych.router.text.tokenization import Tokenization
from diptych.router.values.request import ChatPrompt, ClientRequest, ServedModel
from diptych.tokens.tokenizer import Tokenizer

LONG, NUM_PIECES = "a" * (64 << 20), 1000
ANSWERS: list[Any] = [{"role": "tool", "content": text, "tool_call_id": "c"} for text in (LONG, *"b" * NUM_PIECES)]


def blocks_of_a_message() -> ChatPrompt:
    blocks = [{"type": "text", "text": text} for text in (LONG, *"b" * NUM_PIECES)]
    messages = [{"role": "user", "content": blocks}]
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": messages}).chat()


def items_of_the_assistant() -> ChatPrompt:
    items = [{"role": "assistant", "content": text} for text in (LONG, *"b" * NUM_PIECES)]
    return ResponsesRequest.model_validate({"input": items}).chat()


def thoughts_of_the_assistant() -> ChatPrompt:
    texts = [{"type": "reasoning_text", "text": text} for text in (LONG, *"b" * NUM_PIECES)]
    return ResponsesRequest.model_validate(
        {"input": [{"type": "reasoning", "content": [text]} for text in texts]}
    ).chat()


def answers_of_tools() -> ChatPrompt:
    return ChatPrompt(told_in_words(ChatPrompt(ANSWERS)))


def copying_s() -> float:
    """What it costs this thread to copy the long one, as adding a piece to it would. The best of three."""

    def once() -> float:
        begin_s = time.thread_time()
        assert len(LONG + "b") > len(LONG)
        return time.thread_time() - begin_s

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    "read", [blocks_of_a_message, items_of_the_assistant, thoughts_of_the_assistant, answers_of_tools]
)
def test_neighbouring_pieces_become_one_turn_without_a_copy_a_piece(read: Callable[[], ChatPrompt]) -> None:
    begin_s = time.thread_time()
    (turn,) = read().messages
    work_s = time.thread_time() - begin_s
    assert work_s < copying_s() * NUM_PIECES / 4  # it is that of some 5 copies; one a piece would be 1000
    assert len(turn.get("reasoning_content") or turn["content"]) > len(LONG) + NUM_PIECES - 1


class Watched(dict[str, Any]):
    """A message that knows which threads read its content."""

    threads: set[str]

    def __getitem__(self, key: str) -> Any:
        if key == "content":
            self.threads.add(threading.current_thread().name)
        return super().__getitem__(key)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"text": "a" * (1 << 20)}}}


@pytest.mark.parametrize(
    ("messages", "is_inline"),
    [
        ([{}], True),
        ([{}] * 1000, False),
        ([{"tool_calls": [CALL]}], False),
        ([{"reasoning_content": "a" * (1 << 20)}], False),
        ([{"content": "a" * (1 << 20)}], False),
    ],
)
def test_what_takes_long_to_render_is_rendered_in_the_pool(
    byte_tokenizer: Tokenizer, messages: list[dict[str, Any]], is_inline: bool
) -> None:
    template = "{% for m in messages %}{{ m.content[:1] }}{% endfor %}{{ tools }}"
    model = ServedModel("m", Tokenizer(byte_tokenizer._backend, eos_ids=[256], chat_template=template), 257, 9999)
    tokenization = Tokenization(model, at="router", num_threads=1, cache_bytes=0)
    watched = [Watched(role="assistant", **{"content": "", **message}) for message in messages]
    for message in watched:
        message.threads = set()
    asyncio.run(tokenization.tokenize(ClientRequest("", [ChatPrompt(watched)], SamplingParams(), None, None), 10**9))
    tokenization.close()
    here = threading.current_thread().name
    assert {message.threads == {here} for message in watched} == {is_inline}
