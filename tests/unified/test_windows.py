"""Pages of layers with a window on workers that do both: they take turns, give each other pages, and give up."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fleet_games import change_roles, give_up_a_step, grant_to_each_other
from null_runner import NullRunner
from stepped_engine import Engine
from windowed_runner import WindowedRunner, expected_output

from diptych.common.arrays import I32
from diptych.common.members.roles import LegKind, Role
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.running import Drafter
from diptych.engine.scheduler.stepping import StepGivenUp, fill_in
from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult
from diptych.engine.values.request import Request
from diptych.engine.values.step import Drafts
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.ownership import PagePool
from diptych.unified.reserve import max_tokens

VOCAB, PAGE = 1000, 4
SLIDING, LONG = WindowPages(2, 10), WindowPages(1, 40)  # less and more than a step
KINDS = pytest.mark.parametrize(
    "windows", [SLIDING, WindowPages(1, 5), WindowPages(1, 8, is_chunked=True), WindowPages(3, 2)], ids=str
)
PROMPT = list(range(20))
FleetClass = Any  # the fixture's class: test helpers can't be imported


def expected(prompt: list[int], num_tokens: int, windows: WindowPages = SLIDING) -> list[int]:
    return expected_output(prompt, num_tokens, VOCAB, windows)


def new_fleet(
    fleet_class: FleetClass, *roles: Role, windows: WindowPages = SLIDING, num_pages: int = 128, overlap: bool = False
) -> Any:
    def model(num_pages: int) -> tuple[Any, WindowedRunner]:
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        return kv, WindowedRunner(NullRunner(kv, VOCAB), kv, windows, VOCAB)

    return fleet_class(*roles, num_pages=num_pages, overlap=overlap, model=model, windows=windows)


def is_clean(fleet: Any) -> bool:
    return all(
        worker.core.report().num_open_rooms == 0 and worker.cache.audit(worker.core.report().holders) == []
        for worker in fleet.workers.values()
    )


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_go_both_ways_and_stay_on_one_worker(
    fleet_class: FleetClass, windows: WindowPages, overlap: bool
) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, windows=windows, overlap=overlap)
    prompts = {room: [*PROMPT[: 7 + room], room] for room in range(1, 10)}
    for room, prompt in prompts.items():
        fleet.start(room, prompt, 1 + room % 2, 1 + room % 3 % 2, max_tokens=25)
    fleet.run()
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected(prompt, 25, windows) for room, prompt in prompts.items()
    }
    assert is_clean(fleet)
    fleet.close()


@KINDS
@pytest.mark.parametrize("num_pages", [40, 41, 67])
def test_two_workers_whose_pools_are_granted_to_each_other_come_to_an_end(
    fleet_class: FleetClass, num_pages: int, windows: WindowPages
) -> None:
    """A prompt needs room for its windows, too: what is granted must leave it. The first two are as long as can be."""
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, num_pages=num_pages, windows=windows)
    prompts = grant_to_each_other(fleet)
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected(prompt, 2, windows) for room, prompt in prompts.items()
    }
    assert is_clean(fleet)


@pytest.mark.parametrize("windows", [SLIDING, WindowPages(1, 5), WindowPages(1, 8, is_chunked=True), LONG], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_two_workers_whose_pools_are_full_of_each_others_requests_come_to_an_end(
    fleet_class: FleetClass, windows: WindowPages, seed: int
) -> None:
    """Prompts have any length that is taken and come at any moment; outputs have others retracted."""
    rng = random.Random(seed)
    num_pages = rng.randrange(38, 60) + 2 * windows.window
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED, num_pages=num_pages, windows=windows)
    longest, asked = fleet.workers[1].core.max_tokens, {}
    for room in range(1, 25):
        num_tokens = rng.choice([1, 3, longest // 3])
        prompt = [rng.choice([1, 2, room])] * rng.randrange(1, longest - num_tokens + 1)
        asked[room] = prompt, num_tokens
        fleet.start(room, prompt, *rng.choice([(1, 2), (2, 1), (1, 1)]), num_tokens)
        for _ in range(rng.randrange(3)):
            rng.choice([fleet.advance, fleet.deliver])(rng.choice([1, 2]))
    fleet.run()
    for room, (prompt, num_tokens) in asked.items():
        assert fleet.tokens(room) == expected(prompt, num_tokens, windows), fleet.failures(room)
    assert is_clean(fleet)


@KINDS
def test_a_unified_worker_takes_what_leaves_room_for_one_more(windows: WindowPages) -> None:
    windows = WindowPages(windows.num_groups, windows.window, windows.is_chunked, step_tokens=8)
    for num_pages in range(20, 120):
        cache = KvCache(
            num_pages=num_pages, page_size=PAGE, max_requests=2, max_tokens_per_request=4096, windows=windows
        )
        longest = max_tokens(Role.UNIFIED, 4096, cache)
        assert 2 * windows.pool_pages(longest // PAGE, PAGE) <= num_pages - 1
        assert longest <= max_tokens(Role.DECODE, 4096, cache) == cache.max_request_tokens


@pytest.mark.parametrize(
    "order", [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL), (Role.LOCAL, Role.UNIFIED)]
)
@pytest.mark.parametrize("num_moves", [0, 2, 5])
def test_what_began_before_a_change_of_roles_ends_right(
    fleet_class: FleetClass, order: tuple[Role, Role], num_moves: int
) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED)
    prompts = change_roles(fleet, PROMPT, order, num_moves)
    assert all(fleet.tokens(room) == expected(prompt, 5) for room, prompt in prompts.items())


# prompts that are part-way


@pytest.mark.parametrize(
    ("windows", "num_pages", "max_step_tokens", "prompt_len"),
    [(LONG, 40, 4, 60), (WindowPages(2, 24), 40, 8, 40), (WindowPages(1, 32, is_chunked=True), 46, 4, 80)],
    ids=str,
)
def test_prompts_whose_windows_take_many_steps_to_fill_come_to_an_end_beside_each_other(
    windows: WindowPages, num_pages: int, max_step_tokens: int, prompt_len: int
) -> None:
    engine = Engine(num_pages, max_step_tokens, windows=windows)
    for room in (1, 2):
        engine.start(room, [room] * prompt_len, 3)
    engine.run()
    assert [engine.tokens(room) for room in (1, 2)] == [expected([room] * prompt_len, 3, windows) for room in (1, 2)]
    engine.close()


# steps that are given up


class HalfStep:
    """Runs half of a step: some of its KV is there, and wrong, in layers with a window, too."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.rooms: set[int] = set()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        assert batch.window_groups is not None
        self.rooms = set(self._worker.core.rooms_of_step())
        self._worker.kv.flat[batch.out_slots] = 13
        self._worker.kv.flat[batch.window_groups.out_slots] = 13
        raise StepGivenUp


@pytest.mark.parametrize("num_moves", range(6))
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1)])
def test_a_step_that_is_given_up_never_happened(
    fleet_class: FleetClass, prefill: int, decode: int, num_moves: int
) -> None:
    fleet = new_fleet(fleet_class, Role.UNIFIED, Role.UNIFIED)
    prompts = give_up_a_step(fleet, PROMPT, (prefill, decode), num_moves, HalfStep)
    assert all(fleet.tokens(room) == expected(prompt, 5) for room, prompt in prompts.items())
    assert is_clean(fleet)


# one worker


def tiny_pool(windows: WindowPages, num_pages: int) -> int:
    """Return the pages of a pool in which one text of so many pages fits, and little else."""
    return replace(windows, step_tokens=16).pool_pages(num_pages, PAGE) + 8


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_hundreds_of_requests_that_begin_alike_are_right_on_one_worker_with_a_tiny_pool(
    windows: WindowPages, overlap: bool
) -> None:
    """They are aborted at any moment, and retracted; a request goes on from outputs of others, too."""
    engine = Engine(tiny_pool(windows, 17), overlap=overlap, windows=windows, max_step_tokens=11)
    engine.expect_short_outputs()
    rng, asked = random.Random(2), {}
    heads = [[7] * 9, [7] * 22, [8] * 12]
    for room in range(1, 55):
        prompt = [*rng.choice(heads), *(rng.randrange(VOCAB) for _ in range(rng.randrange(9)))]
        asked[room] = prompt, rng.choice([1, 2, 2, 2, 35])
        engine.start(room, *asked[room])
        if rng.random() < 0.1:
            heads[rng.randrange(3)] = [*prompt, *expected(prompt, 2, windows)][-25:]
        for _ in range(rng.randrange(9)):
            engine.step()
        if rng.random() < 0.15:
            engine.abort(rng.randrange(max(1, room - 5), room + 1))
    for room in range(200, 210):  # most outputs were short, so that too many of these are admitted at once
        asked[room] = [7] * (room - 195), 35
        engine.start(room, *asked[room])
    engine.run()
    ended = 0
    for room, (prompt, num_wanted) in asked.items():
        tokens = engine.tokens(room)
        assert tokens == expected(prompt, len(tokens), windows), room
        ended += len(tokens) == num_wanted
    assert ended > 30
    assert engine.core.report().counts.retractions > 0
    engine.close()


class LateWorker:
    """Runs steps as late as can be. What they see must be as it was when they were launched."""

    def __init__(self, runner: OverlapRunner, windows: WindowPages, pool: Callable[[], PagePool]) -> None:
        self._runner = runner
        self._windows = windows
        self._pool = pool
        self._steps: deque[tuple[ForwardBatch, I32, npt.NDArray[np.uint32]]] = deque()
        self._samplings: deque[SamplingBatch] = deque()
        self._newest = np.empty(0, dtype=np.int64)

    def forward(self, batch: ForwardBatch) -> None:
        seen = np.concatenate([self._seen(batch, row) for row in range(batch.batch_size)])
        self._steps.append((batch, seen, self._pool().generations(seen)))

    def sample(self, sampling: SamplingBatch) -> None:
        self._samplings.append(sampling)

    def result(self) -> StepResult:
        batch, seen, generations = self._steps.popleft()
        assert self._pool().holds(seen, generations), "what a step sees has been given to others before it has run"
        result = self._runner.execute(fill_in(batch, self._newest), self._samplings.popleft())
        self._newest = result.token_ids
        return result

    def close(self) -> None:
        pass

    def _seen(self, batch: ForwardBatch, row: int) -> I32:
        """Return the pages of all tokens and, in layers with a window, of those that are seen."""
        end, start = int(batch.seq_lens[row]), int(batch.seq_lens[row] - batch.extend_lens[row])
        first, end_page = self._windows.live_from(start) // PAGE, -(-end // PAGE)
        assert batch.window_groups is not None
        in_windows = batch.window_groups.page_tables[:, row, first:end_page]
        return np.unique(np.concatenate([batch.page_table[row, :end_page], in_windows.ravel()]))


def late_engine(windows: WindowPages, max_step_tokens: int) -> Engine:
    engine = Engine(
        tiny_pool(windows, 18),
        max_step_tokens,
        overlap=True,
        windows=windows,
        worker=lambda runner: LateWorker(runner, windows, lambda: engine.cache.pool),
    )
    return engine


@KINDS
@pytest.mark.parametrize("max_step_tokens", [4, 16])
def test_what_a_launched_step_sees_is_not_given_up_before_it_has_run(
    windows: WindowPages, max_step_tokens: int
) -> None:
    """A peer may be given it, and write at once."""
    engine = late_engine(windows, max_step_tokens)
    prompts = {room: [room % 3] * (5 + room) for room in range(1, 13)}
    for room, prompt in prompts.items():
        engine.start(room, prompt, 35)
    engine.run()
    assert all(engine.tokens(room) == expected(prompt, 35, windows) for room, prompt in prompts.items())
    engine.close()


def test_what_the_last_chunk_of_a_prompt_writes_is_not_given_up_before_it_has_run() -> None:
    engine = late_engine(WindowPages(1, 5), 16)
    engine.start(1, list(range(12)), 5)
    engine.run()
    engine.close()


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_of_many_turns_computes_only_what_is_new(windows: WindowPages, overlap: bool) -> None:
    """On one worker, which has the windows behind its answers; up to the longest request that fits."""
    engine, text = Engine(15 * (1 + windows.num_groups), overlap=overlap, windows=windows), list[int]()
    for room in range(1, 100):
        prompt = [*text, room, room, room]
        if len(prompt) + 5 > engine.core.max_tokens:
            break
        request = engine.start(room, prompt, 5)
        engine.step()
        assert request.cached_len >= (len(text) - 1) // PAGE * PAGE
        engine.run()
        assert engine.tokens(room) == expected(prompt, 5, windows)
        text = [*prompt, *engine.tokens(room)]
    assert len(text) + 8 > engine.core.max_tokens
    engine.close()


# drafts


class ToyDrafter(Drafter):
    """Guesses some tokens of each request, of which every third may be wrong; nothing in every fourth step."""

    def __init__(self, outputs: dict[int, list[int]], num_tokens: int, is_wrong: bool) -> None:
        self._outputs = outputs
        self._num_tokens = num_tokens
        self._is_wrong = is_wrong
        self._num_asked = 0

    def propose(self, requests: Sequence[Request]) -> Drafts:
        self._num_asked += 1
        guesses = {request.room: self._guess(request) for request in requests if self._num_asked % 4}
        return {room: guess for room, guess in guesses.items() if guess}

    def _guess(self, request: Request) -> tuple[int, ...]:
        start = request.num_output_tokens
        following = self._outputs[request.room][start : start + self._num_tokens]
        return tuple(token + (self._is_wrong and (start + i) % 3 == 0) for i, token in enumerate(following))


def drafting_engine(windows: WindowPages, num_pages: int, drafter: ToyDrafter, *, overlap: bool = False) -> Engine:
    build: Callable[..., Any] = partial(DecodeCore, page_nbytes=PAGE * 8, pace=StepPace(math.inf), drafter=drafter)
    return Engine(num_pages, build=build, kind=LegKind.LOCAL, windows=windows, overlap=overlap)


@KINDS
@pytest.mark.parametrize("is_tiny", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_guesses_change_no_token_though_wrong_ones_were_in_windows(
    windows: WindowPages, is_tiny: bool, overlap: bool
) -> None:
    prompts = {room: [7] * 9 + [room] * room for room in range(1, 9)}
    outputs = {room: expected(prompt, 40, windows) for room, prompt in prompts.items()}
    num_pages = tiny_pool(windows, 15) if is_tiny else 512
    engine = drafting_engine(windows, num_pages, ToyDrafter(outputs, 2, is_wrong=True), overlap=overlap)
    engine.expect_short_outputs()
    for room, prompt in prompts.items():
        engine.start(room, prompt, 40)
    engine.run()
    assert {room: engine.tokens(room) for room in prompts} == outputs
    assert (engine.core.report().counts.retractions > 0) == is_tiny
    engine.close()


@KINDS
@pytest.mark.parametrize(
    ("num_guessed", "prompt_len"),
    [
        (1, 20),
        (2, 20),
        (3, 20),
        (2, 21),
        (1, 21),
        (3, 21),
    ],
)
def test_a_request_with_guesses_holds_no_more_than_its_windows(
    windows: WindowPages, num_guessed: int, prompt_len: int
) -> None:
    prompt = list(range(prompt_len))
    outputs = {1: expected(prompt, 100, windows)}
    engine, held = drafting_engine(windows, 512, ToyDrafter(outputs, num_guessed, is_wrong=False)), []
    engine.start(1, prompt, 100)
    while engine.step():
        held.append(engine.cache.pool.capacity - engine.cache.num_available)
    assert engine.tokens(1) == outputs[1]
    assert max(held) <= 125 // PAGE + windows.most_live(PAGE) + 3 * windows.num_groups
    engine.close()
