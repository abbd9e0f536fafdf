"""Watches the steps of workers, each in a thread, and sends requests through a router meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import grpc

from diptych.cli.plans.step_load import Round, StepRequest
from diptych.common.errors import DiptychError
from diptych.common.members.instances import name_of
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.engine.schedule.step_codec import shapes_and_seconds
from diptych.engine.values.step_model import StepShape
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import WatchWorkerRequest
from diptych.v1.worker_pb2_grpc import WorkerStub

NEWS_S: Final = 5.0  # in which a worker that is watched tells something
TOKENS: Final = range(32, 224)  # every vocabulary has these, and none of them ends an output here


class WatchFailed(DiptychError):
    """A worker does not tell of its steps."""


class StepWatch:
    """The steps of one worker, from the entry on; the first thing it tells is there by then."""

    def __init__(self, worker: Instance, trust: Trust) -> None:
        self._worker = worker
        self._channel = open_sync_channel(worker.address, trust)
        self._call = WorkerStub(self._channel).Watch(WatchWorkerRequest(instance_id=worker.instance_id))
        self._told = threading.Condition()
        self._steps: list[tuple[StepShape, float]] = []
        self._num_news = 0
        self._num_dropped = 0
        self._problem = ""
        self._thread = threading.Thread(target=self._read, name="step watch", daemon=True)

    def __enter__(self) -> StepWatch:
        self._thread.start()
        self._wait_for_news(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def steps(self) -> list[tuple[StepShape, float]]:
        """Return all steps that have ended. Raises `WatchFailed`."""
        self._wait_for_news(2)  # the first of them may have been made before a step ended
        with self._told:
            return list(self._steps)

    @property
    def num_dropped(self) -> int:
        """Steps that the worker had no room to tell."""
        return self._num_dropped

    def _wait_for_news(self, count: int) -> None:
        with self._told:
            wanted = self._num_news + count
            is_told = self._told.wait_for(lambda: self._num_news >= wanted or bool(self._problem), NEWS_S)
            if self._problem or not is_told:
                words = self._problem or f"it has told nothing for {NEWS_S:g} s"
                raise WatchFailed(f"{name_of(self._worker)}: {words}")

    def _read(self) -> None:
        try:
            for news in self._call:
                with self._told:
                    self._steps.extend(shapes_and_seconds(news.steps))
                    self._num_dropped += news.steps.dropped
                    self._num_news += 1
                    self._told.notify_all()
        except grpc.RpcError as error:
            with self._told:
                self._problem = error.details() or error.code().name
                self._told.notify_all()


class RequestRefused(DiptychError):
    """The router does not complete a prompt."""


class LoadDriver:
    """Sends requests of random tokens to the HTTP API of a router."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = f"{url}/v1/completions"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._random = random.SystemRandom()  # no prompt begins as one of an earlier run

    def drive(self, rounds: Iterable[Round]) -> int:
        """Run the rounds, one after the other; return how many requests they had. Raises `RequestRefused`."""
        return sum(self._run(each) for each in rounds)

    def _run(self, wanted: Round) -> int:
        with ThreadPoolExecutor(wanted.num_clients) as clients:
            list(clients.map(self._complete, wanted.asks))
        return len(wanted.asks)

    def _complete(self, ask: StepRequest) -> None:
        body = {"model": "", "prompt": self._prompt(ask.prompt_len), "max_tokens": ask.output_len}
        data = json.dumps({**body, "temperature": 0, "ignore_eos": True}).encode()
        request = urllib.request.Request(self._url, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise RequestRefused(f"{self._url} answers {error.code}: {error.read().decode()}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestRefused(f"{self._url}: {getattr(error, 'reason', error)}") from None

    def _prompt(self, num_tokens: int) -> Sequence[int]:
        return self._random.choices(TOKENS, k=num_tokens)
