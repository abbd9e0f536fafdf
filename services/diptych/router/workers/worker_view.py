"""Workers as the deciding modules see them: values, taken at the moment of a decision.

What is made of each worker for each choice is a named tuple: it takes a fifth of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.common.members.terms import Terms
from diptych.generation.slo import Slo

UNTESTED_BYTES_PER_S: Final = 1e9  # of a link


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What decides whether a worker may serve, and with whom."""

    instance_id: int
    role: Role
    state: State
    model_id: str  # that it was started with: its weights may have been updated since
    terms: Terms  # pairs need matching ones
    session_open: bool
    linked: frozenset[int]  # peers to which it has a transfer endpoint
    adapters: Mapping[str, str] = field(default_factory=dict)  # loaded: name to fingerprint
    paused: bool = False  # takes no new legs for a moment
    not_ready: str = ""  # why a worker that has loaded is not ready
    is_silent: bool = False  # its scheduler has not been heard for longer than a step may take
    pool: str = ""  # empty: none was named


class TierPrice(NamedTuple):
    """What it takes to bring cached tokens back from a tier of a worker, with what waits there."""

    name: str
    base_s: float  # infinite: nothing is loaded from there now
    token_s: float = 0.0

    def load_s(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


class WorkerLoad(NamedTuple):
    """How busy a worker is: the larger of what it reported last and what this router has open there.

    The larger, not the sum: a report already counts the legs of this router, only later.
    """

    num_requests: int
    queued_tokens: int  # prompt tokens that wait to be computed
    free_tokens: int  # KV memory, in tokens
    has_credit: bool = True  # decode: it can grant pages now; False while requests there wait for theirs
    queued_transfer_bytes: int = 0  # prefill: of KV, not yet at the decode workers
    link_speeds: Mapping[int, float] = MappingProxyType({})  # prefill: bytes/s to peers, where measured
    num_queued: int = 0  # requests whose prompts wait to be computed
    context_tokens: int = 0  # of all requests there, as far as their KV is
    prompt_budget: int = -1  # tokens of prompts that a step may have beside its outputs; -1: any number
    output_tokens: int = 0  # contexts of requests that make output there, or will when their prompts are computed
    num_outputs: int = 0  # such requests of this router
    output_step_s: float = 0.0  # of a step without prompts, for outputs without context; 0: not measured
    context_token_s: float = 0.0  # and for each token of their contexts
    prompt_token_s: float = 0.0  # that a token at the beginning of a prompt adds to a step; 0: not measured
    outputs: Sequence[tuple[Slo, int]] = ()  # that are made there for this router, by their SLOs; none: nobody said one
    num_own: int = 0  # of `num_requests`, those of this router
    left_tokens: int = 0  # of `queued_tokens`, those that are left of prompts which are computed, as far as is known
    tiers: Sequence[TierPrice] = ()  # of its prefix cache, below the pool, in the order of their levels

    def tested_s(self, peer_id: int, num_bytes: float) -> float:
        """Return how long so much KV takes to a peer at the speed that a test of the link found."""
        return num_bytes / self.link_speed(peer_id)

    def link_speed(self, peer_id: int) -> float:
        """Return how many bytes/s a test of the link to a peer found."""
        return self.link_speeds.get(peer_id) or UNTESTED_BYTES_PER_S


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """Who prefills and who decodes, by instance id. The same one: a unified worker serves the request alone."""

    prefill_id: int
    decode_id: int

    def __str__(self) -> str:
        return f"prefill {self.prefill_id:016x} with decode {self.decode_id:016x}"

    @property
    def is_local(self) -> bool:
        return self.prefill_id == self.decode_id

    @property
    def num_workers(self) -> int:
        return 1 if self.is_local else 2
