"""Begins an attempt on a pair: what each leg is told, and a room for both."""

from __future__ import annotations

import random

from diptych.common.members.roles import LegKind
from diptych.generation.codec import content_to_wire, leg_to_wire, params_to_wire
from diptych.router.choose.explain import Selection
from diptych.router.serve.attempt import Attempt
from diptych.router.serve.progress import Progress
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.session import Session
from diptych.router.workers.worker_view import Pair
from diptych.tokens.packed_tokens import pack
from diptych.v1.worker_pb2 import StartLeg


def start_attempt(fleet: Fleet, progress: Progress, selection: Selection, now_s: float) -> Attempt:
    """Send the legs of the next attempt; their prompt is serialised once."""
    leg = _start_leg(progress, now_s)
    legs = _legs(fleet, selection.pair, leg)
    return Attempt(leg.room, legs, _prompt(progress), selection.work, progress.patience)


def _start_leg(progress: Progress, now_s: float) -> StartLeg:
    client = progress.request.client
    leg = leg_to_wire(client.account, client.hints, client.life, now_s)
    leg.room = random.getrandbits(64) or 1
    leg.sampling.CopyFrom(params_to_wire(progress.params))
    leg.num_prior_output_tokens = len(progress.output_ids)
    return leg


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
    prompt, text = progress.request.prompt, progress.request.prompt.text
    return StartLeg(
        prompt_text=text.utf8 if text else b"",  # type: ignore[arg-type]  # protobuf takes UTF-8 as it is
        add_special_tokens=text is not None and text.add_special_tokens,
        prompt_tokens=pack(prompt.ids),
        prompt_token_ids=progress.output_ids,
        contents=map(content_to_wire, prompt.contents),
    ).SerializeToString()
