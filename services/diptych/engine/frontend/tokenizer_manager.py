"""The threads of a worker's frontend that tokenise prompts which came as text, for all its scheduler groups.

The tokenizer is opened when the first text comes: a worker whose routers tokenise never needs it.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from diptych.tokens.prompt_encoder import PromptEncoder
from diptych.tokens.tokenizer import Tokenizer

T = TypeVar("T")


class TokenizerManager:
    """Tokenises away from the event loop."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer], *, num_threads: int, cache_bytes: int) -> None:
        self._open_tokenizer = open_tokenizer
        self._cache_bytes = cache_bytes
        self._opening = threading.Lock()
        self._encoder: PromptEncoder | None = None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, max_tokens: int, *, add_special_tokens: bool, namespace: bytes
    ) -> array[int] | None:
        """Return the tokens; None if they are far more than `max_tokens`.

        Raises `InvalidRequest` for what is not valid Unicode, `ConfigError` if the model has no tokenizer.
        """

        def work() -> array[int] | None:
            encoder = self._open()
            if encoder.has_more_than(max_tokens, text):
                return None
            return encoder.encode(text, add_special_tokens=add_special_tokens, namespace=namespace)

        return await self.run(work)

    async def run(self, work: Callable[[], T]) -> T:
        """Do something else of a prompt's that takes long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _open(self) -> PromptEncoder:
        with self._opening:
            if self._encoder is None:
                self._encoder = PromptEncoder(self._open_tokenizer(), self._cache_bytes)
            return self._encoder
