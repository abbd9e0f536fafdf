"""Builds the console of one process of a router out of its parts: what gathers, the hub over it, and its routes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from diptych.common.net.reachable import local_host
from diptych.common.trust.trust import Trust
from diptych.router.admission.admission import Admission
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.config import RouterConfig
from diptych.router.console.acts import Acts
from diptych.router.console.cache.cache_state import CacheView
from diptych.router.console.calls.calls import Calls
from diptych.router.console.console import Console, Looking, keep_sampling
from diptych.router.console.documents import AllRouters, ThisProcess
from diptych.router.console.feed import Feed, StepsFeed
from diptych.router.console.fleet.fleet_view import FleetView
from diptych.router.console.fleet.watches import Watches
from diptych.router.console.history import History
from diptych.router.console.hub import Hub
from diptych.router.console.one_time_code import OneTimeCode, code_file
from diptych.router.console.other_routers import OtherRouters
from diptych.router.http.console.act_routes import ActBodies, Origins, act_routes, sign_in_route
from diptych.router.http.console.app import console_app, with_console
from diptych.router.http.console.documents_routes import document_routes
from diptych.router.http.console.guard import Guard
from diptych.router.http.console.page_files import read_files
from diptych.router.http.console.relay import Elsewhere, FirstProcess, NobodyElse
from diptych.router.http.exchange.body import BodyLimits, BodyReader
from diptych.router.keys.caller import Callers
from diptych.router.process.share import Share
from diptych.router.serve.execution import Dispatcher
from diptych.router.tracing.tracer import Tracer
from diptych.router.values.request import ServedModel
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.fleet import Fleet
from diptych.v1.worker_pb2 import WorkerStatus

MAX_BODY_BYTES: Final = 64 << 10
BODY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """What the console needs of its router."""

    config: RouterConfig
    trust: Trust
    model: ServedModel
    fleets: Sequence[Fleet]  # of each model
    admission: Admission
    dispatcher: Dispatcher
    tracer: Tracer
    callers: Callers | None
    budget: BodyBudget
    adapters: AdapterAdmin  # of the first model
    share: Share | None

    @property
    def fleet(self) -> Fleet:
        """The first model's, which keeps the sessions of all."""
        return self.fleets[0]


def add_console(app: ASGIApp, parts: ConsoleParts) -> tuple[ASGIApp, Console]:
    """Return an application with the console in it, and what has to run for it."""
    watches = Watches(parts.fleet, parts.trust)
    history = History(parts.dispatcher.metrics.served, parts.admission, parts.fleet.pool_members)
    explanations = parts.dispatcher.explanations
    calls = Calls(parts.tracer, explanations, parts.fleet.router_id, time.monotonic, time.time)
    here = ThisProcess(calls, history, _cache_view(parts, history, watches))
    routers = AllRouters(here, OtherRouters(parts.fleet, parts.trust))
    fleet = FleetView(parts.fleets, watches, parts.dispatcher.selector.breakers)
    feeds = {
        "fleet": Feed("fleet", fleet.state),
        "requests": Feed("requests", routers.requests_now),
        "cache": Feed("cache", routers.cache_now),
        "charts": Feed("charts", routers.charts_now),
    }
    hub = Hub(feeds, StepsFeed(watches), Looking(watches, routers, parts.fleet))
    elsewhere = _elsewhere(parts.config.host, parts.share)
    guard = Guard(parts.trust, parts.callers, parts.dispatcher.metrics.refusals)
    shown = document_routes(
        guard,
        hub,
        fleet.state,
        watches,
        {"here": here, "all": routers},
        elsewhere,
        text_allowed=parts.config.console_text,
    )
    page = console_app(read_files(), [*shown, *_acts(parts, guard)])

    def close() -> None:
        hub.close()
        elsewhere.close()

    return with_console(app, page), Console(calls, close, hub.run, watches.run, partial(keep_sampling, history))


def _elsewhere(host: str, share: Share | None) -> Elsewhere:
    if share is None or share.index == 0:
        return NobodyElse()
    return FirstProcess((local_host(host), share.ports[0]))


def _cache_view(parts: ConsoleParts, history: History, watches: Watches) -> CacheView:
    fleet = parts.fleet

    def statuses() -> Iterable[WorkerStatus]:
        told = (watches.status(session.instance_id) for session in fleet.sessions())
        return [status for status in told if status is not None]

    show_text = parts.model.tokenizer.decode if parts.config.console_text else None
    return CacheView(parts.dispatcher.selector.seen, history, fleet.prefixes, statuses, show_text)


def _acts(parts: ConsoleParts, guard: Guard) -> Sequence[BaseRoute]:
    config = parts.config
    limits = BodyLimits(MAX_BODY_BYTES, BODY_S, BODY_S)
    hosts = {config.host, config.advertised_host}
    bodies = ActBodies(BodyReader(limits, parts.budget), Origins(hosts, is_open=guard.is_open))
    acts = Acts(parts.fleet, parts.trust, parts.adapters)
    return [sign_in_route(OneTimeCode(code_file()), bodies), *act_routes(guard, acts, bodies)]
