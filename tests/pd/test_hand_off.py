"""The two cores with a real model, real links and transports: pages follow the forward pass and are verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.roles import Role
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.kv_pool import kv_view
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.scheduler.links.links import Links, directions_of
from diptych.engine.scheduler.links.tester import LinkTester
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.values.batch import OnLayer
from diptych.engine.values.events import AbortRoom, CompileGrammar, Emit, EmitTokens, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import FailureCode, Output
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.inproc import InprocNetwork
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout
from diptych.prefill.core import PrefillCore

PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 4, 32, 2
PREFILL, DECODE, ROOM = 11, 22, 5
WINDOWS = ((0, 1), (1, 2))
PROMPT = list(range(3, 13))  # three pages, the last one half full
GRANTED = [1, 2, 3]  # by decode, whose pool is untouched
LIMITS = Limits(256, 321, frozenset(), 64, 16)


class Worker:
    """One side. `on_layer` is called within a step, after the links have heard of the layer."""

    def __init__(self, network: InprocNetwork, number: int, source: ModelSource, build: Callable[..., Any]) -> None:
        self.layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
        self.transport = network.transport(number)
        self.pool = self.transport.allocate_pool(self.layout)
        directions = directions_of(Role.PREFILL if number == PREFILL else Role.DECODE)
        tester = LinkTester(self.transport, self.pool, directions, PathRule(), lambda: 0.0)
        self.links = Links(self.transport, self.transport, tester, WINDOWS)
        self.cache = cache = KvCache(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=16, max_tokens_per_request=256
        )
        self.core: SchedulerCore = build(cache, self.layout)
        kv = kv_view(self.pool.buffer, self.layout)
        runner = ModelRunner(source, kv, dtype="float32", layer_listener=self._listener)
        self._stepping = SynchronousStepping(self.core, runner, lambda: 0.0)
        self.on_layer: OnLayer = lambda layer: None
        self.outputs: dict[int, list[Output]] = defaultdict(list)

    @property
    def kv(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Pages, layers, keys or values, bytes."""
        shape = (NUM_PAGES, NUM_LAYERS, 2, -1)
        return np.frombuffer(self.pool.buffer, np.uint8).reshape(shape)

    def start(self, peer: int) -> None:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.core.handle(Start(new_request(ROOM, np.array(PROMPT), params), peer), 0.0)
        self.perform()

    def abort(self) -> None:
        self.core.handle(AbortRoom(ROOM, "test"), 0.0)
        self.perform()

    def poll(self) -> bool:
        events = self.links.poll(self.core.suspects())
        for event in events:
            self.core.handle(event, 0.0)
        self.perform()
        return bool(events)

    def step(self) -> bool:
        return self._stepping.advance(self.perform)

    def perform(self) -> None:
        for effect in self.core.pop_effects():
            if isinstance(effect, Emit):
                self.outputs[effect.output.room].append(effect.output)
            elif isinstance(effect, EmitTokens):
                for output in effect.outputs():
                    self.outputs[output.room].append(output)
            else:
                assert not isinstance(effect, CompileGrammar)
                self.links.posting.perform(effect)

    @property
    def end(self) -> Output:
        """The last word on the room, if it is one."""
        output = self.outputs[ROOM][-1]
        assert output.finish or output.failure
        return output

    def _listener(self) -> OnLayer | None:
        listen = self.links.posting.layer_listener()
        return None if listen is None else lambda layer: (listen(layer), self.on_layer(layer))[1]


class Two:
    def __init__(self, source: ModelSource, rules: TransferRules) -> None:
        self.network = InprocNetwork()
        self.prefill = Worker(self.network, PREFILL, source, prefill_core(rules))
        self.decode = Worker(self.network, DECODE, source, decode_core)
        for one, number, other in ((self.prefill, DECODE, self.decode), (self.decode, PREFILL, self.prefill)):
            one.links.linking.set_peers({number: other.transport.metadata()}, 0.0)
        self.run()

    def start(self) -> None:
        """Up to the moment at which prefill has decode's grant."""
        self.decode.start(PREFILL)
        self.prefill.start(DECODE)
        self.network.deliver_all()
        self.prefill.poll()

    def run(self) -> None:
        """Play until nothing moves."""
        moved = True
        while moved:
            moved = any([self.network.step(), self.prefill.poll(), self.decode.poll()])
            moved = any([moved, self.prefill.step(), self.decode.step()])

    def tokens(self) -> list[int]:
        outputs = [output for side in (self.prefill, self.decode) for output in side.outputs[ROOM]]
        merged = {output.first_index + i: token for output in outputs for i, token in enumerate(output.token_ids)}
        return [merged[index] for index in sorted(merged)]

    def assert_clean(self) -> None:
        for side in (self.prefill, self.decode):
            counts = side.cache.pool.counts()
            assert side.cache.audit(side.core.report().holders) == []
            assert side.core.report().num_open_rooms == 0
            assert {counts[state] for state in ("owned", "importing", "quarantined", "exporting")} == {0}


def prefill_core(rules: TransferRules) -> Callable[[KvCache, PoolLayout], PrefillCore]:
    return lambda cache, layout: PrefillCore(cache, LIMITS, rules, layout.page_nbytes, StepPace(LIMITS.mixed_step_s))


def decode_core(cache: KvCache, layout: PoolLayout) -> DecodeCore:
    return DecodeCore(cache, LIMITS, layout.page_nbytes, StepPace(LIMITS.mixed_step_s))


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


@pytest.fixture
def two(source: ModelSource) -> Two:
    return Two(source, TransferRules(integrity="always", num_windows=len(WINDOWS)))


@pytest.fixture(scope="module")
def expected(source: ModelSource) -> list[int]:
    """The tokens when whole pages move after the step, unverified."""
    two = Two(source, TransferRules(integrity="off"))
    two.start()
    two.run()
    two.assert_clean()
    return two.tokens()


def arrived_layers(two: Two, pages: list[int]) -> list[int]:
    return [layer for layer in range(NUM_LAYERS) if two.decode.kv[pages, layer].any()]


def test_layers_arrive_while_later_ones_are_computed_and_the_hand_off_comes_last(two: Two, expected: list[int]) -> None:
    seen: list[tuple[int, list[int]]] = []

    def on_layer(layer: int) -> None:
        two.network.deliver_all()
        assert two.decode.links.poll(set()) == []  # no note yet
        seen.append((layer, arrived_layers(two, GRANTED)))

    two.prefill.on_layer = on_layer
    two.start()
    two.run()
    assert seen == [(0, [0]), (1, [0, 1])]
    assert two.tokens() == expected
    sent, received = two.prefill.end.stats, two.decode.end.stats
    assert sent is not None
    assert received is not None
    assert sent.kv_digest is not None
    assert sent.kv_digest == received.kv_digest
    two.assert_clean()


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("page", [1, 3])
def test_one_byte_that_flips_on_the_way_is_caught_wherever_it_is(two: Two, layer: int, kind: str, page: int) -> None:
    two.start()
    two.prefill.step()
    two.network.deliver_all()  # the hand-off lies in decode's inbox
    two.decode.kv[page, layer, ["keys", "values"].index(kind), 7] ^= 0x10
    two.run()
    failure = two.decode.end.failure
    assert failure is not None
    assert (failure.code, "damaged" in failure.message) == (FailureCode.TRANSFER_FAILED, True)
    assert two.prefill.end.failure is not None
    assert two.decode.core.report().counts.integrity_failures == 1
    two.assert_clean()


def test_a_damaged_hand_off_leaves_other_requests_alone(two: Two, expected: list[int]) -> None:
    test_one_byte_that_flips_on_the_way_is_caught_wherever_it_is(two, 1, "keys", 2)
    two.prefill.outputs.clear()
    two.decode.outputs.clear()
    two.start()
    two.run()
    assert two.tokens() == expected
    two.assert_clean()


def test_decode_that_gives_up_within_the_step_keeps_its_pages_until_prefill_has_stopped(two: Two) -> None:
    def on_layer(layer: int) -> None:
        if layer == 0:
            two.decode.abort()
        two.network.deliver_all()

    two.prefill.on_layer = on_layer
    two.start()
    two.prefill.step()
    assert two.decode.cache.pool.counts()["quarantined"] == 3
    assert two.prefill.cache.pool.counts()["exporting"] == 3
    two.run()
    assert two.decode.end.failure is not None
    assert two.prefill.end.failure is not None
    two.assert_clean()


def test_a_request_aborted_on_prefill_after_its_step_is_given_back_when_its_pieces_have_ended(two: Two) -> None:
    two.start()
    two.prefill.step()
    two.prefill.abort()
    assert two.prefill.cache.pool.counts()["exporting"] == 3
    two.run()
    two.assert_clean()


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_link_cut_within_the_step_ends_the_room_on_both_sides(two: Two, layer: int) -> None:
    def on_layer(computed: int) -> None:
        if computed == layer:
            two.network.cut(PREFILL, DECODE)

    two.prefill.on_layer = on_layer
    two.start()
    two.run()
    for side in (two.prefill, two.decode):
        assert side.end.failure is not None
        assert side.end.failure.code in (FailureCode.PEER_LOST, FailureCode.TRANSFER_FAILED)
    two.assert_clean()
