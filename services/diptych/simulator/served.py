"""A call on its way through the platform, and what became of it: by the router's own `Progress` and `AttemptLegs`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from diptych.common.members.roles import LegKind
from diptych.generation.output import FailureCode
from diptych.generation.request_groups import Account, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.serve.attempt_legs import REASON_GRACE_S, AttemptLegs
from diptych.router.serve.moving import Move
from diptych.router.values.failure import LegFailure
from diptych.router.values.progress import Progress
from diptych.router.values.request import ClientRequest, GenerationRequest, Tokenized
from diptych.router.workers.worker_view import Pair
from diptych.simulator.known import MODEL
from diptych.simulator.prompts import OUTPUT_TOKEN, SimPrompt, prompt_of
from diptych.simulator.setup import RouterSetup
from diptych.simulator.traces.call import Call
from diptych.v1.worker_pb2 import LegOutput

NOBODY = Pair(0, 0)


class Owner(Protocol):
    """Who started an attempt."""

    def heard(self, attempt: Attempt) -> None:
        """Its legs have said something."""
        ...

    def given(self, worker_id: int, room: int) -> int:
        """Return how many tokens of an output a worker has told of, with those that went before its leg."""
        ...

    def abort(self, worker_id: int, room: int) -> None: ...

    def after(self, seconds: float, act: Callable[[], None]) -> None: ...


class Attempt:
    """The legs of a room. Implements `LegReceiver`.

    Workers tell of single tokens in the midst of an output by their number only: they are filled in here.
    """

    def __init__(self, owner: Owner, served: Served, room: int, pair: Pair, begun: Sequence[LegKind] = ()) -> None:
        """`begun`: legs that begin at once, if not all do."""
        self.served = served
        self.room = room
        self.pair = pair
        self.is_proven = False  # both legs have done their part of an output token
        self.kinds = (LegKind.LOCAL,) if pair.is_local else (LegKind.PREFILL, LegKind.DECODE)
        self.legs = AttemptLegs(begun or self.kinds, self._abort)
        self._owner = owner
        self._next_index = 0 if pair.is_local else 1  # of the output of the leg that decodes

    # as a move needs it

    @property
    def num_tokens(self) -> int:
        if self.legs.open:
            self.fill_up_to(self._owner.given(self.worker_of(self.kinds[-1]), self.room))
        return self.legs.merger.num_tokens

    @property
    def ready(self) -> Sequence[int]:
        return self.legs.merger.ready

    @property
    def has_ended(self) -> bool:
        return self.legs.has_ended

    @property
    def has_failed(self) -> bool:
        return self.legs.failure is not None

    def pop(self) -> Sequence[int]:
        return self.legs.merger.pop()[0]

    def supersede(self) -> None:
        self._settle(LegFailure(LegKind.DECODE, FailureCode.HANDED_BACK, "another attempt goes on with it"))

    def close(self) -> None:
        self.legs.close()

    def worker_of(self, kind: LegKind) -> int:
        return self.pair.decode_id if kind is LegKind.DECODE else self.pair.prefill_id

    def receive(self, kind: LegKind, output: LegOutput) -> None:
        if kind is not LegKind.PREFILL:
            self.fill_up_to(output.first_index)
            self._next_index = max(self._next_index, output.first_index + len(output.token_ids))
        suspected = self.legs.receive(kind, output)
        if suspected is not None:
            self._owner.after(REASON_GRACE_S, lambda: self._settle(suspected))
        self._owner.heard(self)

    def lose(self, kind: LegKind, reason: str) -> None:
        if kind is not LegKind.PREFILL:
            self.fill_up_to(self._owner.given(self.worker_of(kind), self.room))
        self.legs.lose(kind, reason)
        self._owner.heard(self)

    def fill_up_to(self, index: int) -> bool:
        """Take single tokens that have come; return whether there were some."""
        count = index - self._next_index
        if count <= 0:
            return False
        self.legs.merger.accept(self._next_index, [OUTPUT_TOKEN] * count)
        self._next_index = index
        return True

    def end_by_deadline(self, words: str) -> None:
        self._settle(LegFailure(LegKind.DECODE, FailureCode.DEADLINE, words))

    def _abort(self, kind: LegKind) -> None:
        self._owner.abort(self.worker_of(kind), self.room)

    def _settle(self, failure: LegFailure) -> None:
        self.legs.settle(failure)
        self._owner.heard(self)


class Served:
    """One call. `number` is its place among all."""

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.number = number
        self.line_s = 0.0  # that its client waited before it sent the call, which arrived behind that
        self.claim = -1  # its number at admission
        self.first_s = math.nan
        self.last_s = math.nan
        self.failure = ""
        self.cached_len = 0
        self.knows_cached = False
        self.pair = NOBODY  # of the last attempt
        self.attempt: Attempt | None = None
        self.move: Move[Attempt] | None = None
        self.asked: set[Pair] = set()  # who was to hand the output on to whom
        self.has_ended = False
        self.follower: Callable[[], None] | None = None  # is told of its end
        self._prompt: SimPrompt | None = None
        self._progress: Progress | None = None

    @property
    def progress(self) -> Progress:
        assert self._progress is not None, "it has not begun"
        return self._progress

    @property
    def prompt(self) -> SimPrompt:
        """That of the next attempt."""
        return self.prompt_after(len(self.progress.output_ids))

    def prompt_after(self, num_tokens: int) -> SimPrompt:
        """That of an attempt that goes on behind so many tokens of output."""
        assert self._prompt is not None, "it has not begun"
        return self._prompt.followed_by(num_tokens)

    def begin(self, router: RouterSetup, rng: random.Random) -> None:
        """It is admitted."""
        call = self.call
        self._prompt = prompt_of(call, self.number)
        params = SamplingParams(max_tokens=call.output_len, temperature=0.0, ignore_eos=True)
        life = Life(arrival_s=call.arrival_s)
        client = ClientRequest(MODEL, (), params, account=Account(call.tenant), life=life)
        prompt = Tokenized(range(call.prompt_len))  # whose tokens are in `prompt`
        request = GenerationRequest(client, prompt, params, router.silence_s)
        self._progress = Progress(request, frozenset(), router.retries, rng)

    def end(self) -> None:
        """Forget what only its way needed."""
        self.has_ended = True
        self.attempt = self.move = self._prompt = self._progress = None
        if self.follower is not None:
            self.follower()
