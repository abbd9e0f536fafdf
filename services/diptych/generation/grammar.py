"""What an output must match, as a value, and what the scheduler needs of its compiled form."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from diptych.common.errors import InvalidRequest

if TYPE_CHECKING:  # the process that checks grammars needs no numpy
    from diptych.common.arrays import I32

MAX_GRAMMAR_CHARS: Final = 2**18
MAX_MARK_CHARS: Final = 64  # of a preamble


class GrammarKind(enum.Enum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole output; Rust's syntax, without look-around and word boundaries
    EBNF = "ebnf"  # GBNF, as of llama.cpp; the root rule is `root`
    STRUCTURAL_TAG = "structural_tag"  # free text with tagged parts, as JSON: `triggers`, and `structures`


@dataclass(frozen=True, slots=True)
class Preamble:
    """Text of any kind in front of what must match: what a model thinks before it answers."""

    opening: str  # that it begins with, if it is there at all; empty: it has no mark, and is there
    closing: str  # ends it


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. Whether it can be compiled, `source.check` says."""

    kind: GrammarKind
    text: str
    preamble: Preamble | None = None
    said_as: str = field(default="", compare=False)  # the field in which the client said it; empty: as its kind

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of JSON values that are valid under `schema`. The order of its properties counts."""
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))

    @classmethod
    def from_choices(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of exactly these texts."""
        return cls(GrammarKind.REGEX, "|".join(_quote(choice) for choice in choices))

    def validate(self) -> None:
        """Raise `InvalidRequest` for a grammar that is larger than any worker takes."""
        if len(self.text) > MAX_GRAMMAR_CHARS:
            words = f"{self.kind.value} takes at most {MAX_GRAMMAR_CHARS} characters, not {len(self.text)}"
            raise InvalidRequest(words, param=self.kind.value)
        marks = (self.preamble.opening, self.preamble.closing) if self.preamble else ()
        if any(len(mark) > MAX_MARK_CHARS for mark in marks):
            raise InvalidRequest(f"a preamble's mark has at most {MAX_MARK_CHARS} characters", param="preamble")


def _quote(text: str) -> str:
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):X}}}" for char in text)


class Matcher(Protocol):
    """How far one request's output has come in its grammar."""

    @property
    def is_finished(self) -> bool:
        """The output is complete, and nothing may follow but an end-of-sequence token."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar can't be followed any further: the request must fail. None: all is well."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        ...

    def fill_mask(self, mask: I32, row: int) -> None:
        """Allow in a row of `[num_rows, num_words(vocab_size)]` the tokens that may come next.

        Bit i % 32 of word i // 32 is token i.
        """
        ...

    def fill_masks(self, mask: I32, row: int, guess: Sequence[int]) -> None:
        """Do so in `row` and, behind ever more tokens of a guess, in as many rows that follow.

        Rows behind a token that can't come or behind the end, and those that are expensive to find, allow nothing: no
        token is sampled there. The output gets no further.
        """
        ...

    def count_allowed(self, guess: Sequence[int]) -> int:
        """Return how many tokens of a guess may come next, one behind the other; fewer where to look is expensive."""
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens that spell what can't be otherwise, as far as what comes behind does not change them.

        The output may spell it in other tokens. None where nothing is forced, or to look is expensive.
        """
        ...


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold one bit a token."""
    return -(-vocab_size // 32)
