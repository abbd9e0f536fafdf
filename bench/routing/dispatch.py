"""The router of a simulation: the real policies, prefix index and estimates, fed by what simulated workers tell.

It counts its open legs as sessions do. What a worker cached and how long it took is known with a leg's output.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.cached_prefixes import LATELY_S, ApproximateIndex, CachedPrefixes
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.pairing import partners
from diptych.router.choose.policies.policy import Candidates, Policy, RequestView, Worker
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.router.workers.worker_view import Pair, WorkerLoad
from routing.engine import Engine, Job
from routing.trace import BLOCK_TOKENS, TracedRequest


class Chance(NamedTuple):
    """What is arbitrary in a run, beside the names of the workers."""

    seed: int = 0  # of what policies draw
    first_number: int = 0  # of the choices: whose turn it is at first


AS_BUILT: Final = Chance()


@dataclass(slots=True)
class _Open:
    """The legs that are open at one worker."""

    num_legs: int = 0
    num_queued: int = 0
    queued_tokens: int = 0
    queued_transfer_bytes: int = 0
    num_outputs: int = 0
    joining_tokens: int = 0  # of the prompts of those whose KV is not there

    def add_prompt(self, job: Job) -> None:
        self.num_queued += 1
        self.queued_tokens += job.request.prompt_len - job.believed_len

    def remove_prompt(self, job: Job) -> None:
        self.num_queued -= 1
        self.queued_tokens -= job.request.prompt_len - job.believed_len


class Dispatch:
    """Chooses pairs, and hears what became of them."""

    def __init__(
        self,
        policy: Policy,
        engines: Mapping[int, Engine],
        pairs: Sequence[Pair],
        objectives: Slo = NO_SLO,
        chance: Chance = AS_BUILT,
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._partners = partners(pairs)
        self._rng = random.Random(chance.seed)
        self._objectives = objectives
        self._num_choices = chance.first_number
        self._estimates = Estimates()
        self._now_s = 0.0
        self._prefixes = CachedPrefixes(
            PrefixIndex(), ApproximateIndex(self._clock), ApproximateIndex(self._clock, LATELY_S)
        )
        self._sequences = dict.fromkeys(engines, 0)
        self._open = {instance_id: _Open() for instance_id in engines}

    def choose(self, request: TracedRequest, now_s: float) -> Job:
        """Choose a pair and open the legs there."""
        self._now_s = now_s
        chains = {BLOCK_TOKENS: request.blocks}
        cached = self._prefixes.cached_tokens(chains)
        candidates = self._candidates(cached)
        pair = self._policy(candidates, self._view(request)).pair
        self._estimates.came(now_s, candidates.busy_share)
        job = Job(
            request,
            pair,
            self._num_choices,
            now_s,
            believed_len=min(request.prompt_len, cached.get(pair.prefill_id, 0)),
        )
        for instance_id in {pair.prefill_id, pair.decode_id}:
            self._open[instance_id].num_legs += 1
        self._open[pair.prefill_id].add_prompt(job)
        self._open[pair.decode_id].num_outputs += 1
        self._open[pair.decode_id].joining_tokens += request.prompt_len
        self._prefixes.sent({pair.prefill_id, pair.decode_id}, chains)
        return job

    def cache_changed(self, instance_id: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        self._sequences[instance_id] += 1
        sequence = self._sequences[instance_id]
        self._prefixes.told.apply(instance_id, KvNews(sequence, sequence == 1, removed, stored))

    def completed(self, job: Job) -> None:
        """The prompt is computed, and with it the first token."""
        opened = self._open[job.pair.prefill_id]
        opened.remove_prompt(job)
        opened.num_legs -= not job.pair.is_local
        if job.pair.is_local or job.request.output_len == 1:
            self._open[job.pair.decode_id].joining_tokens -= job.request.prompt_len
        computed_len = job.request.prompt_len - job.cached_len
        self._estimates.prefilled(job.pair.prefill_id, computed_len, job.cached_len, job.first_token_s - job.started_s)

    def sent(self, job: Job) -> None:
        """The KV that decode lacks is on its way."""
        self._open[job.pair.prefill_id].queued_transfer_bytes += self._moved_bytes(job)

    def handed_off(self, job: Job, now_s: float) -> None:
        """The KV is at the decode worker."""
        self._open[job.pair.prefill_id].queued_transfer_bytes -= self._moved_bytes(job)
        self._open[job.pair.decode_id].joining_tokens -= job.request.prompt_len
        tested_s = self._engines[job.pair.prefill_id].hardware.transfer_s(job.moved_len)
        self._estimates.transferred(job.pair.prefill_id, job.pair.decode_id, tested_s, now_s - job.first_token_s)

    def finished(self, job: Job) -> None:
        decode_id, num_gaps = job.pair.decode_id, job.request.output_len - 1
        if num_gaps:
            gap_s = (job.finished_s - job.joined_s) / num_gaps
            self._estimates.decoded(decode_id, self._engines[decode_id].reserved_tokens, gap_s)
        self._open[decode_id].num_legs -= 1
        self._open[decode_id].num_outputs -= 1
        self._estimates.ended(job.request.output_len)

    def _moved_bytes(self, job: Job) -> int:
        return job.moved_len * self._engines[job.pair.prefill_id].hardware.kv_token_bytes

    def _clock(self) -> float:
        return self._now_s

    def _view(self, request: TracedRequest) -> RequestView:
        self._num_choices += 1
        family = request.block_list[:2][-1]  # names the conversation: the first block is the same in all of them
        return RequestView(
            request.prompt_len,
            self._num_choices - 1,
            entropy=self._rng.getrandbits(64),
            session=f"{family:016x}",
            prefix_key=family,
            output_len=self._estimates.output_len,
            usual=self._estimates.usual,
            slo=self._objectives,
        )

    def _candidates(self, cached: Mapping[int, int]) -> Candidates:
        workers = {
            key: Worker(
                key,
                self._load(engine),
                cached.get(key, 0),
                self._estimates.of(key),
                engine.hardware.kv_token_bytes,
            )
            for key, engine in self._engines.items()
        }
        return Candidates(workers, self._partners)

    def _load(self, engine: Engine) -> WorkerLoad:
        opened = self._open[engine.instance_id]
        return WorkerLoad(
            num_requests=opened.num_legs,
            queued_tokens=opened.queued_tokens,
            free_tokens=engine.free_tokens,
            has_credit=not engine.waiting,
            link_speeds=dict.fromkeys(self._engines, engine.hardware.link_bytes_per_s),
            queued_transfer_bytes=opened.queued_transfer_bytes,
            num_queued=opened.num_queued,
            context_tokens=engine.reserved_tokens,
            prompt_budget=engine.prompt_budget(self._now_s),
            output_tokens=engine.output_tokens + opened.joining_tokens,
            num_outputs=opened.num_outputs,
            output_step_s=engine.hardware.step_s,
            context_token_s=engine.hardware.context_token_s,
            prompt_token_s=engine.hardware.token_s,
            num_own=opened.num_legs,
            left_tokens=opened.queued_tokens,
        )
