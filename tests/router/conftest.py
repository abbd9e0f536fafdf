"""A real router, HTTP and gRPC, in front of simulated workers that speak the real protocol and fail on command.

The tokenizer has one token a byte, so every character beyond ASCII spans several tokens. The "model" recites
`Cluster.script`, then ends; without a script it draws tokens from seed and position, as the real sampler does.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from diptych.common.rpc import SERVER_OPTIONS, listen
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.router.config import RouterConfig
from diptych.router.main import build, run
from diptych.router.prepare import ServedModel
from diptych.v1 import bootstrap_pb2, inference_pb2, worker_pb2, worker_pb2_grpc

T = TypeVar("T")

MODEL_ID = "tiny"
EOS = 256
CONTEXT_LEN = 2048
TIMEOUT_S = 10.0
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
PREFILL, DECODE = bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE
READY = bootstrap_pb2.INSTANCE_STATE_READY


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, eos_ids=[EOS], chat_template=ChatTemplate(TEMPLATE, {}))


@dataclass(frozen=True)
class Fault:
    """What a worker does to a leg after `after` tokens of its output: `error`, `break`, or `hang` until released."""

    kind: str
    after: int = 0
    code: int = worker_pb2.ERROR_CODE_INTERNAL
    message: str = "told to fail"


Batches = asyncio.Queue[worker_pb2.WorkerBatch | None]  # None: the session breaks


class SimulatedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker: a gRPC server and what tests may read and set, from any thread."""

    def __init__(self, cluster: Cluster, instance_id: int, role: int) -> None:
        self.cluster = cluster
        self.role = role
        self.instance = bootstrap_pb2.Instance(
            instance_id=instance_id, role=role, model_id=MODEL_ID, compat="c", state=READY, context_len=CONTEXT_LEN
        )
        self.instance.transfer.layout.page_size = 16
        self.instance.load.free_pages = 10_000
        self.faults: list[Fault] = []  # each is used by one leg
        self.started: list[worker_pb2.StartLeg] = []
        self.aborted: list[int] = []
        self.batches: list[tuple[int, int]] = []  # (starts, aborts) of each message
        self.sessions: list[Batches] = []
        self.open: dict[int, asyncio.Task[None]] = {}
        self.released = asyncio.Event()
        self.answers_status_as = instance_id

    async def serve(self, port: int = 0) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        port = listen(self.server, "127.0.0.1", port)
        self.instance.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def GetStatus(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(instance=bootstrap_pb2.Instance(instance_id=self.answers_status_as))

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerBatch]:
        ready: Batches = asyncio.Queue()
        self.sessions.append(ready)
        reader = asyncio.ensure_future(self._read(request_iterator, ready))
        try:
            while (batch := await ready.get()) is not None:
                yield batch
        finally:
            self.sessions.remove(ready)
            for task in (reader, *self.open.values()):
                task.cancel()
            self.open.clear()

    def say(self, batch: worker_pb2.WorkerBatch) -> None:
        for session in self.sessions:
            session.put_nowait(batch)

    async def _read(self, batches: Any, ready: Batches) -> None:
        async for batch in batches:
            self.batches.append((len(batch.start), len(batch.abort)))
            for leg in batch.start:
                fault = self.faults.pop(0) if self.faults else None
                self.open[leg.room] = asyncio.ensure_future(self._leg(leg, fault, ready))
                self.started.append(leg)
            for room in batch.abort:
                self.aborted.append(room)
                if room in self.open:
                    self.open.pop(room).cancel()
                    ready.put_nowait(batch_of(failure(room, Fault("error", code=worker_pb2.ERROR_CODE_ABORTED))))
            self.cluster.notify()

    async def _leg(self, leg: worker_pb2.StartLeg, fault: Fault | None, ready: Batches) -> None:
        for count, output in enumerate(self._outputs(leg)):
            if fault and fault.after == count:
                if fault.kind == "hang":
                    await self.released.wait()
                else:
                    ready.put_nowait(batch_of(failure(leg.room, fault)) if fault.kind == "error" else None)
                    break
            ready.put_nowait(batch_of(output))
            await asyncio.sleep(self.cluster.step_s)
        self.open.pop(leg.room, None)
        self.cluster.notify()

    def _outputs(self, leg: worker_pb2.StartLeg) -> Iterator[worker_pb2.LegOutput]:
        tokens, finish = self.cluster.recite(leg)
        stats = worker_pb2.LegStats(cached_tokens=3, pages_moved=2, bytes_moved=512, kv_digest=9, queue_us=5)
        if self.role == PREFILL:
            yield worker_pb2.LegOutput(room=leg.room, token_ids=tokens[:1], stats=stats)
            yield worker_pb2.LegOutput(room=leg.room, first_index=1, finish_reason=finish, stats=stats)
            return
        for index, token_id in enumerate(tokens[1:-1], start=1):
            yield worker_pb2.LegOutput(room=leg.room, first_index=index, token_ids=[token_id])
        last = worker_pb2.LegOutput(room=leg.room, first_index=max(1, len(tokens) - 1), finish_reason=finish)
        last.stats.CopyFrom(stats)
        last.token_ids.extend(tokens[1:][-1:])
        yield last


def batch_of(output: worker_pb2.LegOutput) -> worker_pb2.WorkerBatch:
    return worker_pb2.WorkerBatch(outputs=[output])


def failure(room: int, fault: Fault) -> worker_pb2.LegOutput:
    error = worker_pb2.LegError(code=worker_pb2.ErrorCode.ValueType(fault.code), message=fault.message)
    return worker_pb2.LegOutput(room=room, error=error)


class Cluster:
    """A router and its workers, on a thread of their own."""

    def __init__(self, num_prefill: int, num_decode: int, options: Mapping[str, Any]) -> None:
        self.tokenizer = make_tokenizer()
        self.script: str | None = "Hello!"
        self._letters = self.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
        self.step_s = 0.0
        self._members: dict[int, bootstrap_pb2.Instance] = {}
        self._listeners: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        config = RouterConfig(**{"http_port": 0, "grpc_port": 0, "drain_s": 0.2, "pair_wait_s": 0.2, **options})
        roles = [PREFILL] * num_prefill + [DECODE] * num_decode
        self.workers = self.call(self._start_workers(roles))
        self.call(self._start_router(config))

    # from the test's thread

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition()`, looked at whenever a worker heard or did something."""
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), "it never happened"

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """The same for what no worker hears of."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    def prefill(self, index: int = 0) -> SimulatedWorker:
        return [worker for worker in self.workers if worker.role == PREFILL][index]

    def decode(self, index: int = 0) -> SimulatedWorker:
        return [worker for worker in self.workers if worker.role == DECODE][index]

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Return the status and the parsed answer. `body` is JSON, or bytes to send as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def complete(self, prompt: str = "p", **fields: Any) -> Any:
        """Return the first choice of a completion that must succeed."""
        status, answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, answer
        return answer["choices"][0]

    def connect(self, *, headers: Mapping[str, str] | None = None, **fields: Any) -> http.client.HTTPConnection:
        """Send a completion request; the caller reads the answer, or leaves."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "p", **fields}), dict(headers or {}))
        return connection

    @contextmanager
    def ask(self, **options: Any) -> Iterator[http.client.HTTPResponse]:
        """Send a completion request and yield the answer once it has begun."""
        connection = self.connect(**options)
        with connection.getresponse() as answer:
            yield answer
        connection.close()

    def accepts_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.router.http.port), TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def publish(self, *workers: SimulatedWorker, linked: bool = True) -> None:
        """Make these, as they are now, the membership."""
        self.call(self._publish(workers, linked=linked))

    def add_worker(self, instance_id: int, role: int) -> SimulatedWorker:
        self.workers.append(SimulatedWorker(self, instance_id, role))
        self.call(self.workers[-1].serve())
        return self.workers[-1]

    def stop_worker(self, worker: SimulatedWorker) -> None:
        self.call(worker.server.stop(None))

    def restart_worker(self, worker: SimulatedWorker) -> None:
        self.call(worker.serve(int(worker.instance.address.rsplit(":", 1)[1])))

    def report_load(self, worker: SimulatedWorker, load: bootstrap_pb2.WorkerLoad) -> None:
        """Have a worker say this over its sessions."""
        self._loop.call_soon_threadsafe(worker.say, worker_pb2.WorkerBatch(load=load))

    def release(self, worker: SimulatedWorker) -> None:
        self._loop.call_soon_threadsafe(worker.released.set)

    def stop_router(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # on the loop's thread

    def instances(self) -> Mapping[int, bootstrap_pb2.Instance]:
        return self._members

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def recite(self, leg: worker_pb2.StartLeg) -> tuple[list[int], Any]:
        """The output of a leg: what is left of the script, or random tokens."""
        sampling, prior = leg.sampling, leg.num_prior_output_tokens
        if self.script is None:
            start = len(leg.prompt_token_ids)
            draws = [random.Random(f"{sampling.seed}/{start + i}") for i in range(sampling.max_tokens)]
            return [self._letters[draw.randrange(26)] for draw in draws], inference_pb2.FINISH_REASON_LENGTH
        tokens = [*self.tokenizer.encode(self.script), EOS][prior:]
        if len(tokens) > sampling.max_tokens:
            return tokens[: sampling.max_tokens], inference_pb2.FINISH_REASON_LENGTH
        return tokens, inference_pb2.FINISH_REASON_STOP

    async def _start_workers(self, roles: list[int]) -> list[SimulatedWorker]:
        workers = [SimulatedWorker(self, 100 + number, role) for number, role in enumerate(roles)]
        for worker in workers:
            await worker.serve()
        await self._publish(workers)
        return workers

    async def _publish(self, workers: Sequence[SimulatedWorker], *, linked: bool = True) -> None:
        for worker in workers:
            peers = [other.instance.instance_id for other in workers if linked and other.role != worker.role]
            worker.instance.load.linked_instances[:] = peers
        copies = {worker.instance.instance_id: bootstrap_pb2.Instance() for worker in workers}
        for worker in workers:
            copies[worker.instance.instance_id].CopyFrom(worker.instance)
        self._members = copies
        for listener in self._listeners:
            listener()

    async def _start_router(self, config: RouterConfig) -> None:
        model = ServedModel(MODEL_ID, self.tokenizer, 257, CONTEXT_LEN)
        self._stop = asyncio.Event()
        self.router = build(config, model, self)
        self.url = f"http://127.0.0.1:{self.router.http.port}"
        self.grpc_target = f"127.0.0.1:{self.router.grpc.port}"
        self._running = asyncio.ensure_future(run(self.router, self._stop, drain_s=config.drain_s))
        num_prefill = sum(worker.role == PREFILL for worker in self.workers)
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.router.fleet.pairs()) < num_prefill * (len(self.workers) - num_prefill):
                await self.router.fleet.wait_for_change()

    async def _close(self) -> None:
        self._stop.set()
        await self._running
        for worker in self.workers:
            await worker.server.stop(None)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_tokenizer()


@contextmanager
def cluster_factory() -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def start(prefill: int = 1, decode: int = 1, **options: Any) -> Cluster:
        clusters.append(Cluster(prefill, decode, options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., Cluster]]:
    """Start a cluster: `start_cluster(prefill=1, decode=1, **router_options)`."""
    with cluster_factory() as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_cluster() -> Iterator[Callable[..., Cluster]]:
    """The same, for all tests of a file."""
    with cluster_factory() as start:
        yield start


@pytest.fixture(scope="session")
def fault() -> Callable[..., Fault]:
    """`fault(kind, after, code)`."""
    return Fault


@pytest.fixture(scope="session")
def fail() -> Callable[[int, int], Fault]:
    """`fail(after, code)`: end a leg with an error."""
    return lambda after, code: Fault("error", after, code)


@pytest.fixture(scope="session")
def hang() -> Callable[[int], Fault]:
    """`hang(after)`: say nothing more until released."""
    return lambda after: Fault("hang", after)


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """One prefill and one decode worker."""
    return start_cluster()
