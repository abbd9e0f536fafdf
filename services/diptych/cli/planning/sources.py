"""Asks a running platform: routers for what they counted and know of caches, Kubernetes for what starts. Blocks."""

from __future__ import annotations

import http.client
import logging
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from diptych.cli.requests.asking import ask_all, fetch
from diptych.common.errors import NotFound
from diptych.common.members.kubernetes_api import KubernetesApi, Object
from diptych.common.trust.trust import Trust
from diptych.planner.counters import Counts, Finished
from diptych.planner.pools.cluster import Cluster, pods_of, pools_of
from diptych.planner.values import Goal
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance

logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0  # that a router may take
BROKEN: Final = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError)  # of answers
REFUSED: Final = frozenset({"forbidden", "invalid", "not_found", "rate_limited", "unauthenticated"})  # by nature
SCALED_OBJECTS: Final = ("apis/keda.sh/v1alpha1", "scaledobjects")
AUTOSCALERS: Final = ("apis/autoscaling/v1", "horizontalpodautoscalers")
DEPLOYMENTS: Final = ("apis/apps/v1", "deployments")
_PREFIX: Final = "diptych_router_"
_SIZES: Final = "diptych_router_by_new_tokens_total"
_OBJECTIVE: Final = "diptych_router_objective_seconds"
_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def counted(listed: Iterable[Instance], goal: Goal) -> Mapping[str, Counts | None]:
    """Return what each router has counted, None where it does not say."""
    pages = {each.metrics_address: each for each in listed if each.role == ROLE_ROUTER and each.metrics_address}
    counts = ask_all(pages.values(), lambda router: _counted(router.metrics_address, goal))
    return dict(zip(pages, counts, strict=True))


def _counted(address: str, goal: Goal) -> Counts | None:
    try:
        with _DIRECTLY.open(f"http://{address}/metrics", timeout=ANSWER_S) as answer:
            return counts_of(answer.read().decode(), goal)
    except BROKEN as error:
        logger.warning("a router's metrics at %s can't be read: %r", address, error)
        return None


def counts_of(page: str, goal: Goal) -> Counts:
    """Return what a router's metrics say. Raises `ValueError` for what are no metrics of a router.

    Requests within the objectives are counted by the router's own: where they are not those of `goal`, nobody knows.
    """
    sums: dict[str, float] = {}
    sizes: dict[int, dict[str, float]] = {}
    objectives = set()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == _OBJECTIVE and sample.labels["tier"] == "default":
                objectives.add((sample.labels["of"], sample.value))
            if sample.name == _SIZES:
                sizes.setdefault(int(sample.labels["new"]), {})[sample.labels["of"]] = sample.value
            is_load = sample.labels.get("api") != "tokens" and sample.labels.get("outcome") not in REFUSED
            if sample.name.startswith(_PREFIX) and is_load:
                name = sample.name.removeprefix(_PREFIX)
                sums[name] = sums.get(name, 0.0) + sample.value
    if "requests_running" not in sums:
        raise ValueError("it has no diptych_router_requests_running")
    is_same = objectives == {("ttft", goal.ttft_s), ("tpot", goal.tpot_s)}
    within = sums.get("within_objectives_total", 0.0) if is_same else math.nan
    return _counts(sums)._replace(within=within, sizes={size: _finished(each) for size, each in sizes.items()})


def _finished(sums: Mapping[str, float]) -> Finished:
    finished = Finished(*(sums.get(each, 0.0) for each in Finished._fields))
    if not all(map(math.isfinite, finished)):
        raise ValueError("it counts what is no number")
    return finished


def _counts(sums: Mapping[str, float]) -> Counts:
    prompt, cached, output = (sums.get(f"{each}_tokens_total", 0.0) for each in ("prompt", "cached", "output"))
    waiting = sums.get("requests_waiting", 0.0)
    in_flight = sums["requests_running"] + waiting
    ended, finished = sums.get("requests_total", 0.0), sums.get("e2e_seconds_count", 0.0)
    counts = Counts(ended, finished, prompt, cached, output, in_flight, waiting=waiting)
    if not all(map(math.isfinite, counts[:-1])):
        raise ValueError("it counts what is no number")
    return counts


def only_here(listed: Sequence[Instance], trust: Trust) -> Mapping[int, int]:
    """Return how many pages each worker has cached that no other has, as the first router knows that answers."""
    if trust.tokens is None and trust.tls is not None:
        return {}  # a router's HTTP port knows no certificates
    for router in (each for each in listed if each.role == ROLE_ROUTER):
        try:
            workers = fetch(f"http://{router.address}/admin/workers", trust, ANSWER_S)["workers"]
            pages = {int(each["instance"], 16): each["only_here_pages"] for each in workers}
            return {instance_id: number for instance_id, number in pages.items() if number is not None}
        except BROKEN as error:
            logger.warning("a router at %s does not say what workers have cached: %r", router.address, error)
    return {}


def cluster_of(api: KubernetesApi, selector: str) -> Cluster:
    """Return the pods and pools that have these labels. Raises `Unavailable` if any of it can't be read.

    Pods are read after the Deployments whose versions go into writes. So a write is refused if anybody else wrote
    before it, even if pods have gone by that already when pods were read.
    """
    scaled_objects, autoscalers = _scaled_objects(api), list(api.list(*AUTOSCALERS, ""))
    pools = pools_of(api.list(*DEPLOYMENTS, selector), autoscalers, scaled_objects)
    return Cluster(pods_of(api.list("api/v1", "pods", selector)), pools)


def _scaled_objects(api: KubernetesApi) -> Sequence[Object]:
    try:
        return list(api.list(*SCALED_OBJECTS, ""))
    except NotFound:
        return ()  # the cluster has no KEDA
