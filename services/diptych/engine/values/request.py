"""One request inside a scheduler: its tokens, how far its KV has come, and what it holds.

Only the scheduler core that holds a request changes it. `tokens[:num_tokens]` is prompt and output in one array:
what an extend computes is always `[computed_len, num_tokens)`, whether the request is new, chunked or retracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from diptych.common.arrays import F32, I32, I64
from diptych.engine.cache.tier import Lookup, Restore
from diptych.engine.cache.tree.pins import Pin
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.values.token_counts import TokenCounts
from diptych.generation.finish import Finish
from diptych.generation.grammar import Matcher
from diptych.generation.insight import InsightWish
from diptych.generation.logprobs import PromptLogprobs
from diptych.generation.page_hash import chain_hashes, root_hash
from diptych.generation.request_groups import NO_ACCOUNT, NO_HINTS, NO_LIFE, Account, Hints, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, rope_shift
from diptych.generation.slo import NO_SLO, Slo
from diptych.kvtransfer.ownership import Pages

NO_PAGES: Pages = np.empty(0, dtype=np.int32)


class Snapshot(NamedTuple):
    """Pages of a request's own that hold its state after so many tokens, or will when a step has written it."""

    num_tokens: int
    pages: Pages


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Create with `new_request`."""

    room: int  # 64-bit, names this attempt on both legs
    params: SamplingParams
    account: Account
    hints: Hints
    life: Life  # on the scheduler's clock
    slo: Slo  # within what time it is served well, by the time that it is here
    extra_key: bytes  # what its hints and its adapter's weights make of it: see `page_hash.extra_key`
    tokens: I64  # room for prompt and output; valid up to num_tokens. Where content is, its keys: see `segments`
    prompt_len: int
    num_tokens: int  # prompt and output so far
    max_len: int = 0  # of num_tokens: where the output ends at the latest
    computed_len: int = 0  # tokens whose KV is in the pool, or will be when the steps launched so far have run
    cached_len: int = 0  # found in the prefix cache at admission; a multiple of the page size
    is_imported: bool = False  # its KV is another worker's, which sends some in any case
    row: int = -1  # in the page table; -1: not admitted
    num_pages: int = 0  # in the page table row
    node: Node | None = field(default=None, repr=False)  # locked prefix in the radix tree; None: not admitted
    found: Node | None = field(default=None, repr=False)  # the last one that its text led to: not locked, may be gone
    restore: Restore | Lookup | None = None  # of its prefix, for which it waits; None: it was not admitted otherwise
    lookup: Lookup | None = field(default=None, repr=False)  # of its text in a store, the only one
    num_restores: int = 0  # for which it has let others pass
    restored: list[Restore] = field(default_factory=list, repr=False)  # that were begun for it while it waited
    job_s: float = 0.0  # how long before it the job began that it goes on with: see `sessions`
    computed_by: int = 0  # the peer that computed its prompt; 0: none
    pinned: tuple[Node, Pin] | None = field(default=None, repr=False)  # keeps its prefix while it waits: see `sessions`
    turn: int = 0  # its place among those whose prompts are computed here, kept while it lets others pass; 0: none yet
    page_names: list[int] = field(default_factory=list, repr=False)  # of its whole pages: see `page_names`
    end_ids: frozenset[int] = frozenset()  # tokens that end its output
    has_ended: bool = False  # answered; a step that is launched may still compute a token of it
    samples_plainly: bool = True  # `params.is_plain`, which every step asks
    insight: InsightWish | None = None  # `params.insight`, which every step asks
    counts: TokenCounts | None = None  # None: the request has no penalties
    prompt_logprobs: PromptLogprobs | None = None  # None: not wanted
    given_len: int = 0  # tokens not to be computed for it here, as far as is known: cached, coming, or another worker's
    num_prior_output_tokens: int = 0  # of the prompt's tail: output of an earlier attempt
    adapter: int = NO_ADAPTER  # number of the adapter it runs with
    adapter_slot: int = NO_ADAPTER  # where that is in the model, while the request is computed
    contents: Sequence[ContentSegment] = ()  # of the prompt: what is no tokens
    rope_shift: int = 0  # of its output, see `rope_shift`
    state_len: int = 0  # tokens whose state a peer writes or reads, in pages of the request's own; 0: none does
    state_from: Pages | None = None  # what the next step begins with; no pages: nothing; None: it goes on
    late_len: int = 0  # tokens of its last row that came true, which the state in its slot has not seen yet
    state_node: Node | None = field(default=None, repr=False)  # whose state that is, until the step is over
    first_window: int = 0  # the first page that it holds in layers with a window
    windows_end: int = 0  # behind the last of them: while its prompt is computed there are fewer than others
    first_own_window: int = 0  # and the first of those that are its own; the others belong to the tree
    windows_whole_from: int = 0  # the first token of which a peer sent that: before it pages hold what nobody sees
    windows_since: int = 0  # where the first node begins whose windows it has locked
    kind: tuple[int, int] = (0, 0)  # of its prompt, by which it is guessed whether others go on there: see `turns`
    cuts: tuple[int, ...] = ()  # chunks end after so many tokens, for others to begin there
    snapshots: list[Snapshot] = field(default_factory=list, repr=False)
    allowed: I32 | None = field(default=None, repr=False)  # `allowed_token_ids` as a mask, once a step has needed it
    matcher: Matcher | None = None  # None: the request has no grammar, or it is being compiled
    is_idle_work: bool = False  # prompts of requests that are not so are computed before it, for a bounded time
    is_whole: bool = False  # one step computes all of its prompt, whatever is cached
    encodes: ContentSegment | None = None  # whose rows its pages are for: it has no text. None: for keys and values
    processor_params: Mapping[str, Any] | None = field(default=None, repr=False)  # read, once a step has needed them
    processor_error: str = ""  # why its logits could not be changed
    labels: tuple[int, ...] = ()  # tokens whose log-probabilities behind its prompt are its vector; none: see the model
    vector: F32 | None = field(default=None, repr=False)  # what has been made of its prompt, where no text is

    @property
    def matchable_len(self) -> int:
        """Tokens whose KV may come from the prefix cache. The last one is computed all the same, for its logits."""
        if self.is_whole:
            return 0
        most = self.num_tokens - 1 if self.is_imported else self.num_tokens
        return most if self.prompt_logprobs is None else min(most, self.prompt_logprobs.start)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def is_ready(self) -> bool:
        """Whether its grammar, if it has one, is compiled."""
        return self.matcher is not None or self.params.grammar is None

    @property
    def is_full(self) -> bool:
        """Whether no further token fits."""
        return self.num_tokens >= self.max_len

    @property
    def grammar_finish(self) -> Finish | None:
        """How it ends if its grammar lets nothing follow."""
        return Finish.STOP if self.matcher is not None and self.matcher.is_finished else None

    @property
    def extend_len(self) -> int:
        """Tokens that an extend still has to compute."""
        return self.num_tokens - self.computed_len

    @property
    def has_begun(self) -> bool:
        """Whether some of it has been computed since it was admitted."""
        return self.computed_len > min(self.cached_len, self.num_tokens - 1)

    @property
    def expected_len(self) -> int:
        """Tokens that an extend will have to compute, as far as is known while it waits."""
        return self.num_tokens - self.given_len

    def append(self, token_id: int) -> None:
        """Take a sampled token. Its KV is computed by the next step."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1


def new_request(
    room: int,
    prompt: I64,
    params: SamplingParams,
    *,
    account: Account = NO_ACCOUNT,
    hints: Hints = NO_HINTS,
    life: Life = NO_LIFE,
    slo: Slo = NO_SLO,
    extra_key: bytes = b"",
    num_prior_output_tokens: int = 0,
    adapter: int = NO_ADAPTER,
    contents: Sequence[ContentSegment] = (),
    labels: tuple[int, ...] = (),
) -> Request:
    """Return a request that waits for admission. `prompt` is copied; its tail may be output of an earlier attempt.

    A prompt with `contents` is given by its keys.
    """
    prompt_len = len(prompt)
    tokens = np.empty(prompt_len + params.max_tokens, dtype=np.int64)
    tokens[:prompt_len] = prompt
    is_plain = params.is_plain
    request = Request(
        room=room,
        params=params,
        account=account,
        hints=hints,
        life=life,
        slo=slo,
        extra_key=extra_key,
        tokens=tokens,
        prompt_len=prompt_len,
        num_tokens=prompt_len,
        max_len=len(tokens),
        samples_plainly=is_plain and not labels,
        insight=None if is_plain else params.insight,
        num_prior_output_tokens=num_prior_output_tokens,
        adapter=adapter,
        adapter_slot=adapter,
        contents=contents,
        rope_shift=rope_shift(contents) if contents else 0,
        labels=labels,
    )
    if not is_plain and params.has_penalties:
        request.counts = TokenCounts(
            prompt_len=prompt_len - num_prior_output_tokens,
            max_tokens=len(tokens),
            counts_prompt=params.repetition_penalty != 1.0,
        )
    if params.prompt_logprobs is not None and prompt_len > 0:
        request.prompt_logprobs = PromptLogprobs(prompt_len, params.prompt_logprobs, params.prompt_logprobs_start)
    return request


def page_names(request: Request, page_size: int) -> list[int]:
    """Return the names of the request's whole pages. They are kept with it, for it is asked about again and again."""
    known, num_pages = len(request.page_names), request.num_tokens // page_size
    if known < num_pages:
        previous = request.page_names[-1] if known else root_hash(request.extra_key)
        tokens = request.tokens[known * page_size : num_pages * page_size]
        request.page_names += chain_hashes(previous, tokens, page_size).tolist()
    return request.page_names
