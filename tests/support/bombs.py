"""Small grammars that take a compiler much: nothing but a process with limits may be given them."""

from __future__ import annotations

import json
from typing import Any

from diptych.generation.grammar import Grammar, GrammarKind


def memory_bomb(name: str = "") -> Grammar:
    """1 kB that takes gigabytes: whether all the patterns can match one text."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(memory_bomb_schema(name)))


def memory_bomb_schema(name: str = "") -> dict[str, Any]:
    patterns = [{"pattern": f"^(a|b)*a(a|b){{{index + 1}}}$"} for index in range(30)]
    return {"title": name, "type": "string", "allOf": patterns}


def time_bomb() -> Grammar:
    """A grammar of 4,000 rules, which takes more than 10 s to convert."""
    rules = [f'r{index} ::= "x{index}" r{index + 1} | "z"' for index in range(4000)]
    return Grammar(GrammarKind.EBNF, "\n".join(["root ::= r0", *rules, 'r4000 ::= "q"']))


def ambiguous(num_rules: int) -> Grammar:
    """Rules that match the same text in many ways: quick to read, slow to follow."""
    names = [f"s{index}" for index in range(num_rules)]
    pairs = " | ".join(f"{one} {other}" for one in names for other in names)
    return Grammar(GrammarKind.EBNF, "\n".join(["root ::= s0", *[f'{name} ::= {pairs} | "a" | "b"' for name in names]]))
