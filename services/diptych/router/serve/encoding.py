"""Has the images of a prompt encoded by encode workers, before the prompt is sent to who computes it.

Rule: nobody depends on it. An image that no encode worker has encoded in time is encoded where the prompt is computed;
what waits for it is this request alone, for a bounded time. Without encode workers, and for prompts of text, nothing
is done.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.generation.codec import content_to_wire, params_to_wire
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment
from diptych.router.choose.encoders import encoders_of
from diptych.router.metrics import RouterMetrics
from diptych.router.values.progress import Progress
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.legs import Work
from diptych.v1.worker_pb2 import LegOutput, StartLeg

PATIENCE_S: Final = 10.0  # with all images of a request, and all who are asked: each has its part
MAX_ASKED: Final = 2  # workers, one after the other, for an image
_SAMPLING: Final = params_to_wire(SamplingParams(max_tokens=1, temperature=0.0))


@dataclass(eq=False)
class _Encoding:
    """One leg. Implements `LegReceiver`."""

    ended: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def receive(self, kind: LegKind, output: LegOutput) -> None:
        if output.finish_reason or output.HasField("error"):
            self._end(is_well=not output.HasField("error"))

    def lose(self, kind: LegKind, reason: str) -> None:
        self._end(is_well=False)

    def _end(self, *, is_well: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(is_well)


async def encode_images(
    fleet: Fleet, progress: Progress, leg: StartLeg, num_cached: int, metrics: RouterMetrics
) -> Mapping[bytes, int]:
    """Return who has encoded which image of a prompt, by digest, once each is encoded or was given up.

    `leg`: what all legs of the request have in common. Images among the first `num_cached` places are left out: whoever
    computes the prompt has their pages.
    """
    wanted = {each.digest: each for each in _images(progress) if each.end > num_cached}
    if not wanted:
        return {}
    found: dict[bytes, int] = {}
    until_s = min(time.monotonic() + PATIENCE_S, progress.wait_budget.ends_s)
    tasks = [asyncio.create_task(_encode(fleet, leg, each, until_s, found, metrics)) for each in wanted.values()]
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # legs are aborted before others begin
    metrics.images_late.inc(len(wanted) - len(found))
    return found


def _images(progress: Progress) -> Sequence[ContentSegment]:
    return [each for each in progress.request.prompt.contents if each.image is not None]


async def _encode(
    fleet: Fleet,
    leg: StartLeg,
    content: ContentSegment,
    until_s: float,
    found: dict[bytes, int],
    metrics: RouterMetrics,
) -> None:
    """Have one image encoded, and note by whom; by nobody if all who may have failed.

    Who says nothing has as much of the time that is left as each who may be asked behind it.
    """
    asked: set[int] = set()
    for num_left in range(MAX_ASKED, 0, -1):
        able = {key: count for key, count in fleet.encoders().items() if key not in asked}
        best: Sequence[int] = encoders_of(content.digest, able)
        if not best:
            return
        asked.add(best[0])
        patience_s = (until_s - time.monotonic()) / min(num_left, len(best))
        if await _ask(fleet, best[0], leg, content, patience_s):
            found[content.digest] = best[0]
            metrics.images_encoded.inc()
            return


async def _ask(fleet: Fleet, encoder: int, leg: StartLeg, content: ContentSegment, patience_s: float) -> bool:
    """Return whether a worker has encoded an image within so many seconds."""
    session, encoding = fleet.session(encoder), _Encoding()
    own = StartLeg()
    own.CopyFrom(leg)
    own.room = secrets.randbits(64) or 1
    own.sampling.CopyFrom(_SAMPLING)
    own.compat = session.worker.record.compat
    own.ClearField("num_prior_output_tokens")
    own.contents.append(content_to_wire(replace(content, start=0)))
    session.start(LegKind.ENCODE, own, b"", Work(content.num_tokens), encoding)
    try:
        async with asyncio.timeout(patience_s):  # not `asyncio.wait_for`: see `wait_or_timeout`
            return await encoding.ended
    except TimeoutError:
        return False
    finally:
        session.abort(own.room)  # nothing, if it has ended
