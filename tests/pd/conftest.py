"""A prefill core and a decode core joined by a network that delivers when told to: every interleaving can be played."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest
from flat_request import flat_request
from null_runner import NullRunner

from diptych.architectures.vision import VisionInput
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, AdapterTurns, Turns
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.schedule.running import Drafter
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.scheduler.stepping import OverlappedStepping, Stepping, SynchronousStepping, TpModelWorkerClient
from diptych.engine.values.batch import ForwardBatch, Runner, SamplingBatch, StepResult
from diptych.engine.values.events import (
    AbortRoom,
    CompileGrammar,
    DigestPages,
    Effect,
    Emit,
    EmitTokens,
    NoteArrived,
    PagesDigested,
    PagesUnpacked,
    PeerDown,
    PeerUp,
    SendNote,
    Start,
    StreamPages,
    Transfer,
    UnpackPages,
    WriteDone,
    WritePages,
)
from diptych.engine.values.limits import Limits, Scheduling
from diptych.engine.values.prompt_cost import SAME_EVERYWHERE, PromptCost
from diptych.engine.values.request import new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.watched_layers import NO_STATES, NOTHING_WATCHED, ToldStates, WatchedLayers
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.grammar import Grammar
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.kvtransfer.ownership import Pages
from diptych.kvtransfer.transport import PageIndices, PageWrite
from diptych.prefill.core import PrefillCore

VOCAB = 1000
PAGE = 4
CONTEXT = 256
PREFILL, DECODE = 11, 22
RULES = TransferRules(integrity="always")
PARTS = np.uint64(0x5A5A_5A5A_5A5A_5A5A)  # what parts of pages look like, before they are put together
KvArray = np.ndarray[Any, np.dtype[Any]]
NewModel = Callable[..., tuple[KvArray, Runner]]  # by the number of pages, and by `page_size` where they differ


def null_model(num_pages: int, page_size: int = PAGE) -> tuple[KvArray, Runner]:
    """A pool of pages and what computes on it."""
    kv = np.zeros((num_pages, page_size), dtype=np.uint64)
    return kv, NullRunner(kv, VOCAB)


class Counted:
    """A model, and how many tokens it has computed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_tokens = 0

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        self.num_tokens += int(batch.extend_lens.sum())
        return self._runner.execute(batch, sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Side:
    """One worker: core, model, pool, and the effects that are not performed yet."""

    def __init__(
        self,
        build: Callable[..., SchedulerCore],
        num_pages: int,
        model: NewModel,
        limits: Limits,
        *rules: TransferRules,
        page_size: int = PAGE,
        pages_per_state: int = 0,
        windows: WindowPages = NO_WINDOWS,
        turns: Turns = ENOUGH_SLOTS,
    ) -> None:
        self.turns = turns
        self.kv, runner = model(num_pages)
        self.runner = Counted(runner)
        cache = KvCache(
            num_pages=num_pages,
            page_size=page_size,
            max_requests=16,
            max_tokens_per_request=limits.context_len,
            pages_per_state=pages_per_state,
            windows=replace(windows, step_tokens=limits.max_step_tokens),
        )
        self.cache = cache
        self.core = build(cache, limits, *rules, page_size * 8, StepPace(limits.mixed_step_s), turns=turns)
        self.outbox: deque[Transfer] = deque()
        self.digests: dict[int, int] = {}  # of what each room has written since its last note
        self.compiling: deque[CompileGrammar] = deque()
        self.outputs: dict[int, list[Output]] = defaultdict(list)

    def digest(self, pages: PageIndices) -> int:
        page_nbytes = self.kv[0].nbytes
        return add_digests(*(digest_bytes(self.kv[page].tobytes(), page * page_nbytes) for page in pages.tolist()))

    def collect(self) -> None:
        for effect in self.core.pop_effects():
            self._sort(effect)
            if isinstance(effect, Emit) and (effect.output.finish or effect.output.failure):
                self.turns.end(effect.output.room)

    def _sort(self, effect: Effect) -> None:
        if isinstance(effect, Emit):
            self.outputs[effect.output.room].append(effect.output)
        elif isinstance(effect, EmitTokens):
            for output in effect.outputs():
                self.outputs[output.room].append(output)
        elif isinstance(effect, CompileGrammar):
            self.compiling.append(effect)
        else:
            self.outbox.append(effect)

    def tokens(self, room: int) -> dict[int, int]:
        """Output index -> token."""
        outputs = self.outputs[room]
        return {o.first_index + i: token for o in outputs for i, token in enumerate(o.token_ids)}

    def ended(self, room: int) -> Output | None:
        outputs = self.outputs[room]
        return outputs[-1] if outputs and (outputs[-1].finish or outputs[-1].failure) else None


class Squeeze:
    """Takes the memory away that is free or cached, as other requests would, and gives it back."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._taken: Pages | None = None

    def toggle(self) -> None:
        if self._taken is None:
            self._taken = self._cache._allocate(self._cache.num_available)
        else:
            self._cache.pool.release(self._taken)
            self._taken = None

    def release(self) -> bool:
        """Give back what is taken; False if nothing is."""
        if self._taken is None:
            return False
        self.toggle()
        return True


class Pair:
    """Both sides. `deliver_*` moves the oldest effect of a side; `run` plays until nothing moves."""

    def __init__(
        self,
        *,
        prefill_pages: int = 64,
        decode_pages: int = 64,
        max_step_tokens: int = 16,
        context_len: int = CONTEXT,
        model: NewModel | tuple[NewModel, ...] = null_model,
        grammars: GrammarThread | None = None,
        scheduling: Scheduling | None = None,
        overlap: bool = False,
        check_every: int = 1,
        eos_ids: frozenset[int] = frozenset(),
        rules: TransferRules = RULES,
        prompt_cost: PromptCost = SAME_EVERYWHERE,
        vocab_size: int = VOCAB,
        page_sizes: tuple[int, int] | None = None,
        in_parts: bool = False,
        pages_per_state: int | tuple[int, int] = 0,
        windows: WindowPages = NO_WINDOWS,
        num_slots: int = 0,
        drafter: Drafter | None = None,
        watched: WatchedLayers = NOTHING_WATCHED,
        states: ToldStates = NO_STATES,
        vision: VisionInput | None = None,
        row_width: int = 0,
    ) -> None:
        """With `page_sizes`, `model` is asked for one of each. `in_parts`: what lands is nonsense until it is unpacked.

        `num_slots`: of adapters, on each side; 0: enough.
        """
        limits = Limits(
            context_len,
            vocab_size,
            eos_ids,
            max_step_tokens,
            16,
            scheduling or Scheduling(),
            prompt_cost=prompt_cost,
            watched=watched,
            states=states,
            vision=vision,
            row_width=row_width,
        )
        models = model if isinstance(model, tuple) else (model, model)
        sizes = page_sizes or (PAGE, PAGE)
        if page_sizes:
            models = tuple(partial(each, page_size=size) for each, size in zip(models, sizes, strict=True))
        per_state = (pages_per_state,) * 2 if isinstance(pages_per_state, int) else pages_per_state
        turns = [AdapterTurns(num_slots) if num_slots else ENOUGH_SLOTS for _ in range(2)]
        self.prefill = Side(
            PrefillCore,
            prefill_pages,
            models[0],
            limits,
            rules,
            page_size=sizes[0],
            pages_per_state=per_state[0],
            windows=windows,
            turns=turns[0],
        )
        decode_core = partial(DecodeCore, drafter=drafter)
        self.decode = Side(
            decode_core,
            decode_pages,
            models[1],
            limits,
            page_size=sizes[1],
            pages_per_state=per_state[1],
            windows=windows,
            turns=turns[1],
        )
        self.in_parts = in_parts
        self.fail_next_unpacking = False
        self._overlapped = self._overlap_decode() if overlap else None
        self._check_every = check_every
        self._num_moves = 0
        self.grammars = grammars  # needed for what is compiled
        self.now_s = 0.0
        self.num_written = 0
        self.most_held = 0  # pages of decode that were not free
        self.corrupt_next_write = False
        self.link_up()

    def start(self, room: int, prompt: list[int], max_tokens: int = 5, **fields: Any) -> None:
        self.start_decode(room, prompt, max_tokens, **fields)
        self.start_prefill(room, prompt, max_tokens, **fields)

    def start_prefill(self, room: int, prompt: list[int], max_tokens: int = 5, **fields: Any) -> None:
        self._start(self.prefill, DECODE, room, prompt, max_tokens, fields)

    def start_decode(self, room: int, prompt: list[int], max_tokens: int = 5, **fields: Any) -> None:
        self._start(self.decode, PREFILL, room, prompt, max_tokens, fields)

    def _overlap_decode(self) -> OverlappedStepping:
        runner: Any = self.decode.runner
        return OverlappedStepping(self.decode.core, TpModelWorkerClient(runner), lambda: self.now_s)

    def close(self) -> None:
        if self._overlapped is not None:
            self._overlapped.close()

    def start_constrained(
        self, room: int, prompt: list[int], grammar: Grammar, max_tokens: int, num_prior_output_tokens: int = 0
    ) -> None:
        """Start both legs of a request with a grammar; the prompt's tail may be output of an earlier attempt."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, grammar=grammar)
        self.start_with(params, room, prompt, num_prior_output_tokens)

    def start_with(
        self, params: SamplingParams, room: int, prompt: list[int], num_prior_output_tokens: int = 0
    ) -> None:
        """Start both legs of a request."""
        for side, peer in ((self.decode, PREFILL), (self.prefill, DECODE)):
            tokens = np.array(prompt, dtype=np.int64)
            request = new_request(room, tokens, params, num_prior_output_tokens=num_prior_output_tokens)
            side.core.handle(Start(request, peer), self.now_s)
            side.collect()

    def compile(self, side: Side) -> bool:
        """Answer the oldest compilation that `side` asked for."""
        if not side.compiling:
            return False
        assert self.grammars is not None
        self.grammars.submit(side.compiling.popleft())
        while not (events := self.grammars.poll()):
            assert wait([self.grammars.fileno()], 200), "it was never compiled"
        for event in events:
            side.core.handle(event, self.now_s)
        self._collect()
        self.check()
        return True

    def abort(self, side: Side, room: int) -> None:
        side.core.handle(AbortRoom(room, "test"), self.now_s)
        side.collect()

    def link_up(self) -> None:
        self.prefill.core.handle(PeerUp(DECODE), self.now_s)
        self.decode.core.handle(PeerUp(PREFILL, self.in_parts), self.now_s)
        self._collect()

    def link_down(self, side: Side) -> None:
        """One side loses the link: what it has not sent yet fails, then it hears of the loss."""
        peer = DECODE if side is self.prefill else PREFILL
        lost = [effect for effect in side.outbox if isinstance(effect, WritePages | StreamPages)]
        side.outbox = deque(effect for effect in side.outbox if isinstance(effect, DigestPages | UnpackPages))
        side.digests.clear()
        for effect in lost:
            side.core.handle(WriteDone(effect.room, "link lost"), self.now_s)
        side.core.handle(PeerDown(peer, "test"), self.now_s)
        side.collect()

    def step(self, side: Side) -> bool:
        side.core.expire(self.now_s)
        stepping: Stepping = SynchronousStepping(side.core, side.runner, lambda: self.now_s)
        if side is self.decode and self._overlapped is not None:
            stepping = self._overlapped
        busy = stepping.advance(side.collect)
        side.collect()
        self._check_at_times()
        return busy

    def expire(self) -> None:
        """Let time be noticed, and memory that others gave back."""
        for side in (self.prefill, self.decode):
            side.core.expire(self.now_s)
        self._collect()

    def deliver(self, side: Side) -> bool:
        """Perform the oldest effect of `side`."""
        if not side.outbox:
            return False
        other = self.decode if side is self.prefill else self.prefill
        match side.outbox.popleft():
            case WritePages() | StreamPages() as effect:
                side.core.handle(WriteDone(effect.room, None, self._write(side, other, effect)), self.now_s)
            case SendNote() as effect:
                self._send(side, other, effect)
            case DigestPages(room, pages):
                side.core.handle(PagesDigested(room, side.digest(pages)), self.now_s)
            case UnpackPages(room, _, pages):
                side.core.handle(PagesUnpacked(room, self._unpack(side, pages)), self.now_s)
        self._collect()
        self._check_at_times()
        return True

    def run(self) -> None:
        for _ in range(50_000):
            moved = [self.compile(self.prefill), self.compile(self.decode)]
            moved += [self.deliver(self.decode), self.step(self.prefill), self.deliver(self.prefill)]
            if not any([*moved, self.step(self.decode)]):
                return
        raise AssertionError("the pair makes no progress")

    def tokens(self, room: int) -> list[int]:
        """The client's view: the first token from prefill, the others from decode."""
        merged = {**self.prefill.tokens(room), **self.decode.tokens(room)}
        return [merged[index] for index in sorted(merged)]

    def logprobs(self, room: int) -> list[float]:
        """The client's view, of requests that want them."""
        sides = (self.prefill, self.decode)
        found = {o.first_index: o.logprobs.logprobs for side in sides for o in side.outputs[room] if o.logprobs}
        return [value for index in sorted(found) for value in found[index]]

    def _check_at_times(self) -> None:
        self._num_moves += 1
        pool = self.decode.cache.pool
        self.most_held = max(self.most_held, pool.capacity - pool.num_free)
        if self._num_moves % self._check_every == 0:
            self.check()

    def check(self) -> None:
        assert self.prefill.cache.audit(self.prefill.core.report().holders) == []
        assert self.decode.cache.audit(self.decode.core.report().holders) == []

    def assert_clean(self) -> None:
        self.check()
        for side in (self.prefill, self.decode):
            counts = side.cache.pool.counts()
            assert side.core.report().num_open_rooms == 0
            assert side.digests == {}  # no stream of a room outlives it
            assert {state: counts[state] for state in counts if state not in ("free", "cached")} == {
                "owned": 0,
                "importing": 0,
                "quarantined": 0,
                "exporting": 0,
            }

    def _start(
        self, side: Side, peer: int, room: int, prompt: list[int], max_tokens: int, fields: dict[str, Any]
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = flat_request(room, np.array(prompt, dtype=np.int64), params, arrival_s=self.now_s, **fields)
        side.core.handle(Start(request, peer), self.now_s)
        side.collect()

    def _send(self, side: Side, other: Side, effect: SendNote) -> None:
        me = PREFILL if side is self.prefill else DECODE
        wire = note_codec.encode(effect.note, sender=me, target=effect.peer)
        note = note_codec.decode(wire, sender=me, target=effect.peer)
        digest = side.digests.pop(effect.stream, effect.digest)
        other.core.handle(NoteArrived(me, note, digest), self.now_s)

    def _write(self, side: Side, other: Side, effect: WritePages | StreamPages) -> int | None:
        write = effect.write
        self._copy(side, other, write)
        if self.in_parts:
            other.kv[write.dst] ^= PARTS
        self.num_written += len(write.dst)
        digest = other.digest(write.dst) if effect.flow.with_digest else None
        if digest is not None:
            side.digests[effect.room] = add_digests(side.digests.get(effect.room, 0), digest)
        self._damage(other, write.dst)
        return digest

    def _copy(self, side: Side, other: Side, write: PageWrite) -> None:
        if side.kv.shape[1:] == other.kv.shape[1:]:
            other.kv[write.dst] = side.kv[write.src]
            return
        tokens = side.kv[write.src].ravel()[write.skip_tokens :]
        pages = np.zeros((len(write.dst), other.kv.shape[1]), other.kv.dtype)
        pages.ravel()[: len(tokens)] = tokens[: pages.size]
        other.kv[write.dst] = pages

    def _unpack(self, side: Side, pages: PageIndices) -> str | None:
        if self.fail_next_unpacking:
            self.fail_next_unpacking = False
            return "test"
        side.kv[pages] ^= PARTS
        return None

    def _damage(self, other: Side, pages: PageIndices) -> None:
        if self.corrupt_next_write:
            other.kv[pages[0], 0] ^= np.uint64(1)
            self.corrupt_next_write = False

    def _collect(self) -> None:
        self.prefill.collect()
        self.decode.collect()


@pytest.fixture
def squeeze() -> type[Squeeze]:
    return Squeeze


@pytest.fixture
def make_pair() -> type[Pair]:
    return Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()
