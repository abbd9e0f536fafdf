"""Runs in a pod of the image under test: clients that always have a greedy request open, whose answer is known.

A third of the clients opens a connection for each request, a third keeps one and streams, a third calls over gRPC. A
client tries again only when its connection is refused or ends before any byte of an answer, and says so. Prints a JSON
line a second: the counts since the start, how long the slowest request took that has ended since the line before,
and words about each that went wrong since then.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from diptych.engine.sim.known_answers import KnownAnswers
from diptych.v1.inference_pb2 import GenerateRequest, SamplingParams
from diptych.v1.inference_pb2_grpc import InferenceStub

PAUSE_S: Final = 0.05  # before another attempt
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz "

Sizes = tuple[tuple[int, int], tuple[int, int]]  # of prompts and outputs: fewest and most tokens
Ask = Callable[[str, int], str]


class Unheard(Exception):
    """No byte of an answer came."""


class Tally:
    """What became of the requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"offered": 0, "answered": 0, "failed": 0, "wrong": 0, "tried_again": 0}
        self._slowest_s = 0.0
        self._problems: list[str] = []

    def count(self, what: str, problem: str = "") -> None:
        with self._lock:
            self._counts[what] += 1
            self._problems += [f"{what}: {problem}"] if problem else []

    def took(self, seconds: float) -> None:
        with self._lock:
            self._slowest_s = max(self._slowest_s, seconds)

    def line(self) -> str:
        with self._lock:
            line = {**self._counts, "slowest_s": round(self._slowest_s, 2), "problems": self._problems}
            self._slowest_s, self._problems = 0.0, []
        return json.dumps(line)


def run_client(ask: Ask, known: KnownAnswers, tally: Tally, rng: random.Random, sizes: Sizes) -> None:
    while True:
        max_tokens = rng.randint(*sizes[1])
        prompt = draw(known, rng, sizes)
        tally.count("offered")
        began_s = time.monotonic()
        try:
            text, right = see_through(ask, prompt, max_tokens, tally), known.completion(prompt, max_tokens)
        except Exception as error:
            tally.count("failed", f"{ask.__class__.__name__}: {type(error).__name__}: {error}")
        else:
            tally.count(*(("answered",) if text == right else ("wrong", f"{text!r}, not {right!r}")))
        tally.took(time.monotonic() - began_s)


def draw(known: KnownAnswers, rng: random.Random, sizes: Sizes) -> str:
    """Return a prompt whose answer does not end by itself before it has the fewest tokens."""
    while True:
        prompt = "".join(rng.choices(LETTERS, k=rng.randint(*sizes[0])))
        if known.num_tokens(prompt, sizes[1][0]) == sizes[1][0]:
            return prompt


def see_through(ask: Ask, prompt: str, max_tokens: int, tally: Tally) -> str:
    while True:
        try:
            return ask(prompt, max_tokens)
        except Unheard as error:
            tally.count("tried_again", f"{ask.__class__.__name__}: {error}")
            time.sleep(PAUSE_S)


class Http:
    """A completion as a whole, on a connection of its own."""

    model = ""  # the only one

    def __init__(self, host: str, port: int, headers: dict[str, str], hung_s: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=hung_s)
        self._headers = {"content-type": "application/json", **headers}

    def __call__(self, prompt: str, max_tokens: int) -> str:
        try:
            return str(json.load(self._post(prompt, max_tokens, stream=False))["choices"][0]["text"])
        finally:
            self._connection.close()

    def _post(self, prompt: str, max_tokens: int, stream: bool) -> http.client.HTTPResponse:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            response = self._connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected) as error:
            self._connection.close()
            raise Unheard(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read().decode()}")
        return response


class KeptHttp(Http):
    """A stream, on a connection that stays open for the next one."""

    def __call__(self, prompt: str, max_tokens: int) -> str:
        try:
            return "".join(self._pieces(self._post(prompt, max_tokens, stream=True)))
        except Unheard:
            raise
        except Exception:
            self._connection.close()
            raise

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[str]:
        is_complete = False
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                is_complete = True
            elif data:
                said: dict[str, Any] = json.loads(data)
                if "error" in said:
                    raise RuntimeError(str(said["error"]))
                yield from (choice["text"] for choice in said["choices"])
        if not is_complete:
            raise RuntimeError("the stream ended early")


class Grpc:
    """A call; calls of a client share a channel."""

    def __init__(self, host: str, port: int, headers: dict[str, str], hung_s: float) -> None:
        self._hung_s = hung_s
        self._stub = InferenceStub(grpc.insecure_channel(f"{host}:{port}"))
        self._metadata = tuple(headers.items())

    def __call__(self, prompt: str, max_tokens: int) -> str:
        request = GenerateRequest(text=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0))
        call = self._stub.Generate(request, timeout=self._hung_s, metadata=self._metadata, wait_for_ready=True)
        return str(call.text)


def asked_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of each request: its key, and the pool that it names, if any."""
    pool = environment.get("POOL", "")
    return {
        "authorization": f"Bearer {environment.get('DIPTYCH_API_KEY', '')}",
        **({"x-diptych-pool": pool} if pool else {}),
    }


def main() -> None:
    host, (http_port, grpc_port, num_clients, hung_s, *numbers) = sys.argv[1], map(int, sys.argv[2:])
    sizes = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    headers, known, tally = asked_with(os.environ), KnownAnswers(), Tally()
    for index in range(num_clients):
        kind, port = ((Http, http_port), (KeptHttp, http_port), (Grpc, grpc_port))[index % 3]
        client = (kind(host, port, headers, hung_s), known, tally, random.Random(index), sizes)
        threading.Thread(target=run_client, args=client, daemon=True).start()
    while True:
        time.sleep(1)
        print(tally.line(), flush=True)


if __name__ == "__main__":
    main()
