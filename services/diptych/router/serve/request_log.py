"""The request log: a line for each output that has ended, so that simulations can replay what clients asked for.

A thread of its own writes, with all that has come in one call: several processes append to one file, and who moves it
away should copy and truncate. A disk that hangs holds up no request: lines that can't be written are lost, and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from diptych.common.errors import ConfigError
from diptych.generation.page_hash import extra_key
from diptych.generation.segments import prompt_keys
from diptych.router.values.logged_request import LoggedRequest, block_names
from diptych.router.values.request import GenerationRequest

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 10_000  # lines
CLOSE_S: Final = 2.0  # for what waits to be written when the router ends


class Served(NamedTuple):
    """What came of a request. Times on the monotonic clock."""

    prompt_len: int
    cached_len: int
    output_len: int
    first_s: float | None  # None: there was no token
    last_s: float
    finish: str  # as its last attempt ended; empty: there was none


class RequestLog:
    """Takes requests that have ended, in the event loop, and appends them to a file."""

    def __init__(self, path: Path) -> None:
        """Raise `ConfigError` if the file can't be written."""
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--request-log: {path} can't be written: {error.strerror}") from None
        self._epoch_s = time.time() - time.monotonic()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write, name="request-log", daemon=True)
        self._thread.start()

    def add(self, request: GenerationRequest, served: Served) -> None:
        try:
            self._lines.put_nowait(entry_of(request, served, self._epoch_s).to_line())
        except queue.Full:
            self._lose(1)

    def close(self) -> None:
        """Write what waits, if it can be done soon."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lines = [line]
            while not self._lines.empty() and (line := self._lines.get()) is not None:
                lines.append(line)
            self._append(lines)
            if line is None:
                break
        self._file.close()

    def _append(self, lines: list[str]) -> None:
        try:
            self._file.write("".join(lines).encode())
        except OSError as error:
            logger.warning("can't write the request log: %s", error)
            self._lose(len(lines))

    def _lose(self, num_lines: int) -> None:
        if not self._num_lost:
            logger.warning("the request log loses lines: its disk does not take them")
        self._num_lost += num_lines


def entry_of(request: GenerationRequest, served: Served, epoch_s: float) -> LoggedRequest:
    """Return the line of a request; `epoch_s` is when the monotonic clock was 0, since 1970."""
    client, gaps, first_s = request.client, served.output_len - 1, served.first_s
    return LoggedRequest(
        arrival=round(epoch_s + client.life.arrival_s, 6),
        prompt_len=served.prompt_len,
        output_len=served.output_len,
        cached_len=served.cached_len,
        blocks=_blocks(request),
        session=xxhash.xxh3_64_hexdigest(client.routing.session.encode()) if client.routing.session else "",
        tier=client.tier.name,
        ttft_s=None if first_s is None else round(first_s - client.life.arrival_s, 6),
        tpot_s=round((served.last_s - first_s) / gaps, 6) if first_s is not None and gaps > 0 else None,
        finish=served.finish,
    )


def _blocks(request: GenerationRequest) -> str:
    prompt, hints = request.prompt, request.client.hints
    ids = np.array(prompt.ids, np.int64)
    keys = prompt_keys(ids, prompt.contents) if prompt.contents else ids
    return block_names(keys, extra_key(hints.cache_namespace, hints.adapter))
