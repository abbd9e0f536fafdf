"""The router process: `diptych router`. Builds everything, runs it, and stops it without dropping an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass

import uvloop

from diptych.common import lifecycle
from diptych.common.http_server import HttpServer
from diptych.common.logging import setup
from diptych.common.membership_client import MembershipWatcher
from diptych.engine.loader.load_format import LoadFormat
from diptych.engine.loader.source import open_model
from diptych.router.adapter_admin import AdapterAdmin
from diptych.router.admission import Admission
from diptych.router.config import RouterConfig
from diptych.router.execution import Dispatcher
from diptych.router.fleet import Fleet, Membership
from diptych.router.grpc.inference import InferenceService
from diptych.router.grpc.server import GrpcServer
from diptych.router.http.adapters import add_adapters
from diptych.router.http.app import create_app
from diptych.router.metrics import RouterMetrics
from diptych.router.pipeline import Pipeline
from diptych.router.policies import POLICIES
from diptych.router.prepare import Preparer, ServedModel
from diptych.router.progress import RetryLimits
from diptych.router.selection import Selector

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3  # after draining, for the last words to running requests


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that its life is about."""

    fleet: Fleet
    admission: Admission
    preparer: Preparer
    http: HttpServer
    grpc: GrpcServer


def main(config: RouterConfig) -> int:
    """Serve until SIGTERM; return the exit code."""
    lifecycle.die_with_supervisor()
    setup("router", config.log_format, config.log_level)
    model = open_served_model(config.model, config.load_format)
    grace_s = math.ceil(config.drain_s) + 2 * STOP_GRACE_S
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lifecycle.run_until_signal(lambda stop: _serve(config, model, stop), grace_s=grace_s))
    return 0


def open_served_model(name: str, load_format: LoadFormat = "auto") -> ServedModel:
    """Open the model for its tokenizer and limits; no weights are read."""
    source = open_model(name, load_format)
    config = source.config
    return ServedModel(config.model_id, source.tokenizer(), config.vocab_size, config.context_len)


async def _serve(config: RouterConfig, model: ServedModel, stop: asyncio.Event) -> None:
    watcher = MembershipWatcher(config.bootstrap)
    router = build(config, model, watcher)
    logger.info("serving %s: HTTP at port %d, gRPC at port %d", model.model_id, router.http.port, router.grpc.port)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watcher.run())
        await run(router, stop, drain_s=config.drain_s)
        watching.cancel()


def build(config: RouterConfig, model: ServedModel, membership: Membership) -> Router:
    """Wire a router. Its ports are bound, but nothing runs yet."""
    metrics = RouterMetrics()
    fleet = Fleet(membership, model.model_id, metrics)
    admission = Admission(config.max_concurrent)
    metrics.watch(fleet, lambda: admission.num_running)
    preparer = Preparer(
        model,
        fleet,
        num_threads=config.tokenizer_threads,
        timeout_s=config.request_timeout_s,
    )
    dispatcher = Dispatcher(fleet, Selector(fleet, POLICIES[config.policy]), metrics)
    retries = RetryLimits(config.pair_wait_s, config.lost_pair_wait_s)
    pipeline = Pipeline(model, preparer, dispatcher, admission, retries)
    return Router(fleet, admission, preparer, _http(config, pipeline, fleet), _grpc(config, pipeline))


def _http(config: RouterConfig, pipeline: Pipeline, fleet: Fleet) -> HttpServer:
    app = create_app(pipeline, max_body_bytes=config.max_body_bytes)
    if config.runtime_lora:
        add_adapters(app, AdapterAdmin(fleet), max_body_bytes=config.max_body_bytes)
    grace_s = math.ceil(config.drain_s) + STOP_GRACE_S
    return HttpServer(app, config.host, config.http_port, stop_grace_s=grace_s)


def _grpc(config: RouterConfig, pipeline: Pipeline) -> GrpcServer:
    service = InferenceService(pipeline)
    return GrpcServer(service, config.host, config.grpc_port, max_message_bytes=config.max_body_bytes)


async def run(router: Router, stop: asyncio.Event, *, drain_s: float) -> None:
    """Run both servers until `stop`. Then take nothing new, and let what runs finish for `drain_s`."""
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(router.fleet.run()), group.create_task(router.grpc.report_health(router.fleet))]
        serving = group.create_task(router.http.run())
        await router.grpc.start()
        await stop.wait()
        logger.info("stopping; %d requests are running", router.admission.num_running)
        router.http.stop()
        stopping = group.create_task(router.grpc.stop(drain_s + STOP_GRACE_S))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(router.admission.wait_until_idle(), drain_s)
        router.fleet.close("the router is stopping")
        await asyncio.wait((serving, stopping))
        for task in background:
            task.cancel()
    router.preparer.close()
