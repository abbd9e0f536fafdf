"""Begins an attempt on a pair: what each leg is told, and a room for both."""

from __future__ import annotations

import random

from diptych.common.roles import LegKind
from diptych.engine.packed_tokens import pack
from diptych.engine.runtime.codec import params_to_wire
from diptych.router.attempt import Attempt
from diptych.router.explain import Selection
from diptych.router.fleet import Fleet
from diptych.router.progress import Progress
from diptych.router.session import Session
from diptych.router.worker_view import Pair
from diptych.v1.worker_pb2 import StartLeg


def start_attempt(fleet: Fleet, progress: Progress, selection: Selection, now_s: float) -> Attempt:
    """Send the legs of the next attempt; their prompt is serialised once."""
    timeout_s = progress.request.deadline_s - now_s
    leg = _start_leg(progress, timeout_s)
    legs = _legs(fleet, selection.pair, leg)
    return Attempt(leg.room, legs, _prompt(progress), selection.work, timeout_s)


def _start_leg(progress: Progress, timeout_s: float) -> StartLeg:
    request = progress.request
    return StartLeg(
        room=random.getrandbits(64) or 1,
        request_id=request.request_id,
        sampling=params_to_wire(progress.params),
        num_prior_output_tokens=len(progress.output_ids),
        timeout_ms=max(1, round(timeout_s * 1000)),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        lora=request.adapter,
    )


def _legs(fleet: Fleet, pair: Pair, leg: StartLeg) -> dict[LegKind, tuple[Session, StartLeg]]:
    """Return the legs of a pair, made of what they have in common."""
    prefill, decode = fleet.session(pair.prefill_id), fleet.session(pair.decode_id)
    leg.compat = prefill.worker.record.compat
    if pair.is_local:
        return {LegKind.LOCAL: (prefill, leg)}
    other = StartLeg()
    other.CopyFrom(leg)
    leg.peer_instance_id, other.peer_instance_id = pair.decode_id, pair.prefill_id
    other.sampling.ClearField("prompt_logprobs")  # prefill reports them
    return {LegKind.PREFILL: (prefill, leg), LegKind.DECODE: (decode, other)}


def _prompt(progress: Progress) -> bytes:
    """The fields of a leg that both legs have in common, and that may be long."""
    request, text = progress.request, progress.request.text
    return StartLeg(
        prompt_text=text.utf8 if text else b"",  # type: ignore[arg-type]  # protobuf takes UTF-8 as it is
        add_special_tokens=text is not None and text.add_special_tokens,
        prompt_tokens=pack(request.prompt_ids),
        prompt_token_ids=progress.output_ids,
    ).SerializeToString()
