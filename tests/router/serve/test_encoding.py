"""Images are encoded before a prompt is sent, by whoever does it in time; nobody depends on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.segments import ContentSegment, Image, content_of_rows
from diptych.router.serve import encoding
from diptych.router.serve.encoding import encode_images
from diptych.v1.inference_pb2 import FINISH_REASON_LENGTH
from diptych.v1.worker_pb2 import ERROR_CODE_OVERLOADED, LegError, LegOutput, StartLeg

FIRST, SECOND = 11, 22
LEG = StartLeg(room=5, cache_salt=b"salt")


def image(number: int, start: int) -> ContentSegment:
    return ContentSegment(start, 4, sha256(bytes([number])).digest(), Image(16, 16, bytes(768)))


IMAGES = (image(1, 3), image(2, 10))


class Encoder:
    """A session whose worker answers a leg as `answer` says."""

    def __init__(self, answer: Callable[[StartLeg, Any], None]) -> None:
        self.started: list[StartLeg] = []
        self.aborted: list[int] = []
        self.worker = SimpleNamespace(record=SimpleNamespace(compat="terms"))
        self._answer = answer

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Any, receiver: Any) -> None:
        assert kind is LegKind.ENCODE
        self.started.append(leg)
        self._answer(leg, receiver)

    def abort(self, room: int) -> None:
        self.aborted.append(room)


def ends(leg: StartLeg, receiver: Any) -> None:
    receiver.receive(LegKind.ENCODE, LegOutput(room=leg.room, token_ids=[0], finish_reason=FINISH_REASON_LENGTH))


def refuses(leg: StartLeg, receiver: Any) -> None:
    receiver.receive(LegKind.ENCODE, LegOutput(room=leg.room, error=LegError(code=ERROR_CODE_OVERLOADED)))


def dies(leg: StartLeg, receiver: Any) -> None:
    receiver.lose(LegKind.ENCODE, "it died")


def says_nothing(leg: StartLeg, receiver: Any) -> None:
    pass


class Counts:
    def __init__(self) -> None:
        self.images_encoded, self.images_late = Counter(), Counter()


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def inc(self, count: int = 1) -> None:
        self.value += count


def encode(
    encoders: dict[int, Encoder], num_cached: int = 0, contents: tuple[ContentSegment, ...] = IMAGES
) -> tuple[dict[bytes, int], tuple[int, int]]:
    counts, fleet = Counts(), SimpleNamespace(encoders=lambda: dict.fromkeys(encoders, 0), session=encoders.__getitem__)
    progress = SimpleNamespace(
        request=SimpleNamespace(prompt=SimpleNamespace(contents=contents)),
        wait_budget=SimpleNamespace(ends_s=time.monotonic() + 1000),
    )
    found = asyncio.run(encode_images(fleet, progress, LEG, num_cached, counts))  # type: ignore[arg-type]
    return dict(found), (counts.images_encoded.value, counts.images_late.value)


def test_each_image_has_a_leg_and_a_room_of_its_own_with_its_pixels_and_the_request_s_salt() -> None:
    encoder = Encoder(ends)
    found, counts = encode({FIRST: encoder})
    assert found == {each.digest: FIRST for each in IMAGES}
    assert counts == (2, 0)
    legs = encoder.started
    assert len({LEG.room, *(leg.room for leg in legs)}) == 3
    for leg, content in zip(legs, IMAGES, strict=True):
        (sent,) = leg.contents
        assert (sent.start, sent.digest, len(sent.image.rgb)) == (0, content.digest, 768)
        assert (leg.cache_salt, leg.compat, leg.sampling.max_tokens) == (b"salt", "terms", 1)


@pytest.mark.parametrize("fault", [refuses, dies])
def test_where_one_worker_fails_another_is_asked(fault: Any) -> None:
    encoders = {FIRST: Encoder(fault), SECOND: Encoder(ends)}
    found, counts = encode(encoders)
    assert found == {each.digest: SECOND for each in IMAGES}
    assert counts == (2, 0)


@pytest.mark.parametrize("fault", [refuses, dies])
def test_an_image_that_all_who_are_asked_fail_at_is_left_to_who_computes_the_prompt(fault: Any) -> None:
    encoders = {number: Encoder(fault) for number in range(1, 5)}
    assert encode(encoders) == ({}, (0, 2))
    assert sum(len(each.started) for each in encoders.values()) == 2 * encoding.MAX_ASKED


def test_who_is_silent_is_not_waited_for_longer_than_a_bound_and_told_to_stop(monkeypatch: Any) -> None:
    monkeypatch.setattr(encoding, "PATIENCE_S", 0.01)
    encoder = Encoder(says_nothing)
    assert encode({FIRST: encoder}) == ({}, (0, 2))
    assert sorted(encoder.aborted) == sorted(leg.room for leg in encoder.started)


def test_a_request_that_is_cancelled_as_a_worker_refuses_asks_no_other() -> None:
    async def test() -> None:
        sessions = {FIRST: Encoder(says_nothing), SECOND: Encoder(says_nothing)}
        asked: asyncio.Queue[Any] = asyncio.Queue()
        for each in sessions.values():
            each._answer = lambda leg, receiver: asked.put_nowait((leg, receiver))
        asking = asyncio.ensure_future(_encoding(sessions))
        leg, receiver = await asked.get()
        refuses(leg, receiver)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert sum(len(each.started) for each in sessions.values()) == 1

    asyncio.run(test())


async def _encoding(sessions: dict[int, Encoder]) -> None:
    fleet: Any = SimpleNamespace(encoders=lambda: dict.fromkeys(sessions, 0), session=sessions.__getitem__)
    counts: Any = Counts()
    await encoding._encode(fleet, LEG, IMAGES[0], time.monotonic() + 1000, {}, counts)


def test_behind_one_that_says_nothing_another_is_asked_in_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(encoding, "PATIENCE_S", 0.5)
    monkeypatch.setattr(encoding, "encoders_of", lambda digest, able: sorted(able))
    silent, other = Encoder(says_nothing), Encoder(ends)
    assert encode({FIRST: silent, SECOND: other}) == ({each.digest: SECOND for each in IMAGES}, (2, 0))
    assert sorted(silent.aborted) == sorted(leg.room for leg in silent.started)


def test_images_whose_pages_a_worker_has_are_not_encoded_and_one_that_comes_twice_is_once() -> None:
    encoder = Encoder(ends)
    assert encode({FIRST: encoder}, num_cached=7)[1] == (1, 0)
    assert encode({FIRST: encoder}, num_cached=14)[1] == (0, 0)
    assert encode({FIRST: encoder}, contents=(image(1, 3), image(1, 10)))[1] == (1, 0)


def test_rows_that_a_client_gave_are_no_images() -> None:
    encoder = Encoder(ends)
    assert encode({FIRST: encoder}, contents=(content_of_rows(np.ones((3, 4), np.float32)),)) == ({}, (0, 0))
    assert not encoder.started


def test_where_nobody_encodes_nothing_is_waited_for() -> None:
    assert encode({}) == ({}, (0, 2))
