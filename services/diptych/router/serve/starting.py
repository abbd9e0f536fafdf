"""Starts attempts: the legs that workers get of a request, by a pair, or to bring it from one worker to another."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from diptych.common.members.roles import LegKind
from diptych.generation.codec import content_to_wire, leg_to_wire, params_to_wire
from diptych.generation.segments import without_pixels
from diptych.router.choose.explain import Selection
from diptych.router.metrics import RouterMetrics
from diptych.router.serve.attempt import Attempt, legs_of
from diptych.router.serve.encoding import encode_images
from diptych.router.serve.moving import PATIENCE_S, Move
from diptych.router.values.progress import Progress
from diptych.router.workers.fleet import Fleet
from diptych.tokens.packed_tokens import pack
from diptych.v1.worker_pb2 import LEG_KIND_POOL, StartLeg


def start_attempt(fleet: Fleet, progress: Progress, selection: Selection, now_s: float) -> Attempt:
    """Send the legs of the next attempt; their prompt is serialised once."""
    leg, record = _start_leg(progress, now_s), fleet.session(selection.pair.prefill_id).worker.record
    leg.compat, progress.request.client.served_by.weights_version = record.compat, record.weights_version
    parts = legs_of(selection.pair, leg)
    _name_holder(leg, selection)
    for kind, (_, each) in parts.items():
        _add_contents(each, progress, computes=kind is not LegKind.DECODE)
    legs = {kind: (fleet.session(instance_id), each) for kind, (instance_id, each) in parts.items()}
    prompt = _prompt(progress, progress.output_ids)
    attempt = Attempt(leg.room, legs, prompt, selection.work, progress.wait_budget)
    attempt.computed_by = selection.pair.prefill_id
    return attempt


async def have_images_encoded(fleet: Fleet, progress: Progress, num_cached: int, metrics: RouterMetrics) -> None:
    """Have the images encoded that are behind so many places of a prompt, by encode workers."""
    leg = _start_leg(progress, time.monotonic())
    progress.encoders = await encode_images(fleet, progress, leg, num_cached, metrics)


def _name_holder(leg: StartLeg, selection: Selection) -> None:
    """Say on the leg that computes the prompt who has more of it."""
    held = selection.candidates.workers[selection.pair.prefill_id].held
    if held is not None:
        leg.holder.instance_id, leg.holder.num_tokens = held.instance_id, held.num_tokens


def start_move(fleet: Fleet, old: Attempt, progress: Progress, selection: Selection) -> Move[Attempt]:
    """Ask the worker that makes the output to hand it to the other one of a pair."""
    source, target = (fleet.session(each) for each in (selection.pair.prefill_id, selection.pair.decode_id))
    asking = StartLeg(room=_new_room(), moves_room=old.room, peer_instance_id=target.instance_id)
    new = Attempt(asking.room, {LegKind.PREFILL: (source, asking)}, b"", selection.work, progress.wait_budget)
    new.computed_by = old.computed_by

    def begin(unread: Sequence[int]) -> None:
        if not target.is_open:
            move.cancel()
            return
        known = [*progress.output_ids, *unread][:-1]
        leg = _start_leg(progress, time.monotonic(), len(known))
        leg.room, leg.peer_instance_id = new.room, source.instance_id
        leg.computed_by_instance_id = new.computed_by
        leg.compat = source.worker.record.compat
        _add_contents(leg, progress, computes=False)
        new.start_leg(LegKind.DECODE, target, leg, _prompt(progress, known), selection.work)

    move = Move(old, new, begin)
    for attempt in (old, new):
        attempt.watch(move.look)
    asyncio.get_running_loop().call_later(PATIENCE_S, move.give_up)
    return move


def _start_leg(progress: Progress, now_s: float, num_known: int | None = None) -> StartLeg:
    """Return what legs have in common that go on behind so many output tokens; None: behind all."""
    client, count = progress.request.client, len(progress.output_ids) if num_known is None else num_known
    leg = leg_to_wire(client.account, client.hints, client.life, client.tier.slo, now_s)
    leg.room = _new_room()
    leg.sampling.CopyFrom(params_to_wire(progress.params_after(count)))
    leg.num_prior_output_tokens = count
    if client.vectors is not None:
        leg.kind = LEG_KIND_POOL
        leg.label_token_ids.extend(client.vectors.labels)
    return leg


def _add_contents(leg: StartLeg, progress: Progress, *, computes: bool) -> None:
    """Tell a leg what stands between its tokens; pixels go to who computes the prompt, and to nobody else."""
    for content in progress.request.prompt.contents:
        encoder = progress.encoders.get(content.digest, 0)
        known = replace(content, encoder=encoder) if computes else without_pixels(content)
        leg.contents.append(content_to_wire(known))


def _new_room() -> int:
    return secrets.randbits(64) or 1


def _prompt(progress: Progress, output_ids: Sequence[int]) -> bytes:
    """The fields of a leg that both legs have in common, and that may be long."""
    prompt, text = progress.request.prompt, progress.request.prompt.text
    return StartLeg(
        prompt_text=text.utf8 if text else b"",  # type: ignore[arg-type]  # protobuf takes UTF-8 as it is
        add_special_tokens=text is not None and text.add_special_tokens,
        prompt_tokens=pack(prompt.ids),
        prompt_token_ids=output_ids,
    ).SerializeToString()
