"""Which prefill and decode workers may serve a request together.

Rule: both are ready and not paused, their sessions are open, they serve the wanted model on terms that match, and each
says that it is linked to the other. A unified worker is a pair of its own too, and needs no link for that.
For a request with an adapter both have it loaded, with the same weights.

A request that runs may go on at another worker that makes outputs, by the same rule, but that its own worker needs no
more than an open session: it may be about to leave, or take nothing new. It must be one that hands requests on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from diptych.common.members.record import State
from diptych.common.members.roles import LegKind
from diptych.common.members.terms import Feature, mismatch
from diptych.router.workers.worker_view import Pair, WorkerView

TEXT_KINDS: Final = (LegKind.PREFILL, LegKind.DECODE)  # the legs of a request for text
VECTOR_KINDS: Final = (LegKind.POOL,)  # and of one for a vector

NUM_REASONS: Final = 3  # that are told for workers whose terms differ


def pair_up(workers: Iterable[WorkerView], model_id: str) -> tuple[Pair, ...]:
    """Return every pair that may serve `model_id`, in a fixed order."""
    usable = [worker for worker in workers if _is_usable(worker, model_id)]
    return tuple(sorted(Pair(p.instance_id, d.instance_id) for p, d in _candidates(usable) if _match(p, d)))


def singles(workers: Iterable[WorkerView], model_id: str) -> tuple[Pair, ...]:
    """Return every worker that may compute a prompt of which no text is made, each as a pair with itself, in order."""
    usable = [worker for worker in workers if _is_usable(worker, model_id) and worker.role.serves(LegKind.POOL)]
    return tuple(sorted(Pair(worker.instance_id, worker.instance_id) for worker in usable))


def successions(workers: Iterable[WorkerView], model_id: str) -> tuple[Pair, ...]:
    """Return of each worker that makes outputs who may go on with them, as pairs, in a fixed order."""
    making = [each for each in workers if each.session_open and each.role.serves(LegKind.DECODE)]
    usable = [worker for worker in making if _is_usable(worker, model_id)]
    giving = [worker for worker in making if worker.terms.has(Feature.MOVE)]
    both = [(old, new) for old in giving for new in usable if old is not new and _match(old, new)]
    return tuple(sorted(Pair(old.instance_id, new.instance_id) for old, new in both))


def vacating(workers: Iterable[WorkerView]) -> frozenset[int]:
    """Return the workers that are reached, and wait for what runs there to end: they leave, or become another."""
    return frozenset(
        each.instance_id
        for each in workers
        if each.session_open and (each.paused or each.state is State.DRAINING) and each.role.serves(LegKind.DECODE)
    )


def partners(pairs: Iterable[Pair]) -> dict[int, list[int]]:
    """Return the decode workers of each prefill worker, in the order of `pairs`."""
    found: dict[int, list[int]] = {}
    for pair in pairs:
        found.setdefault(pair.prefill_id, []).append(pair.decode_id)
    return found


def mismatches(workers: Iterable[WorkerView]) -> dict[Pair, str]:
    """Return the pairs that may not serve together because of their terms, each with the reason."""
    reasons = {Pair(p.instance_id, d.instance_id): mismatch(p.terms, d.terms) for p, d in _candidates(workers)}
    return {pair: reason for pair, reason in reasons.items() if reason}


def with_adapter(pairs: Iterable[Pair], workers: Iterable[WorkerView], name: str) -> tuple[Pair, ...]:
    """Return the pairs of which both workers have the same weights loaded under `name`."""
    loaded = {worker.instance_id: worker.adapters.get(name) for worker in workers}
    return tuple(p for p in pairs if loaded[p.prefill_id] is not None and loaded[p.prefill_id] == loaded[p.decode_id])


def adapters(workers: Iterable[WorkerView]) -> tuple[str, ...]:
    """Return the adapters that clients may ask for: some ready worker for each leg has the same weights."""
    ready = [worker for worker in workers if worker.state is State.READY]
    found = [{item for w in ready if w.role.serves(kind) for item in w.adapters.items()} for kind in TEXT_KINDS]
    return tuple(sorted(name for name, _ in set.intersection(*found)))


def least_blamed(pairs: Collection[Pair], blamed: Collection[int]) -> tuple[Pair, ...]:
    """Return the pairs with the fewest instances out of `blamed`: a failed worker serves again if there is no other."""
    if not blamed:
        return tuple(pairs)
    counts = {pair: len({pair.prefill_id, pair.decode_id}.intersection(blamed)) for pair in pairs}
    fewest = min(counts.values(), default=0)
    return tuple(pair for pair, count in counts.items() if count == fewest)


def heard(pairs: Collection[Pair], workers: Iterable[WorkerView]) -> tuple[Pair, ...]:
    """Return the pairs with the fewest silent workers: one that only computes for long serves if there is no other."""
    return least_blamed(pairs, {worker.instance_id for worker in workers if worker.is_silent})


def has_fresh(pairs: Iterable[Pair], blamed: Collection[int]) -> bool:
    """Whether some pair has no instance out of `blamed`."""
    return any(pair.prefill_id not in blamed and pair.decode_id not in blamed for pair in pairs)


def is_missing(workers: Iterable[WorkerView], kinds: Sequence[LegKind] = TEXT_KINDS) -> bool:
    """Whether no worker for some leg is listed at all: none that could serve, starts, or is about to be replaced."""
    roles = {worker.role for worker in workers}
    return not all(any(role.serves(kind) for role in roles) for kind in kinds)


def is_cold(workers: Iterable[WorkerView], kinds: Sequence[LegKind] = TEXT_KINDS) -> bool:
    """Whether no worker for some leg is ready: one starts, or has to be started."""
    roles = {worker.role for worker in workers if worker.state is State.READY}
    return not all(any(role.serves(kind) for role in roles) for kind in kinds)


def explain(workers: Collection[WorkerView], model_id: str, kinds: Sequence[LegKind] = TEXT_KINDS) -> str:
    """Say in words why `pair_up`, or `singles`, returns nothing."""
    serving = [worker for worker in workers if worker.model_id == model_id]
    for kind in kinds:
        group = [worker for worker in serving if worker.role.serves(kind)]
        if not any(_is_usable(worker, model_id) for worker in group):
            return f"no {kind.value} worker for {model_id} is usable: {_describe(group)}{_others(workers, model_id)}"
    usable = [worker for worker in serving if _is_usable(worker, model_id)]
    apart = mismatches(usable)
    if len(apart) == len(_candidates(usable)):
        return f"no prefill and decode worker may pair: {_list(apart)}"
    others = f"; others may not pair: {_list(apart)}" if apart else ""
    return f"prefill and decode workers are ready, but their transfer links are not up yet{others}"


def _is_usable(worker: WorkerView, model_id: str) -> bool:
    takes_legs = worker.state is State.READY and worker.session_open and not worker.paused
    return takes_legs and worker.model_id == model_id


def _candidates(workers: Iterable[WorkerView]) -> list[tuple[WorkerView, WorkerView]]:
    everybody = list(workers)
    prefills = [worker for worker in everybody if worker.role.serves(LegKind.PREFILL)]
    decodes = [worker for worker in everybody if worker.role.serves(LegKind.DECODE)]
    return [(p, d) for p in prefills for d in decodes]


def _match(prefill: WorkerView, decode: WorkerView) -> bool:
    if prefill.instance_id == decode.instance_id:
        return True
    linked = decode.instance_id in prefill.linked and prefill.instance_id in decode.linked
    return linked and not mismatch(prefill.terms, decode.terms)


def _list(apart: Mapping[Pair, str]) -> str:
    """The most frequent reasons, each with a pair that it keeps apart."""
    examples = {reason: pair for pair, reason in sorted(apart.items(), reverse=True)}
    return ", ".join(
        f"{reason} ({examples[reason]}{f' and {count - 1} more' if count > 1 else ''})"
        for reason, count in Counter(apart.values()).most_common(NUM_REASONS)
    )


def _describe(group: Collection[WorkerView]) -> str:
    if not group:
        return "none is registered"
    words = Counter(_condition(worker) for worker in group)
    return ", ".join(f"{count} {word}" for word, count in sorted(words.items()))


def _condition(worker: WorkerView) -> str:
    if worker.paused:
        return "paused for an update"
    if worker.state is State.READY and worker.is_silent:
        return "ready but its scheduler is silent"
    if worker.state is State.READY:
        return "ready but not connected to this router"
    return f"not ready ({worker.not_ready})" if worker.not_ready else worker.state.name.lower()


def _others(workers: Iterable[WorkerView], model_id: str) -> str:
    names = sorted({worker.model_id for worker in workers} - {model_id})
    return f" (other workers serve {', '.join(names)})" if names else ""
