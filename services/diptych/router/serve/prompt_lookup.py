"""Finds out of a prompt what routing depends on: its length, its family, and who has how much of it cached.

By its tokens, or, where the workers tokenise it, by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.generation import page_hash
from diptych.generation.page_hash import extra_key, prompt_hash
from diptych.generation.segments import content_len, prompt_keys
from diptych.router.choose.page_chain import page_hashes
from diptych.router.request import GenerationRequest
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.worker_view import Pair

PREFIX_TOKENS: Final = 256  # of a prompt, that name its family


def _nobody_asks(pair: Pair) -> None:
    pass


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """What is known of a prompt."""

    num_tokens: int
    key: int = 0  # of its beginning
    cached_tokens: Mapping[int, int] = field(default_factory=dict)  # by worker; who has none is left out
    sent: Callable[[Pair], None] = _nobody_asks  # to be called when a pair has been chosen for it


def measure(fleet: Fleet, request: GenerationRequest, prompt_ids: Sequence[int]) -> FoundPrompt:
    """Return the length of a prompt only: the rest takes time, and not every policy reads it."""
    text = request.prompt.text
    num_tokens = len(prompt_ids) if text is None else fleet.text_index.num_tokens(len(text.utf8))
    return FoundPrompt(num_tokens + content_len(request.prompt.contents))


def look_up(fleet: Fleet, request: GenerationRequest, prompt_ids: Sequence[int]) -> FoundPrompt:
    """Return all that is known of a prompt."""
    namespace = extra_key(request.client.hints.cache_namespace, request.client.hints.adapter)
    if request.prompt.text is not None:
        return _by_text(fleet, request.prompt.text.utf8, namespace)
    if contents := request.prompt.contents:
        return _by_keys(fleet, prompt_keys(np.array(prompt_ids, np.int64), contents), namespace)
    return _by_tokens(fleet, prompt_ids, namespace)


def _by_tokens(fleet: Fleet, prompt_ids: Sequence[int], namespace: bytes) -> FoundPrompt:
    ids = np.asarray(prompt_ids, np.uint32)
    chains = {size: page_hashes(ids, size, namespace) for size in fleet.page_sizes}
    return _found(fleet, len(ids), prompt_hash(ids[:PREFIX_TOKENS].astype(np.int64), namespace), chains)


def _by_keys(fleet: Fleet, keys: I64, namespace: bytes) -> FoundPrompt:
    """Look up a prompt with content: keys have 64 bits, of which the C knows the lower half."""
    chains = {size: page_hash.page_hashes(keys, size, namespace) for size in fleet.page_sizes}
    return _found(fleet, len(keys), prompt_hash(keys[:PREFIX_TOKENS], namespace), chains)


def _found(fleet: Fleet, num_tokens: int, key: int, chains: Mapping[int, U64]) -> FoundPrompt:
    def sent(pair: Pair) -> None:
        fleet.prefixes.sent({pair.prefill_id, pair.decode_id}, chains)

    return FoundPrompt(num_tokens, key, fleet.prefixes.cached_tokens(chains), sent)


def _by_text(fleet: Fleet, utf8: bytes, namespace: bytes) -> FoundPrompt:
    index = fleet.text_index
    chain = index.chain(utf8, namespace)
    found = index.cached_tokens(chain)
    return FoundPrompt(
        index.num_tokens(len(utf8)), index.family(utf8, namespace), found, partial(index.sent, chain=chain)
    )
