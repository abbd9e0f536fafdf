"""A line of the request log: what a request was like and how it was served, never what it said. Pure.

Simulations replay the log, so a prompt's blocks are named: by hashes that tell which prompts begin alike, and nothing
else to whoever does not know the tokens. Who can guess all of a prompt can see that the guess is right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.generation.page_hash import chain_hashes, root_hash

BLOCK_TOKENS: Final = 512
FORMAT: Final = "diptych-request-1"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One output that a client asked for, once it has ended."""

    arrival: float  # seconds since 1970
    prompt_len: int  # tokens
    output_len: int  # tokens that were made
    cached_len: int  # of the prompt, where it was computed first
    blocks: str  # 16 hexadecimal digits for each 512 tokens of the prompt; empty: workers made the tokens
    session: str  # the client's name for it, hashed; empty: it gave none
    tier: str
    ttft_s: float | None  # since its arrival; None: there was no token
    tpot_s: float | None  # None: there was one token at most
    finish: str  # how it ended; empty: it was broken off

    def to_line(self) -> str:
        return (
            json.dumps({"log": FORMAT, **{name: getattr(self, name) for name in _FIELDS}}, separators=(",", ":")) + "\n"
        )


_FIELDS: Final = tuple(field.name for field in fields(LoggedRequest))


def logged_request(row: dict[str, Any]) -> LoggedRequest:
    """Return what a line's object says. Raises `TypeError` for a field that is missing, or more than known."""
    return LoggedRequest(**{name: value for name, value in row.items() if name != "log"})


def block_names(token_ids: I64, extra_key: bytes) -> str:
    """Name a prompt's blocks, each by all tokens up to its end; the last one need not be full."""
    names = chain_hashes(root_hash(extra_key), token_ids, BLOCK_TOKENS)
    rest = token_ids[len(names) * BLOCK_TOKENS :]
    if len(rest):
        before = int(names[-1]) if len(names) else root_hash(extra_key)
        names = np.concatenate([names, chain_hashes(before, rest, len(rest))])
    return names.astype(">u8").tobytes().hex()


def names_in(blocks: str) -> U64:
    """Return the names that `block_names` wrote. Raises `ValueError` for what it did not write."""
    return np.frombuffer(bytes.fromhex(blocks), ">u8").astype(np.uint64)
