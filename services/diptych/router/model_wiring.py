"""Builds what serves each model of a router: what all models share, and what each has of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.common.trust.trust import Trust
from diptych.grammars.checks import GrammarChecks
from diptych.router.admission.admission import Admission
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.in_flight import InFlight
from diptych.router.admission.queue import AdmissionLimits
from diptych.router.admission.session_desk import ModelDesk
from diptych.router.admission.shedder import Shedder
from diptych.router.admission.ttft_gate import TtftGate
from diptych.router.choose.breakers import Breakers
from diptych.router.choose.explain import Explanations
from diptych.router.choose.policies import plan_of
from diptych.router.choose.seen_prompts import SeenPrompts
from diptych.router.config import RouterConfig
from diptych.router.metrics import GrammarUsage, RouterMetrics
from diptych.router.serve.aborts import Aborts
from diptych.router.serve.execution import Dispatcher
from diptych.router.serve.hedging import Hedging
from diptych.router.serve.mover import Mover
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.prepare import Preparer
from diptych.router.serve.request_log import RequestLog
from diptych.router.serve.selection import Selector
from diptych.router.serve.usage_log import UsageLog
from diptych.router.text.fair_threads import FairThreadPool
from diptych.router.text.tokenization import Tokenization
from diptych.router.values.progress import RetryLimits
from diptych.router.values.request import ServedModel
from diptych.router.workers.adapter_admin import AdapterAdmin
from diptych.router.workers.fleet import Fleet

if TYPE_CHECKING:
    from diptych.router.images.reader import ImageReader


MAX_READING: Final = 64  # requests whose images are read at once


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all models behind a router have in common."""

    metrics: RouterMetrics
    admission: Admission
    breakers: Breakers
    explanations: Explanations
    rng: random.Random
    grammars: GrammarChecks
    pixels: BodyBudget
    aborts: Aborts
    request_log: RequestLog | None  # None: there is none
    usage: UsageLog | None  # likewise


@dataclass(frozen=True, slots=True)
class ServedParts:
    """What each model has of its own, behind the same ports: its requests go to its workers."""

    model: ServedModel
    fleet: Fleet
    preparer: Preparer
    dispatcher: Dispatcher
    in_flight: InFlight
    pipeline: Pipeline
    mover: Mover | None  # None: it is off
    adapters: AdapterAdmin


def reserved_names(given: Sequence[str], models: Sequence[ServedModel]) -> Sequence[str]:
    """Return the names that no adapter may have; with several models it would stand before another model."""
    others = [name for model in models for name in (model.model_id, *model.names)] if len(models) > 1 else []
    return [*given, *others]


def shared_parts(config: RouterConfig, metrics: RouterMetrics) -> SharedParts:
    limits = AdmissionLimits(config.max_concurrent, config.max_queued, config.max_queue_wait_s)
    breakers, grammars = Breakers(config.breaker_failures), GrammarChecks()
    metrics.watch_breakers(lambda: len(breakers.opened(time.monotonic())))
    metrics.registry.register(GrammarUsage(grammars))
    return SharedParts(
        metrics,
        Admission(limits, on_refusal=metrics.turned_away_for),
        breakers,
        Explanations(config.explained_requests),
        random.Random(),
        grammars,
        BodyBudget(config.image_memory_bytes, "images and rows"),
        Aborts(),
        RequestLog(config.request_log) if config.request_log else None,
        _usage_log(config, metrics),
    )


def _usage_log(config: RouterConfig, metrics: RouterMetrics) -> UsageLog | None:
    if config.usage_log is None:
        return None
    usage = UsageLog(config.usage_log)
    metrics.registry.register(usage)
    return usage


def served_parts(
    config: RouterConfig,
    trust: Trust,
    model: ServedModel,
    fleet: Fleet,
    desk: ModelDesk,
    shared: SharedParts,
    reserved: Sequence[str],
) -> ServedParts:
    preparer = _preparer(config, model, fleet, shared)
    dispatcher = _dispatcher(config, fleet, shared)
    in_flight = InFlight()
    pipeline = _pipeline(config, model, preparer, dispatcher, in_flight, desk, shared)
    mover = Mover(dispatcher) if config.moves == "on" else None
    admin = AdapterAdmin(fleet, trust, reserved)
    return ServedParts(model, fleet, preparer, dispatcher, in_flight, pipeline, mover, admin)


def _dispatcher(config: RouterConfig, fleet: Fleet, shared: SharedParts) -> Dispatcher:
    plan = plan_of(config.policy, config.prefill_policy, config.decode_policy)
    seen = SeenPrompts(keeps_tokens=config.console_text)
    selector = Selector(fleet, plan, shared.breakers, shared.rng, seen)
    hedging = Hedging(config.hedge_after_s)
    return Dispatcher(fleet, selector, shared.metrics, shared.explanations, hedging, shared.rng, shared.request_log)


def _preparer(config: RouterConfig, model: ServedModel, fleet: Fleet, shared: SharedParts) -> Preparer:
    images = _images(config, model)
    tokenization = Tokenization(
        model,
        at=config.tokenize_at,
        num_threads=config.tokenizer_threads,
        cache_bytes=config.tokenizer_cache_bytes,
        images=images,
    )
    return Preparer(
        model,
        fleet,
        tokenization,
        shared.grammars,
        timeout_s=config.request_timeout_s,
        max_choices=config.max_choices,
        tiers=config.tiers,
        images=images,
        pixels=shared.pixels,
    )


def _images(config: RouterConfig, model: ServedModel) -> ImageReader | None:
    if model.vision is None:
        return None
    from diptych.router.images.fetch import ImageFetcher
    from diptych.router.images.reader import ImageReader

    fetcher = ImageFetcher(config.image_urls, max_bytes=config.max_image_bytes, timeout_s=config.image_fetch_s)
    threads = FairThreadPool(config.image_threads, "images")
    max_reading = max(1, min(MAX_READING, config.max_concurrent // 4))  # places are left for requests without images
    most = config.max_image_scaled_pixels
    vision = model.vision.at_most(most) if most else model.vision
    return ImageReader(vision, config.image_limits, fetcher, threads, max_reading)


def _pipeline(
    config: RouterConfig,
    model: ServedModel,
    preparer: Preparer,
    dispatcher: Dispatcher,
    in_flight: InFlight,
    desk: ModelDesk,
    shared: SharedParts,
) -> Pipeline:
    selector, metrics = dispatcher.selector, dispatcher.metrics
    gate = TtftGate(selector, config.ttft_deadline_ms / 1000, metrics.turned_away_for)
    shedder = Shedder(config.tiers, selector.outlook, in_flight, dispatcher.rng)
    retries = RetryLimits(config.pair_wait_s, config.lost_pair_wait_s, cold_wait_s=config.cold_wait_s)
    usage, aborts = shared.usage, shared.aborts
    return Pipeline(
        model, preparer, dispatcher, shared.admission, gate, shedder, in_flight, retries, desk, usage, aborts
    )
