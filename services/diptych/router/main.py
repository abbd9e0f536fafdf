"""The router process: `diptych router`. Runs what `wiring` builds, and stops it without dropping an answer."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from diptych.checkpoints.source import bounded, open_described
from diptych.common import event_loop, lifecycle
from diptych.common.errors import ConfigError
from diptych.common.garbage import search_when_idle, spare_what_stays
from diptych.common.health.health import HealthServer
from diptych.common.logging import setup
from diptych.common.members.membership_client import Evicted, MembershipWatcher, Registration
from diptych.common.net import descriptors
from diptych.common.trust.instance_secret import InstanceSecret
from diptych.common.trust.token_files import inheritable
from diptych.common.trust.trust import Trust, forget_token
from diptych.common.version import own_version
from diptych.router.choose import page_chain, page_set
from diptych.router.config import RouterConfig
from diptych.router.keys import ledger
from diptych.router.keys.exchange import KeyExchange
from diptych.router.process.health import page_of_process
from diptych.router.process.share import Share, share_of_this_process
from diptych.router.text.parsing.message_formats import AUTO, MessageFormats
from diptych.router.tracing.tracer import OpenExport, export_of
from diptych.router.values.request import ServedModel
from diptych.router.wiring import STOP_GRACE_S, Router, build
from diptych.tokens.chat_template import read_template
from diptych.tokens.tokenizer import stay_in_the_callers_thread
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

if TYPE_CHECKING:
    from diptych.router.process.pod_check import PodCheck

logger = logging.getLogger(__name__)


def main(config: RouterConfig) -> int:
    """Serve until SIGTERM; return the exit code."""
    lifecycle.die_with_supervisor()
    stay_in_the_callers_thread()
    setup("router", config.log_format, config.log_level)
    descriptors.use_all_descriptors()
    trust = config.trust()
    open_export = export_of(os.environ)
    share = share_of_this_process()
    if config.workers > 1 and share is None:
        from diptych.router.process.processes import run_processes

        with inheritable(config, os.environ) as shared_config:
            return run_processes(shared_config)
    forget_token()
    page_chain.load()  # what can't be compiled is told now
    page_set.load()
    ledger.load()
    models = open_served_models(config)
    grace_s = math.ceil(config.drain_s) + 2 * STOP_GRACE_S
    spare_what_stays()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        serve = functools.partial(_serve, config, trust, models, share, open_export)
        return runner.run(event_loop.run_until_signal(serve, grace_s=grace_s))


def open_served_models(config: RouterConfig) -> list[ServedModel]:
    """Open `--model`, as the options change it, and the further ones as they are. Raises `ConfigError`."""
    models = [open_served_model(config)]
    for further in config.further_models:
        models.append(open_served_model(config.of_further(further)))
    names = Counter(name for model in models for name in {model.model_id, *model.names})
    if twice := [name for name, count in names.items() if count > 1]:
        words = "requests could not tell them apart; let --further-models name PATHs that end differently"
        raise ConfigError(f"two models are called {twice[0]!r}, and {words}")
    return models


def open_served_model(config: RouterConfig) -> ServedModel:
    """Open the model for its tokenizer and limits, as the options change them; no weights are read."""
    source = bounded(open_described(config.model, config.load_format), config.max_model_len)
    tokenizer, own = source.tokenizer(), source.config
    if config.chat_template:
        tokenizer = tokenizer.with_chat_template(read_template(config.chat_template))
    model = ServedModel(own.model_id, tokenizer, own.vocab_size, own.context_len, names=config.served_model_name)
    model = replace(model, vision=own.vision, hidden_size=own.hidden_size)
    if own.pooling is not None:
        return replace(model, pooling=own.pooling, vector_size=own.pooling.size(own.hidden_size))
    return replace(model, formats=formats_of(model, config.tool_parser, config.reasoning_parser))


def formats_of(model: ServedModel, tools: str, reasoning: str) -> MessageFormats:
    """Return the formats of these names, or those that the model's chat template gives away.

    A model whose template knows no tools writes calls as it is told to.
    """
    template = model.tokenizer.chat_template
    formats = MessageFormats.named(tools, reasoning, "" if template is None else template.source)
    is_told = tools == AUTO and template is not None and not template.reads("tools")
    return formats.told_in_words() if is_told else formats


async def _serve(
    config: RouterConfig,
    trust: Trust,
    models: Sequence[ServedModel],
    share: Share | None,
    open_export: OpenExport | None,
    stop: event_loop.Stop,
) -> int:
    watcher = MembershipWatcher(config.bootstrap, trust)
    check = _pod_check(config, watcher)

    def leave() -> None:
        record.state = bootstrap_pb2.INSTANCE_STATE_DRAINING
        registration.nudge()

    secret = InstanceSecret.new()
    router = build(config, trust, models, check or watcher, secret.instance_id, leave, share, open_export)
    serving = router.serving
    names = " and ".join(model.model_id for model in models)
    logger.info("serving %s: HTTP at port %d, gRPC at port %d", names, router.http.port, router.grpc.port)
    pages = page_of_process(asyncio.get_running_loop(), router.dispatcher.metrics.exposition)
    with HealthServer(
        config.host, config.health_port, serving.health.probes, pages, shared=share is not None
    ) as health:
        record = _record(config, models[0], router, health.port)

        def describe() -> Instance:
            record.not_ready = serving.health.problem
            if exchange is not None:
                record.load.key_uses.CopyFrom(exchange.told())
            record.declared_version, record.declared = router.reconciler.version
            return record

        registration = Registration(config.bootstrap, trust, describe, secret)
        serving.health.add_listener(registration.nudge)
        exchange = KeyExchange(serving.callers, watcher, registration.started_unix_ns) if serving.callers else None
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(each.run()) for each in (watcher, check, exchange) if each is not None]
            watching.append(group.create_task(search_when_idle(lambda: not serving.shared.admission.num_open)))
            registering = group.create_task(_stay_registered(registration, stop))
            await run(router, stop, drain_s=config.drain_s)
            exit_code = 1 if registering.done() else 0
            for task in (*watching, registering):
                task.cancel()
    return exit_code


def _pod_check(config: RouterConfig, watcher: MembershipWatcher) -> PodCheck | None:
    if not config.endpoint_slices:
        return None
    from diptych.common.members.kubernetes_api import in_cluster, worker_pods
    from diptych.router.process.pod_check import PodCheck

    api = in_cluster()
    return PodCheck(watcher, lambda: worker_pods(api, config.endpoint_slices))


def _record(config: RouterConfig, model: ServedModel, router: Router, health_port: int) -> bootstrap_pb2.Instance:
    """What members hear of this router. Workers are ready once one of the listed routers knows them, so that its state
    can't wait for a pair of them: whether there is one is said beside it, by `not_ready`.
    """
    return bootstrap_pb2.Instance(
        instance_id=router.fleet.router_id,
        role=bootstrap_pb2.ROLE_ROUTER,
        address=f"{config.advertised_host}:{router.http.own_port}",
        metrics_address=f"{config.advertised_host}:{health_port}",
        model_id=model.model_id,
        started_as=model.model_id,
        state=bootstrap_pb2.INSTANCE_STATE_READY,
        version=own_version(),
        pod=config.pod_name,
    )


async def _stay_registered(registration: Registration, stop: event_loop.Stop) -> None:
    """Return only when evicted: whoever restarts this router gives it a new name, and what runs may finish before."""
    try:
        await registration.run()
    except Evicted as error:
        logger.error("%s; it serves what it has, and ends", error)
        stop.set()


async def run(router: Router, stop: event_loop.Stop, *, drain_s: float) -> None:
    """Run both servers until `stop`. Then take nothing new, and let what runs finish for `drain_s`."""
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(work) for work in _background(router)]
        serving = group.create_task(router.http.run())
        await router.grpc.start()
        background.append(group.create_task(router.draining.run()))
        await stop.wait()
        end_s = time.monotonic() + max(drain_s, STOP_GRACE_S)
        router.http.stop()
        stopping = group.create_task(router.grpc.stop(drain_s + STOP_GRACE_S))
        await router.draining.leave_on(stop, drain_s)
        await _wait_until_ended((serving, stopping), stop, end_s - time.monotonic())
        router.fleet.close("the router is stopping")
        await asyncio.wait((serving, stopping))
        for task in background:
            task.cancel()
    await router.serving.close()


def _background(router: Router) -> Iterator[Coroutine[None, None, None]]:
    """Yield what runs beside the servers of a router."""
    serving = router.serving
    yield from (router.fleet.run(), serving.health.run(), router.reconciler.run())
    yield serving.follow_desk()
    if router.console is not None:
        yield router.console.run()
    if serving.batches is not None:
        yield serving.batches.runner.run()
    yield from (each.mover.run() for each in serving.served if each.mover is not None)


async def _wait_until_ended(servers: Collection[asyncio.Task[None]], stop: event_loop.Stop, timeout_s: float) -> None:
    """Being empty is not enough: a server takes connections for a moment yet, and a body may still be on its way."""
    ended, hurry = asyncio.ensure_future(asyncio.wait(servers)), asyncio.ensure_future(stop.hurry.wait())
    try:
        await asyncio.wait((ended, hurry), timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        hurry.cancel()
