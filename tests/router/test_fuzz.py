"""Whatever a worker says: it costs its own session at most, whose legs all hear of it, and memory is bounded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from fuzzing import FLOATS, I32, U32, U64, fuzz
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.members.roles import LegKind
from diptych.generation.codec import logprobs_from_wire
from diptych.router.choose import prefix_index
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.router.serve.attempt_legs import Merger
from diptych.router.workers.legs import Leg, OpenLegs, Work
from diptych.v1 import inference_pb2, worker_pb2

WORKER = 7


def outputs() -> st.SearchStrategy[worker_pb2.LegOutput]:
    logprobs = st.builds(
        inference_pb2.TokenLogprobs,
        logprobs=st.lists(FLOATS, max_size=4),
        num_top=U32,
        top_ids=st.lists(U32, max_size=4),
        top_logprobs=st.lists(FLOATS, max_size=4),
    )
    return st.builds(
        worker_pb2.LegOutput,
        room=st.integers(0, 4) | U64,
        first_index=st.integers(0, 5) | U32,
        token_ids=st.lists(U32, max_size=4),
        finish_reason=st.sampled_from((0, 0, 1)) | I32,
        error=st.none() | st.builds(worker_pb2.LegError, code=I32, message=st.text(max_size=5)),
        logprobs=st.none() | logprobs,
    )


@dataclass
class Reader:
    """Reads outputs as an attempt does."""

    merger: Merger = field(default_factory=Merger)
    num_taken: int = 0
    num_ends: int = 0

    def receive(self, kind: LegKind, output: worker_pb2.LegOutput) -> None:
        logprobs = logprobs_from_wire(output.logprobs) if output.HasField("logprobs") else None
        self.merger.accept(output.first_index, output.token_ids, logprobs)
        self.num_taken += len(self.merger.pop()[0])
        self.num_ends += bool(output.finish_reason or output.HasField("error"))

    def lose(self, kind: LegKind, reason: str) -> None:
        self.num_ends += 1


@fuzz
@given(said=st.lists(outputs(), max_size=30))
def test_every_leg_ends_once_and_reads_each_token_once(said: list[worker_pb2.LegOutput]) -> None:
    legs, readers = OpenLegs(), {room: Reader() for room in range(1, 5)}
    for room, reader in readers.items():
        legs.add(room, Leg(reader, LegKind.DECODE, Work(3)))
    with contextlib.suppress(Exception):  # the session catches all: it is over then
        for output in said:
            legs.deliver(output, 0.0)
    legs.lose_all("the session ended")
    assert {reader.num_ends for reader in readers.values()} == {1}
    assert all(reader.num_taken == reader.merger.num_tokens for reader in readers.values())
    assert legs.queued_tokens == 0


def test_the_owner_of_a_leg_whose_last_output_makes_no_sense_hears_that_the_session_is_lost() -> None:
    class Strict(Reader):
        def receive(self, kind: LegKind, output: worker_pb2.LegOutput) -> None:
            raise ValueError("no sense")

    legs, strict = OpenLegs(), Strict()
    legs.add(1, Leg(strict, LegKind.DECODE, Work(3)))
    with pytest.raises(ValueError, match="no sense"):
        legs.deliver(worker_pb2.LegOutput(room=1, finish_reason=inference_pb2.FINISH_REASON_STOP), 0.0)
    legs.lose_all("internal error")
    assert strict.num_ends == 1


def news() -> st.SearchStrategy[KvNews]:
    hashes = st.lists(st.integers(0, 5) | U64, max_size=5)
    below = st.lists(st.tuples(st.integers(0, 5) | st.integers(0, 2**32 - 1), hashes), max_size=3)
    return st.builds(KvNews, st.integers(0, 5) | U64, st.booleans(), hashes, hashes, st.booleans(), below)


@fuzz
@given(heard=st.lists(news(), max_size=30))
def test_news_of_cached_pages_in_any_order(heard: list[KvNews]) -> None:
    index = PrefixIndex()
    for each in heard:
        index.apply(WORKER, each)
        told = [hashes for other in heard for hashes in (other.stored, *(lower for _, lower in other.below))]
        assert index.num_pages(WORKER) <= sum(map(len, map(list, told)))
        index.holders({16: [1, 2, 3]})
    index.forget(WORKER)
    assert index.holders({16: [1, 2, 3]}) == {}


def test_a_worker_that_claims_pages_without_end_is_believed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_PAGES", 4)
    index = PrefixIndex()
    assert index.apply(WORKER, KvNews(1, cleared=True, stored=(1, 2, 3, 4)))
    assert index.num_pages(WORKER) == 4
    assert index.apply(WORKER, KvNews(2, stored=(5,)))
    assert (index.num_pages(WORKER), index.is_in_sync(WORKER)) == (0, False)
    assert index.apply(WORKER, KvNews(3, stored=(6,)))
    assert (index.num_pages(WORKER), index.is_in_sync(WORKER)) == (0, False)
    assert index.apply(WORKER, KvNews(4, cleared=True, stored=(7,)))
    assert (index.num_pages(WORKER), index.is_in_sync(WORKER)) == (1, True)
