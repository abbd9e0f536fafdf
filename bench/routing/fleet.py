"""Sets of simulated workers to replay a trace on, and the pairs that they form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.policies.policy import Policy
from diptych.router.workers.worker_view import Pair
from routing.block_cache import BlockCache
from routing.dispatch import AS_BUILT, Chance, Dispatch
from routing.engine import Engine
from routing.hardware import Hardware
from routing.replay import Replay

MAX_NAME: Final = 1 << 63
MANY_CHOICES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers by what they do; one that is in both does both."""

    prefill_ids: Sequence[int]
    decode_ids: Sequence[int]
    hardware: Hardware
    num_blocks: int  # that a worker caches
    may_pair: Callable[[Pair], bool] = lambda pair: True
    chance: Chance = AS_BUILT

    @property
    def is_unified(self) -> bool:
        return self.prefill_ids == self.decode_ids

    def replay(self, policy: Policy, objectives: Slo = NO_SLO) -> Replay:
        """Return a run that has not begun."""
        ids = sorted({*self.prefill_ids, *self.decode_ids})
        engines = {key: Engine(key, self.hardware, BlockCache(self.num_blocks), slo=objectives) for key in ids}
        return Replay(engines, Dispatch(policy, engines, self._pairs(), objectives, self.chance))

    def drawn(self, number: int) -> Fleet:
        """Return the same fleet with all drawn anew that has no meaning: its workers' names, turns, and draws.

        Number 0 is the fleet as it is.
        """
        if number == 0:
            return self
        rng = random.Random(number)
        ids = sorted({*self.prefill_ids, *self.decode_ids})
        names = dict(zip(ids, rng.sample(range(1, MAX_NAME), len(ids)), strict=True))
        prefill_ids, decode_ids = (tuple(names[key] for key in of) for of in (self.prefill_ids, self.decode_ids))
        chance = Chance(rng.getrandbits(32), rng.randrange(MANY_CHOICES))
        return replace(self, prefill_ids=prefill_ids, decode_ids=decode_ids, chance=chance)

    def _pairs(self) -> Sequence[Pair]:
        pairs = (Pair(prefill_id, decode_id) for prefill_id in self.prefill_ids for decode_id in self.decode_ids)
        return [pair for pair in pairs if self.may_pair(pair)]


def unified(num_workers: int, hardware: Hardware, num_blocks: int) -> Fleet:
    """Workers that do both, and pair with each other as well as serve alone."""
    return Fleet(range(1, num_workers + 1), range(1, num_workers + 1), hardware, num_blocks)


def disaggregated(num_prefill: int, num_decode: int, hardware: Hardware, num_blocks: int) -> Fleet:
    """Workers of one role each."""
    decode_ids = range(num_prefill + 1, num_prefill + num_decode + 1)
    return Fleet(range(1, num_prefill + 1), decode_ids, hardware, num_blocks)
