"""What the process that checks grammars has agreed with who starts it: bounds, an exit code, the form of a line.

Who asks does not import the compiler: it is in that process, and in schedulers.
"""

from __future__ import annotations

import json
from typing import Final

from diptych.generation.grammar import Grammar, GrammarKind, Preamble

MAX_CPU_S: Final = 1.0  # of a check; ordinary ones take a few milliseconds
MAX_BYTES: Final = 256 << 20  # beside what the process has when it begins
OUT_OF_MEMORY: Final = 3  # exit code


def encode(grammar: Grammar) -> bytes:
    """Return the line that asks about `grammar`."""
    marks = (grammar.preamble.opening, grammar.preamble.closing) if grammar.preamble else None
    return json.dumps({"kind": grammar.kind.value, "text": grammar.text, "marks": marks}).encode() + b"\n"


def decode(line: bytes) -> Grammar:
    """Return the grammar that the line asks about."""
    asked = json.loads(line)
    preamble = Preamble(*asked["marks"]) if asked["marks"] else None
    return Grammar(GrammarKind(asked["kind"]), asked["text"], preamble)
