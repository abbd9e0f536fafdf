"""Which prefill and decode workers may serve a request together.

Rule: both are ready and not paused, their sessions are open, they serve the wanted model with equal `compat`, and each
says that it is linked to the other.
For a request with an adapter both have it loaded, with the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from diptych.common.membership import State
from diptych.router.worker_view import Pair, Role, WorkerView


def pair_up(workers: Iterable[WorkerView], model_id: str) -> tuple[Pair, ...]:
    """Return every pair that may serve `model_id`, in a fixed order."""
    usable = [worker for worker in workers if _is_usable(worker, model_id)]
    prefills = [worker for worker in usable if worker.role is Role.PREFILL]
    decodes = [worker for worker in usable if worker.role is Role.DECODE]
    pairs = (Pair(p.instance_id, d.instance_id) for p in prefills for d in decodes if _match(p, d))
    return tuple(sorted(pairs))


def with_adapter(pairs: Iterable[Pair], workers: Iterable[WorkerView], name: str) -> tuple[Pair, ...]:
    """Return the pairs of which both workers have the same weights loaded under `name`."""
    loaded = {worker.instance_id: worker.adapters.get(name) for worker in workers}
    return tuple(p for p in pairs if loaded[p.prefill_id] is not None and loaded[p.prefill_id] == loaded[p.decode_id])


def adapters(workers: Iterable[WorkerView]) -> tuple[str, ...]:
    """Return the adapters that clients may ask for: some ready worker of each role has the same weights loaded."""
    ready = [worker for worker in workers if worker.state is State.READY]
    found = [{item for worker in ready if worker.role is role for item in worker.adapters.items()} for role in Role]
    return tuple(sorted(name for name, _ in set.intersection(*found)))


def least_blamed(pairs: Collection[Pair], blamed: Collection[int]) -> tuple[Pair, ...]:
    """Return the pairs with the fewest instances out of `blamed`: a failed worker serves again if there is no other."""
    counts = {pair: (pair.prefill_id in blamed) + (pair.decode_id in blamed) for pair in pairs}
    fewest = min(counts.values(), default=0)
    return tuple(pair for pair, count in counts.items() if count == fewest)


def has_fresh(pairs: Iterable[Pair], blamed: Collection[int]) -> bool:
    """Whether some pair has no instance out of `blamed`."""
    return any(pair.prefill_id not in blamed and pair.decode_id not in blamed for pair in pairs)


def explain(workers: Collection[WorkerView], model_id: str) -> str:
    """Say in words why `pair_up` returns nothing."""
    serving = [worker for worker in workers if worker.model_id == model_id]
    for role in Role:
        group = [worker for worker in serving if worker.role is role]
        if not any(_is_usable(worker, model_id) for worker in group):
            return f"no {role.value} worker for {model_id} is usable: {_describe(group)}{_others(workers, model_id)}"
    usable = [worker for worker in serving if _is_usable(worker, model_id)]
    if len({worker.compat for worker in usable}) > 1:
        return "prefill and decode workers differ in weights, vocabulary, KV shape of the model or protocol version"
    return "prefill and decode workers are ready, but their transfer links are not up yet"


def _is_usable(worker: WorkerView, model_id: str) -> bool:
    takes_legs = worker.state is State.READY and worker.session_open and not worker.paused
    return takes_legs and worker.model_id == model_id


def _match(prefill: WorkerView, decode: WorkerView) -> bool:
    linked = decode.instance_id in prefill.linked and prefill.instance_id in decode.linked
    return linked and prefill.compat == decode.compat


def _describe(group: Collection[WorkerView]) -> str:
    if not group:
        return "none is registered"
    words = Counter(_condition(worker) for worker in group)
    return ", ".join(f"{count} {word}" for word, count in sorted(words.items()))


def _condition(worker: WorkerView) -> str:
    if worker.paused:
        return "paused for an update"
    if worker.state is State.READY:
        return "ready but not connected to this router"
    return f"not ready ({worker.not_ready})" if worker.not_ready else worker.state.name.lower()


def _others(workers: Iterable[WorkerView], model_id: str) -> str:
    names = sorted({worker.model_id for worker in workers} - {model_id})
    return f" (other workers serve {', '.join(names)})" if names else ""
