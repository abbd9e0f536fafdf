"""Which pool of workers serves a request, where an operator has declared pools and their weights. Pure.

Rule: two declared pools never meet: no pair has one worker of each, and no output goes from one to the other. Workers
of other pools serve with all. So two revisions stand beside each other, one of which gets a small part, or none but
requests that name it.

The part that a request falls into is drawn from its session, else from its id: a session stays in its pool, a request
that is tried again, too, and when a weight grows only those move that now belong there. A pool that has no pair which
may serve, or none that has not failed this request, gives its part to the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Final

from diptych.router.workers.worker_view import Pair

Weights = Mapping[str, float]  # of declared pools, by name
REST: Final = ""  # pairs of workers that are in no declared pool
_SPACE: Final = 2.0**64


def group(pair: Pair, pools: Mapping[int, str], weights: Weights) -> str | None:
    """Return the declared pool of a pair, by the pools of workers; `REST`: none. None: its workers never meet."""
    named = {pool for pool in (pools.get(pair.prefill_id, ""), pools.get(pair.decode_id, "")) if pool in weights}
    if len(named) > 1:
        return None
    return named.pop() if named else REST


def meeting(pairs: Iterable[Pair], pools: Mapping[int, str], weights: Weights) -> tuple[Pair, ...]:
    """Return the pairs whose workers may meet."""
    if not weights:
        return tuple(pairs)
    return tuple(pair for pair in pairs if group(pair, pools, weights) is not None)


def grouped(pairs: Iterable[Pair], pools: Mapping[int, str], weights: Weights) -> dict[str, tuple[Pair, ...]]:
    """Return the pairs of each pool that has one."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        if (name := group(pair, pools, weights)) is not None:
            found.setdefault(name, []).append(pair)
    return {name: tuple(each) for name, each in found.items()}


def may_serve(name: str, weights: Weights, asked: str) -> bool:
    """Whether workers of a pool may serve requests that name the pool `asked`; empty: that name none."""
    if name not in weights:
        return True
    return name == asked if asked else weights[name] > 0.0


def choose_pool(there: Collection[str], weights: Weights, key: str) -> str | None:
    """Return which of these pools serves the requests of a key, if they name none; None: none of them does.

    Pairs outside of all declared pools serve only where no declared pool with a weight can. By weighted rendezvous
    hashing (Schindelhauer and Schomaker 2005, "Weighted Distributed Hash Tables"): a pool with a share of the weights
    gets that share of the keys, and takes keys only when its own weight grows.
    """
    shares = [name for name in there if weights.get(name, 0.0) > 0.0]
    if not shares:
        return REST if REST in there else None
    return max(shares, key=lambda name: (weights[name] / -math.log(uniform(key, name)), name))


def uniform(key: str, name: str) -> float:
    """Return a number above 0 and below 1, always the same for these."""
    digest = blake2b(f"{len(key)} {key}{name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / _SPACE
