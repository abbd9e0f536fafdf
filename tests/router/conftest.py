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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import tokenizers
import uvicorn
from simulated_worker import Fault, Output, SimulatedWorker
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from diptych.architectures.pooling import Pooling
from diptych.architectures.vision import VisionInput
from diptych.common.event_loop import Stop
from diptych.common.members.roles import WORKER_ROLES, LegKind
from diptych.common.members.terms import Feature, bits
from diptych.common.trust.trust import INSECURE, Trust
from diptych.router.config import RouterConfig
from diptych.router.main import formats_of, run
from diptych.router.text.parsing.message_formats import AUTO
from diptych.router.tracing.tracer import OpenExport
from diptych.router.values.request import ServedModel
from diptych.router.wiring import build
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import bootstrap_pb2, inference_pb2, worker_pb2

T = TypeVar("T")

MODEL_ID = "tiny"
EOS = 256
CONTEXT_LEN = 2048
TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
DRAIN_S = 0.2  # at the end of tests that ask for no other
DEFAULTS: Mapping[str, Any] = {  # of the router's options
    "http_port": 0,
    "grpc_port": 0,
    "drain_s": 180.0,  # a third of it is the life of a connection: no call of a test meets its end
    "pair_wait_s": 0.2,  # where there is none, the answer comes soon
    "lost_pair_wait_s": TIMEOUT_S,  # where a worker comes back, it has the time
    "policy": "least_load",
    "open_metrics": True,  # these routers have no health port
}
COMPLETION: Mapping[str, Any] = {"prompt": "p", "max_tokens": CONTEXT_LEN}  # until the script ends
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
VISION_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{% if part.type == 'image' %}[<|image_pad|>]{% else %}{{ part.text }}{% endif %}{% endfor %}\
{% endif %}
{% endfor %}"""
PREFILL, DECODE, UNIFIED = bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE, bootstrap_pb2.ROLE_UNIFIED
NO_OTHERS: Mapping[str, Pooling | None] = {}  # models behind the router
READY = bootstrap_pb2.INSTANCE_STATE_READY


def make_tokenizer(special_tokens: Sequence[str] = (), template: str = TEMPLATE) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", *special_tokens)])
    return Tokenizer(backend, eos_ids=[EOS], chat_template=template)


class Cluster:
    """A router and its workers, on a thread of their own."""

    def __init__(
        self,
        roles: Sequence[bootstrap_pb2.Role],
        options: Mapping[str, Any],
        special_tokens: Sequence[str] = (),
        open_export: OpenExport | None = None,
        trust: Trust = INSECURE,
        pooling: Pooling | None = None,
        vision: VisionInput | None = None,
        further: Mapping[str, Pooling | None] = NO_OTHERS,
    ) -> None:
        self._further = further  # models behind the same router, each with a pair of workers, or one for vectors
        self._vision = vision  # how the model wants images; None: it takes none
        self._pooling = pooling  # of the model, whose vectors have three numbers; None: it makes text
        self._trust = trust  # the router's; simulated workers let everybody in
        self.tokenizer = make_tokenizer(special_tokens, VISION_TEMPLATE if vision else TEMPLATE)
        self.script: str | None = "Hello!"
        self._letters = self.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
        self._members: dict[int, bootstrap_pb2.Instance] = {}
        self.ended: set[int] = set()  # of those that are no members any more, who said so
        self._listeners: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._drain_s = options.get("drain_s", DRAIN_S)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        config = RouterConfig(**{**DEFAULTS, **options})
        try:
            self.workers = self.call(self._start_workers(roles))
            self.call(self._start_router(config, open_export))
        except BaseException:
            self._end_thread()
            raise

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
        return [worker for worker in self.workers if worker.instance.role == PREFILL][index]

    def decode(self, index: int = 0) -> SimulatedWorker:
        return [worker for worker in self.workers if worker.instance.role == DECODE][index]

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Return the status and the parsed answer. `body` is JSON, or bytes to send as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self._fetch(urllib.request.Request(self.url + path, data, dict(headers or {})))
        return status, json.loads(answer)

    def get(self, path: str) -> tuple[int, str]:
        return self._fetch(urllib.request.Request(self.url + path))

    def _fetch(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def complete(self, prompt: str = "p", **fields: Any) -> Any:
        """Return the first choice of a completion that must succeed."""
        status, answer = self.post("/v1/completions", {**COMPLETION, "prompt": prompt, **fields})
        assert status == 200, answer
        return answer["choices"][0]

    def connect(self, *, headers: Mapping[str, str] | None = None, **fields: Any) -> http.client.HTTPConnection:
        """Send a completion request; the caller reads the answer, or leaves."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps({**COMPLETION, **fields}), dict(headers or {}))
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

    def add_worker(self, instance_id: int, role: bootstrap_pb2.Role) -> SimulatedWorker:
        self.workers.append(self.call(self._start_worker(instance_id, role)))
        return self.workers[-1]

    def stop_worker(self, worker: SimulatedWorker) -> None:
        self.call(worker.stop())

    def restart_worker(self, worker: SimulatedWorker) -> None:
        self.call(worker.start(int(worker.instance.address.rsplit(":", 1)[1])))

    def report_load(self, worker: SimulatedWorker, load: bootstrap_pb2.WorkerLoad) -> None:
        """Have a worker say this over its sessions."""
        self._loop.call_soon_threadsafe(worker.send, worker_pb2.WorkerBatch(load=load))

    def report_kv(self, worker: SimulatedWorker, events: worker_pb2.KvEvents) -> None:
        """Have a worker tell of its cached pages over its sessions."""
        self._loop.call_soon_threadsafe(worker.send, worker_pb2.WorkerBatch(kv_events=events))

    def release(self, worker: SimulatedWorker) -> None:
        self._loop.call_soon_threadsafe(worker.released.set)

    def names_of_tasks(self) -> list[str]:
        """Name what runs on the loop: the coroutines of its tasks."""

        async def names() -> list[str]:
            return [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]

        return self.call(names())

    def stop_router(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        self.call(self._close())
        self._end_thread()

    def _end_thread(self) -> None:
        self.call(_cancel_other_tasks())  # a task that outlives its loop keeps gRPC from shutting down at exit
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # on the loop's thread

    def instances(self) -> Mapping[int, bootstrap_pb2.Instance]:
        return self._members

    def has_ended(self, instance_id: int) -> bool:
        return instance_id in self.ended

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def recite(self, leg: worker_pb2.StartLeg) -> Output:
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

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def _start_workers(self, roles: Sequence[bootstrap_pb2.Role]) -> list[SimulatedWorker]:
        workers = [await self._start_worker(100 + number, role) for number, role in enumerate(roles)]
        for number, (model_id, pooling) in enumerate(self._further.items()):
            for place, role in enumerate((PREFILL, DECODE) if pooling is None else (PREFILL,)):
                workers.append(await self._start_worker(200 + 10 * number + place, role, model_id))
        await self._publish(workers)
        return workers

    async def _start_worker(
        self, instance_id: int, role: bootstrap_pb2.Role, model_id: str = MODEL_ID
    ) -> SimulatedWorker:
        instance = bootstrap_pb2.Instance(
            instance_id=instance_id, role=role, model_id=model_id, compat="c", state=READY, context_len=CONTEXT_LEN
        )
        instance.transfer.layout.page_size = 16
        instance.terms.features = bits(Feature.MOVE)
        instance.load.free_pages = instance.load.grantable_pages = 10_000
        worker = SimulatedWorker(
            instance, self.recite, self._notify, self._republish, self._encode, self._wait_for_first_token
        )
        await worker.start()
        return worker

    async def _wait_for_first_token(self, leg: worker_pb2.StartLeg) -> None:
        """Return once the router has it from prefill: a decode worker can't speak before the pages came that make it.

        Only so is it certain what the router knows when a decode leg fails.
        """
        session = self.router.fleet.session(leg.peer_instance_id)
        while session and (prefill := session._legs._legs.get(leg.room)) and prefill.first_s is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # nobody tells

    async def _publish(self, workers: Sequence[SimulatedWorker], *, linked: bool = True) -> None:
        self._members = {}
        for worker in workers:
            peers = [other.instance for other in workers if linked and _may_link(worker.instance, other.instance)]
            worker.instance.load.linked_instances[:] = [peer.instance_id for peer in peers]
            self._members[worker.instance.instance_id] = copy = bootstrap_pb2.Instance()
            copy.CopyFrom(worker.instance)
        for listener in self._listeners:
            listener()

    def _republish(self) -> None:
        """A worker has changed its record, and so who links to whom: each worker tells that itself, too."""
        self._republishing = asyncio.ensure_future(self._report_links())

    async def _report_links(self) -> None:
        await self._publish(self.workers)
        for worker in self.workers:
            worker.send(worker_pb2.WorkerBatch(load=worker.instance.load))

    async def _start_router(self, config: RouterConfig, open_export: OpenExport | None) -> None:
        names = config.served_model_name
        model = ServedModel(MODEL_ID, self.tokenizer, self.tokenizer.vocab_size, CONTEXT_LEN, names=names)
        model = replace(model, pooling=self._pooling, vector_size=3, vision=self._vision, hidden_size=1024)
        model = replace(model, formats=formats_of(model, config.tool_parser, config.reasoning_parser))
        further = [self._further_model(model_id, pooling) for model_id, pooling in self._further.items()]
        self._stop = Stop()
        self.router = build(config, self._trust, [model, *further], self, 7, open_export=open_export)
        self.router.dispatcher.selector.number = 0  # the first in order has the first turn
        self.url = f"http://127.0.0.1:{self.router.http.port}"
        self.grpc_target = f"127.0.0.1:{self.router.grpc.port}"
        self._running = asyncio.ensure_future(run(self.router, self._stop, drain_s=self._drain_s))
        own = [worker.instance for worker in self.workers if worker.instance.model_id == MODEL_ID]
        roles = [WORKER_ROLES[instance.role] for instance in own]
        num_pairs = sum(one.sends_to(other) for one in roles for other in roles)  # with itself: alone
        if self._pooling is not None:
            num_pairs = sum(role.serves(LegKind.POOL) for role in roles)
        async with asyncio.timeout(TIMEOUT_S):
            others = [served.fleet for served in self.router.serving.served[1:]]
            while not (
                len(self.router.fleet.pairs()) >= num_pairs
                and sum(session.is_open for session in self.router.fleet.sessions()) >= len(own)  # without a pair, too
                and all(fleet.pairs() for fleet in others)
            ):
                await self.router.fleet.wait_for_change()

    def _further_model(self, model_id: str, pooling: Pooling | None) -> ServedModel:
        model = ServedModel(model_id, self.tokenizer, self.tokenizer.vocab_size, CONTEXT_LEN)
        return replace(model, pooling=pooling, vector_size=3, formats=formats_of(model, AUTO, AUTO))

    async def _close(self) -> None:
        self._stop.set()
        await self._running
        for worker in self.workers:
            await worker.stop()


class _Often:
    """asyncio as uvicorn sees it here: its ticks of 0.1 s, two or three of which an end of it takes, are short."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(seconds / 20)


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Hundreds of clusters end in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _Often())
        yield


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_tokenizer()


@contextmanager
def cluster_factory() -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def start(
        prefill: int = 1,
        decode: int = 1,
        unified: int = 0,
        special_tokens: Sequence[str] = (),
        open_export: OpenExport | None = None,
        trust: Trust = INSECURE,
        pooling: Pooling | None = None,
        vision: VisionInput | None = None,
        further: Mapping[str, Pooling | None] = NO_OTHERS,
        **options: Any,
    ) -> Cluster:
        roles = [PREFILL] * prefill + [DECODE] * decode + [UNIFIED] * unified
        clusters.append(Cluster(roles, options, special_tokens, open_export, trust, pooling, vision, further))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., Cluster]]:
    """Start a cluster: `start_cluster(prefill=1, decode=1, unified=0, special_tokens=(), **router_options)`."""
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
def fail() -> Callable[[int, worker_pb2.ErrorCode], Fault]:
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


def _may_link(one: bootstrap_pb2.Instance, other: bootstrap_pb2.Instance) -> bool:
    return one is not other and WORKER_ROLES[one.role].exchanges_with(WORKER_ROLES[other.role])


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
