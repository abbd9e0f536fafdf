"""Says of every two workers that could serve together by their roles, and do not, why: the rules of pairing, in words.

Those come first of which both may serve, since what keeps them apart is between them. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from diptych.common.members.record import State
from diptych.common.members.roles import LegKind
from diptych.common.members.terms import Terms, mismatch
from diptych.router.choose.breakers import Pause, Suspect
from diptych.router.console.fleet.worker_facts import WorkerFacts
from diptych.router.console.pieces import Pieces
from diptych.router.console.state import Unpaired
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import (
    LINK_STATE_CONNECTING,
    LINK_STATE_REFUSED,
    LINK_STATE_TESTING,
    LINK_STATE_UP,
    LinkStatus,
)

MAX_UNPAIRED: Final = 200  # that are told
_STATE_NAMES: Final[Mapping[int, str]] = {
    LINK_STATE_CONNECTING: "connecting",
    LINK_STATE_TESTING: "testing",
    LINK_STATE_UP: "up",
    LINK_STATE_REFUSED: "refused",
}

Facts = Mapping[int, WorkerFacts]


class Apart(NamedTuple):
    """Workers that do not serve together."""

    told: dict[str, Unpaired]  # by `PREFILL-DECODE`
    number: int  # of all


def unpaired_of_all(
    workers: Sequence[WorkerFacts], model_ids: Sequence[str], pauses: Mapping[Suspect, Pause]
) -> Pieces[Apart]:
    """Return the same of each model's workers by themselves; those of no model are told of with the first one's."""
    first, *others = model_ids
    told: dict[str, Unpaired] = {}
    number = 0
    for model_id in model_ids:
        own = [each for each in workers if (each.view.model_id if each.view.model_id in others else first) == model_id]
        apart = yield from unpaired(own, model_id, pauses)
        told |= dict(itertools.islice(apart.told.items(), MAX_UNPAIRED - len(told)))
        number += apart.number
    return Apart(told, number)


def unpaired(workers: Sequence[WorkerFacts], model_id: str, pauses: Mapping[Suspect, Pause]) -> Pieces[Apart]:
    """Return who does not serve `model_id` together, and why."""
    obstacles = {each.instance_id: words for each in workers if (words := obstacle(each, model_id))}
    able = [each for each in workers if each.instance_id not in obstacles]
    kept_apart = yield from _kept_apart(able)
    apart = [*kept_apart, *_avoided(pauses, able)]
    yield
    told = {_name(pair): _words(pair, why) for pair, why in itertools.islice(apart, MAX_UNPAIRED)}
    unable = _with_obstacles(workers, obstacles)
    for pair, why in itertools.islice(unable, MAX_UNPAIRED - len(told)):
        told[_name(pair)] = _words(pair, why)
    return Apart(told, len(apart) + _num_with_obstacles(workers, obstacles))


def obstacle(worker: WorkerFacts, model_id: str) -> str:
    """Say why a worker serves with nobody; "" when it may."""
    view = worker.view
    if view.model_id != model_id:
        return f"serves {view.model_id or 'no model yet'}, not {model_id}"
    if view.paused:
        return "is paused for an update"
    if view.state is not State.READY:
        return f"is not ready: {view.not_ready}" if view.not_ready else f"is {view.state.name.lower()}"
    if view.session_open:
        return ""
    return f"is ready, but {'its scheduler is silent' if view.is_silent else 'this router is not connected to it'}"


def _kept_apart(able: Sequence[WorkerFacts]) -> Pieces[list[tuple[Pair, str]]]:
    """Return the pairs of workers that may serve, but for what is between them.

    Sets do what grows with the square of the workers.
    """
    facts = {each.instance_id: each for each in able}
    decodes = frozenset(key for key, each in facts.items() if each.view.role.serves(LegKind.DECODE))
    linked_by: dict[int, set[int]] = {}  # those that say that they are linked to it
    for decode_id in decodes:
        for peer_id in facts[decode_id].view.linked:
            linked_by.setdefault(peer_id, set()).add(decode_id)
        yield
    matching = _matching(able, decodes)
    found = []
    for prefill in able:
        if prefill.view.role.serves(LegKind.PREFILL):
            key = prefill.instance_id
            paired = prefill.view.linked & linked_by.get(key, set()) & matching[prefill.view.terms]
            found += [(Pair(key, each), _between(prefill, facts[each])) for each in sorted(decodes - paired - {key})]
            yield
    return found


def _matching(able: Sequence[WorkerFacts], decodes: frozenset[int]) -> dict[Terms, frozenset[int]]:
    """Return the decode workers whose terms match, for all terms that there are: few."""
    by_terms: dict[Terms, set[int]] = {}
    for each in able:
        by_terms.setdefault(each.view.terms, set()).add(each.instance_id)
    return {
        terms: frozenset().union(*(ids & decodes for other, ids in by_terms.items() if not mismatch(terms, other)))
        for terms in by_terms
    }


def _between(prefill: WorkerFacts, decode: WorkerFacts) -> str:
    """Say what keeps two workers apart that may both serve."""
    if words := mismatch(prefill.view.terms, decode.view.terms):
        versions = prefill.record.version, decode.record.version
        return words if versions[0] == versions[1] else f"{words} (versions {versions[0]} and {versions[1]})"
    problems = [words for words in (_link_words(prefill, decode), _link_words(decode, prefill)) if words]
    return f"not linked: {problems[0]}" if problems else "not linked yet"


def _link_words(worker: WorkerFacts, peer: WorkerFacts) -> str:
    """Say how a worker's link to a peer is; "" when it is up, or the worker has not told."""
    link = next((each for each in worker.links if each.peer_instance_id == peer.instance_id), None)
    if link is None or link.state == LINK_STATE_UP:
        return ""
    return f"{state_name(link)}, {link.reason}" if link.reason else state_name(link)


def state_name(link: LinkStatus) -> str:
    """Return "down", "connecting", "testing", "up" or "refused"."""
    return _STATE_NAMES.get(link.state, "down")


def _avoided(pauses: Mapping[Suspect, Pause], able: Sequence[WorkerFacts]) -> Iterator[tuple[Pair, str]]:
    """Yield the pairs whose link is left alone."""
    ids = {each.instance_id for each in able}
    for suspect, pause in pauses.items():
        if isinstance(suspect, Pair) and not suspect.is_local and {suspect.prefill_id, suspect.decode_id} <= ids:
            yield suspect, str(pause)


def _with_obstacles(workers: Sequence[WorkerFacts], obstacles: Mapping[int, str]) -> Iterator[tuple[Pair, str]]:
    prefills, decodes = _of_kind(workers, LegKind.PREFILL), _of_kind(workers, LegKind.DECODE)
    for prefill, decode in itertools.product(prefills, decodes):
        if prefill != decode and (prefill in obstacles or decode in obstacles):
            whose = "prefill worker" if prefill in obstacles else "decode worker"
            yield Pair(prefill, decode), f"the {whose} {obstacles.get(prefill) or obstacles[decode]}"


def _num_with_obstacles(workers: Sequence[WorkerFacts], obstacles: Mapping[int, str]) -> int:
    prefills, decodes = _of_kind(workers, LegKind.PREFILL), _of_kind(workers, LegKind.DECODE)
    return _num_pairs(prefills, decodes) - _num_pairs(prefills - obstacles.keys(), decodes - obstacles.keys())


def _num_pairs(prefills: set[int], decodes: set[int]) -> int:
    return len(prefills) * len(decodes) - len(prefills & decodes)


def _of_kind(workers: Sequence[WorkerFacts], kind: LegKind) -> set[int]:
    return {each.instance_id for each in workers if each.view.role.serves(kind)}


def _name(pair: Pair) -> str:
    return f"{pair.prefill_id:016x}-{pair.decode_id:016x}"


def _words(pair: Pair, why: str) -> Unpaired:
    return Unpaired(prefill=f"{pair.prefill_id:016x}", decode=f"{pair.decode_id:016x}", why=why)
