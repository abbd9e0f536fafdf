"""Requests, outputs and load to and from protobuf. Beside `cache.kv_codec` nothing in a scheduler knows wire forms."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from diptych.common.errors import InvalidRequest
from diptych.common.members.roles import LegKind
from diptych.engine.lora.registry import Loaded
from diptych.engine.values.core_report import CacheReport, DraftReport, Load
from diptych.engine.values.events import EmitTokens, PrefixHolder, Start
from diptych.engine.values.request import new_request
from diptych.generation.codec import (
    FINISH_TO_WIRE,
    account_from_wire,
    hints_from_wire,
    insight_to_wire,
    life_from_wire,
    logprobs_to_wire,
    params_from_wire,
    slo_from_wire,
)
from diptych.generation.leg_prompt import contents_of, prompt_of
from diptych.generation.output import Output, Stats
from diptych.generation.page_hash import extra_key
from diptych.generation.request_groups import NO_ACCOUNT, NO_HINTS
from diptych.generation.slo import NO_SLO
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2

_DURATIONS: Final = ("queue", "grant", "compute", "transfer", "verify", "added_ttft", "join")
_IN_US: Final = tuple(f"{name}_us" for name in _DURATIONS)
_in_s: Final = attrgetter(*(f"{name}_s" for name in _DURATIONS))
_LEG_KINDS = {kind.wire: kind for kind in LegKind}


def start_from_wire(leg: worker_pb2.StartLeg, adapter: Loaded, *, now_s: float, max_tokens: int) -> Start:
    """Return the request of `leg`; its output is cut to what `max_tokens` (prompt and output) leaves.

    Raises `InvalidRequest`: nothing is made as large as a router says that was not looked at.
    """
    prompt = prompt_of(leg)
    if leg.num_prior_output_tokens > len(prompt):
        words = f"{leg.num_prior_output_tokens} of the prompt's {len(prompt)} tokens can't be earlier output"
        raise InvalidRequest(words, param="num_prior_output_tokens")
    params = params_from_wire(leg.sampling)
    params.validate()
    account, slo, hints = account_from_wire(leg), slo_from_wire(leg), hints_from_wire(leg)
    if account is not NO_ACCOUNT:
        account.validate()
    if slo is not NO_SLO:
        slo.validate()
    if hints is not NO_HINTS:
        hints.validate()
    room_left = max(1, max_tokens - len(prompt))
    request = new_request(
        leg.room,
        prompt,
        params if params.max_tokens <= room_left else dataclasses.replace(params, max_tokens=room_left),
        account=account,
        hints=hints,
        life=life_from_wire(leg, now_s),
        slo=slo,
        extra_key=extra_key(hints.cache_namespace, adapter.fingerprint),
        num_prior_output_tokens=leg.num_prior_output_tokens,
        adapter=adapter.number,
        contents=contents_of(leg) if leg.contents else (),
        labels=tuple(leg.label_token_ids),
    )
    holder = PrefixHolder(leg.holder.instance_id, leg.holder.num_tokens) if leg.HasField("holder") else None
    kind, computed_by = _LEG_KINDS.get(leg.kind), leg.computed_by_instance_id
    return Start(request, leg.peer_instance_id, kind, holder, computed_by)


def output_to_wire(output: Output) -> worker_pb2.LegOutput:
    wire = worker_pb2.LegOutput(room=output.room, first_index=output.first_index, token_ids=output.token_ids)
    if output.num_drafts:
        wire.drafts, wire.accepted_drafts = output.num_drafts, output.num_accepted
    if output.finish is not None:
        wire.finish_reason = FINISH_TO_WIRE[output.finish]
    if output.failure is not None:
        code, message = worker_pb2.ErrorCode.Name(output.failure.code.value), output.failure.message
        wire.error.CopyFrom(worker_pb2.LegError(code=code, message=message))
    if output.stats is not None:
        wire.stats.CopyFrom(_stats_to_wire(output.stats))
    if output.vector is not None:
        wire.vector = output.vector.astype("<f4").tobytes()
    if output.logprobs is not None:
        wire.logprobs.CopyFrom(logprobs_to_wire(output.logprobs))
    if output.insight is not None:
        wire.MergeFrom(worker_pb2.LegOutput(**insight_to_wire(output.insight)))
    if output.prompt_logprobs is not None:
        wire.prompt_logprobs.CopyFrom(logprobs_to_wire(output.prompt_logprobs))
    return wire


def add_tokens_to_wire(effect: EmitTokens, events: engine_pb2.SchedulerEvents) -> None:
    """Add the tokens behind all that `events` has of their rooms. Where it has outputs, they become outputs, too.

    So do those of a step with drafts, which say how many there were.
    """
    if events.outputs or effect.num_drafts:
        events.outputs.extend(map(output_to_wire, effect.outputs()))
        return
    tokens = events.tokens
    tokens.rooms.extend(effect.rooms)
    tokens.indices.extend(effect.indices)
    tokens.token_ids.extend(chain.from_iterable(effect.token_ids))


def _stats_to_wire(stats: Stats) -> worker_pb2.LegStats:
    return worker_pb2.LegStats(
        cached_tokens=stats.cached_tokens,
        pages_moved=stats.pages_moved,
        bytes_moved=stats.bytes_moved,
        kv_digest=stats.kv_digest,
        chunk_us=[round(chunk_s * 1e6) for chunk_s in stats.chunks_s],
        **{name: round(seconds * 1e6) for name, seconds in zip(_IN_US, _in_s(stats), strict=True) if seconds},
    )


def drafts_to_wire(report: DraftReport) -> worker_pb2.Drafting | None:
    """Return nothing where nobody drafts."""
    if not report.sources:
        return None
    counts = [
        worker_pb2.DraftCounts(source=each.source, verified=each.verified, accepted=each.accepted)
        for each in report.sources
    ]
    return worker_pb2.Drafting(
        sources=counts,
        asked=report.num_asked,
        asking_s=report.asking_s,
        saved_s=report.saved_s,
        held_bytes=report.nbytes,
    )


def cache_to_wire(report: CacheReport) -> worker_pb2.CacheStatus:
    said = asdict(report)
    tiers = [worker_pb2.CacheTier(**tier) for tier in said.pop("tiers")]
    ages = {name: 0.0 if said[name] == math.inf else said[name] for name in ("evicted_p50_s", "evicted_p90_s")}
    return worker_pb2.CacheStatus(tiers=tiers, **said | ages)


def load_to_wire(load: Load, links: bootstrap_pb2.WorkerLoad) -> bootstrap_pb2.WorkerLoad:
    """`links` has the fields that are about links."""
    wire = bootstrap_pb2.WorkerLoad(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        waiting_tokens=load.waiting_tokens,
        num_waiting_prompts=load.num_waiting_prompts,
        grantable_pages=load.grantable_pages,
        blocked_tokens=load.blocked_tokens,
        num_ungranted=load.num_ungranted,
        prompt_budget=None if load.prompt_budget < 0 else load.prompt_budget,
        output_tokens=load.output_tokens,
        output_step_s=load.output_step_s,
        context_token_s=load.context_token_s,
        prompt_token_s=load.prompt_token_s,
        window_pages=load.window_pages,
        next_beside_pages=load.next_beside_pages,
        tiers=[bootstrap_pb2.TierPrice(**each._asdict()) for each in load.tiers],
    )
    wire.MergeFrom(links)
    return wire


def change_load(wire: bootstrap_pb2.WorkerLoad, before: Load, load: Load) -> None:
    """Make the message about one load that about another; few of its fields change from step to step."""
    value: Any
    for name, old, value in zip(Load._fields, before, load, strict=True):
        if value != old and name != "tiers" and value >= 0:
            setattr(wire, name, value)
    if load.tiers != before.tiers:
        del wire.tiers[:]
        wire.tiers.extend([bootstrap_pb2.TierPrice(**each._asdict()) for each in load.tiers])
    if load.prompt_budget < 0:
        wire.ClearField("prompt_budget")
