"""What a request says beside its prompt and its sampling parameters, in groups that every stage hands on whole.

The router's request and the scheduler's hold the same three values, and `codec` writes them into a leg and reads them
from it. So a field of a group is carried everywhere by being one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import InvalidRequest

MAX_TENANT_LEN: Final = 256
MAX_PRIORITY: Final = 100
OF_MODEL: Final = "draft"  # guesses by a draft model
OF_NEXT_LAYER: Final = "mtp"  # by a layer of the model that predicts one token more
OF_HEAD: Final = "eagle"  # by an EAGLE-3 head that was made for the model
# of which one guesses how a request goes on
DRAFT_SOURCES: Final = ("suffix", "ngram", OF_MODEL, OF_NEXT_LAYER, OF_HEAD)
MAX_TOOL_LEN: Final = 64  # characters of a tool's name that tell tools apart
MAX_EXPECTED_TOKENS: Final = 2**24  # of an output
NO_DRAFTS: Final = "off"


@dataclass(frozen=True, slots=True)
class Account:
    """Whose request it is, and where it stands among those of others. Construct, then `validate()`."""

    tenant: str = ""  # whose share of the workers it counts against; empty: the common one
    priority: int = 0  # higher first

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field, for a value out of range."""
        if len(self.tenant) > MAX_TENANT_LEN:
            raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_LEN} characters", param="tenant")
        if abs(self.priority) > MAX_PRIORITY:
            text = f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {self.priority}"
            raise InvalidRequest(text, param="priority")


@dataclass(frozen=True, slots=True)
class Hints:
    """What a worker may have ready for it."""

    cache_namespace: bytes = b""  # prompts of different ones share no cached KV; `cache_salt` on the wire
    adapter: str = ""  # to run with; empty: none
    prediction: bytes = b""  # what its client thinks that the output will be, as `packed_tokens`; empty: nothing
    speculate: str = ""  # one of `DRAFT_SOURCES` that guesses, if the worker has it; "off": none; empty: as it does
    expected_tokens: int = 0  # how long its client thinks that the output becomes; 0: nobody said

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field, for a value that nobody serves."""
        if self.speculate:
            check_speculate(self.speculate)
        if not 0 <= self.expected_tokens <= MAX_EXPECTED_TOKENS:
            words = f"an output of {self.expected_tokens} tokens can't be expected: say 1 to {MAX_EXPECTED_TOKENS}"
            raise InvalidRequest(words, param="agent_hints.osl")


@dataclass(frozen=True, slots=True)
class Life:
    """What it is called, and how long it may take: times on the clock of the process that holds it."""

    request_id: str = ""  # for logs
    arrival_s: float = 0.0
    deadline_s: float = math.inf  # infinite: none


def check_speculate(value: str) -> None:
    """Raise `InvalidRequest` for what is neither a source nor "off"."""
    if value not in (*DRAFT_SOURCES, NO_DRAFTS):
        served = f"{', '.join(DRAFT_SOURCES)} and {NO_DRAFTS} are served"
        raise InvalidRequest(f"speculate can't be {value!r}: {served}", param="speculate")


NO_ACCOUNT: Final = Account()
NO_HINTS: Final = Hints()
NO_LIFE: Final = Life()
