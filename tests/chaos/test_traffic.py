"""How much a scenario is offered: as much as it needs to mean something, on a slow machine too."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from drill import traffic as traffic_module
from drill.questions import Question
from drill.tally import Tally
from drill.traffic import MAX_TRIES, Traffic

AT_LEAST = 7
QUESTION = Question([1, 2, 3], [7, 8])
TIMINGS = {"pages_moved": 1, "prefill_instance": "a", "decode_instance": "b"}
ANSWER = {
    "choices": [{"token_ids": QUESTION.answer}],
    "diptych": {**TIMINGS, "prefill_kv_digest": "1" * 16, "decode_kv_digest": "1" * 16},
}


class Router:
    """A router that always says the same, and the service in front of it."""

    num_starts = 1

    def __init__(self, status: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                body = json.dumps(ANSWER if status == 200 else {"error": "no worker"}).encode()
                self.send_response(status)
                self.send_header("retry-after", "1")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    async def pick(self, avoided: Any) -> Router:
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(params=[200, 503])
def router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Router, int]]:
    monkeypatch.setattr(traffic_module, "SHARE_STREAMED", 0.0)
    router = Router(request.param)
    yield router, request.param
    router.close()


def test_traffic_that_is_stopped_at_once_goes_on_until_enough_was_answered_or_it_is_known_that_it_cannot_be(
    router: tuple[Router, int],
) -> None:
    service: Any
    service, status = router

    async def run() -> Tally:
        traffic = Traffic(service, [QUESTION], random.Random(0))
        traffic.start(2, AT_LEAST)
        return await traffic.stop()

    tally = asyncio.run(run())
    if status == 200:
        assert AT_LEAST <= tally.answered == tally.offered <= AT_LEAST + 1
    else:
        assert MAX_TRIES * AT_LEAST <= tally.failed[503] == tally.offered <= MAX_TRIES * AT_LEAST + 1
