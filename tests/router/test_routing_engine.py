"""The simulated worker that policies are measured on, against the core of a real one that takes the same times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from routing.fleet import unified
from routing.hardware import DENSE_32B, Hardware
from routing.outcome import outcome
from routing.trace import BLOCK_TOKENS, TracedRequest, parse_rows, synthetic_rows

from diptych.common.arrays import I64
from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.batch import ForwardBatch, StepResult
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.choose.policies import POLICIES
from diptych.unified.core import UnifiedCore

F64 = npt.NDArray[np.float64]

PAGE = 128
VOCAB = 1 << 20
CONTEXT = 60_000
NUM_BLOCKS = 2048
REQUESTS = [replace(one, output_len=min(one.output_len, 100)) for one in parse_rows(synthetic_rows(60))]
SLOW = replace(DENSE_32B, token_s=3 * DENSE_32B.token_s, attention_s=3 * DENSE_32B.attention_s)


class RealWorker:
    """Serves alone, on a clock that each step moves on by what it takes."""

    def __init__(self, hardware: Hardware) -> None:
        cost = PromptCost(hardware.token_s / hardware.attention_s)
        limits = Limits(
            *(CONTEXT, VOCAB, frozenset(), hardware.chunk_tokens, 512),
            prompt_cost=cost,
            mixed_step_s=hardware.mixed_step_s,
        )
        num_pages = (hardware.kv_tokens + NUM_BLOCKS * BLOCK_TOKENS) // PAGE
        cache = KvCache(num_pages=num_pages, page_size=PAGE, max_requests=512, max_tokens_per_request=CONTEXT)
        self._core = UnifiedCore(cache, limits, TransferRules("off"), PAGE, Role.UNIFIED)
        self._hardware = hardware
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}

    def serve(self, requests: Sequence[TracedRequest]) -> None:
        now_s, coming = 0.0, list(enumerate(requests))
        while coming or len(self.last_s) < len(requests):
            while coming and coming[0][1].arrival_s <= now_s:
                self._start(*coming.pop(0))
            batch = self._core.plan(now_s)
            if batch is not None:
                now_s += self._step_s(batch)
                self._core.commit(StepResult(np.ones(batch.num_samples, np.int64)), now_s)
                self._hear(now_s)
            elif coming:
                now_s = coming[0][1].arrival_s
            else:
                return

    def _start(self, room: int, one: TracedRequest) -> None:
        params = SamplingParams(max_tokens=one.output_len, temperature=0.0, ignore_eos=True)
        request = new_request(room, _tokens(one), params, life=Life(arrival_s=one.arrival_s))
        self._core.handle(Start(request, 0, LegKind.LOCAL), one.arrival_s)

    def _step_s(self, batch: ForwardBatch) -> float:
        hardware, rows, ends = self._hardware, batch.is_row, batch.seq_lens
        taken_s = hardware.step_s + hardware.context_token_s * float(ends[rows].sum()) if rows.any() else 0.0
        for index in np.flatnonzero(~rows):
            taken_s += hardware.compute_s(int(ends[index] - batch.extend_lens[index]), int(ends[index]))
            taken_s += hardware.prompt_s * bool(batch.num_sampled[index])
        return taken_s

    def _hear(self, now_s: float) -> None:
        for effect in self._core.pop_effects():
            outputs = (effect.output,) if isinstance(effect, Emit) else ()
            for output in effect.outputs() if isinstance(effect, EmitTokens) else outputs:
                assert output.failure is None
                self.first_s.setdefault(output.room, now_s)
                self.last_s[output.room] = now_s


def _tokens(one: TracedRequest) -> I64:
    """Equal blocks have equal tokens."""
    blocks = np.repeat(one.blocks >> np.uint64(20), BLOCK_TOKENS) * np.uint64(7919)
    within = np.tile(np.arange(BLOCK_TOKENS, dtype=np.uint64), one.num_blocks) * np.uint64(104_729)
    return ((blocks + within) % np.uint64(VOCAB)).astype(np.int64)[: one.prompt_len]


def real(hardware: Hardware, requests: Sequence[TracedRequest]) -> tuple[F64, F64]:
    """Return times to the first token, and means of the gaps after it."""
    worker = RealWorker(hardware)
    worker.serve(requests)
    rooms = range(len(requests))
    first, last = (np.array([times[room] for room in rooms]) for times in (worker.first_s, worker.last_s))
    gaps = np.array([max(1, one.output_len - 1) for one in requests])
    return first - np.array([one.arrival_s for one in requests]), (last - first) / gaps


def simulated(hardware: Hardware, requests: Sequence[TracedRequest]) -> tuple[F64, F64]:
    fleet = unified(1, hardware, NUM_BLOCKS)
    found = outcome(fleet.replay(POLICIES["round_robin"]).open_loop(requests, 1.0), fleet.prefill_ids)
    return found.ttft_s, found.tpot_s


@pytest.mark.parametrize("hardware", [DENSE_32B, SLOW], ids=["as fast as two H200s", "steps bounded by time"])
@pytest.mark.parametrize("apart_s", [2.0, 0.5], ids=["hardly busy", "queues"])
def test_a_simulated_worker_takes_as_long_as_a_real_core_does(hardware: Hardware, apart_s: float) -> None:
    requests = [replace(one, arrival_s=apart_s * number) for number, one in enumerate(REQUESTS)]
    for was, ought in zip(simulated(hardware, requests), real(hardware, requests), strict=True):
        assert was.mean() == pytest.approx(ought.mean(), rel=0.05)
        assert np.median(was) == pytest.approx(np.median(ought), rel=0.05)
