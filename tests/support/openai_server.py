"""A server of OpenAI's API that answers as a test says: words, scores, errors; it notes what it is asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

Body = Mapping[str, Any]
LISTED: Final = {"id": "tiny", "max_model_len": 1000}


@dataclass
class OpenAiServer:
    """Answers each POST with what `answer` makes of its body: a list is a stream of events."""

    answer: Callable[[Body], Any] = lambda body: words(body, body["max_tokens"])
    status: int = 200
    is_cut: bool = False  # every answer ends before its end
    bodies: list[Body] = field(default_factory=list)
    models: Any = field(default_factory=lambda: {"data": [LISTED]})
    headers: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length"))
        data = await reader.readexactly(length)
        found = self._found(head, json.loads(data) if data else {})
        pieces = _pieces(found)
        writer.write(f"HTTP/1.1 {self.status} x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"" if self.is_cut else b"0\r\n\r\n")
        self.running -= 1

    def _found(self, head: str, body: Body) -> Any:
        if head.startswith("GET /v1/models"):
            return self.models
        self.bodies.append(body)
        return {"error": {"message": "told to fail"}} if self.status != 200 else self.answer(body)


def words(body: Body, count: int) -> list[Any]:
    """A stream of so many words, in the words of the API that is asked."""
    is_chat = "messages" in body
    choices = [{"delta": {"content": " a"}} if is_chat else {"text": " a"}] * count
    usage = {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 3}}
    return [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}]


def _pieces(found: Any) -> list[bytes]:
    if not isinstance(found, list):
        return [json.dumps(found).encode()]
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in found) + b"data: [DONE]\n\n"
    return [text[start : start + 37] for start in range(0, len(text), 37)]  # cut anywhere


@contextmanager
def serving(server: OpenAiServer) -> Iterator[OpenAiServer]:
    """It serves on a thread of its own until the exit."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.serve, "127.0.0.1", 0), loop).result(60)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_close(listening), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(listening: asyncio.Server) -> None:
    listening.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
