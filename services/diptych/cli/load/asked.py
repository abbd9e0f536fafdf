"""What a server is asked: prompts, their lengths and times, from traces, files of conversations, or by chance. Pure.

A trace has no text, only names of blocks of 512 tokens. Equal names become equal words, or equal tokens, so a server's
prefix cache finds what it would have found. Words are common ones, of which most tokenizers make one token each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from diptych.common.arrays import I64
from diptych.common.errors import ConfigError
from diptych.simulator.traces.call import BLOCK_TOKENS, Call, names_of
from diptych.simulator.traces.generators.arrivals import poisson

CHARS_PER_TOKEN: Final = 4  # of English text, about
MIN_TOKENS: Final = 4  # of a prompt and an answer, as vLLM's benchmark has it: shorter ones are left out
LOWEST_TOKEN: Final = 256  # those before are bytes and marks in many vocabularies
_TEXT: Final = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
"""
WORDS: Final = tuple(_TEXT.split())

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One call."""

    due_s: float  # since the load began
    prompt: Prompt
    prompt_len: int  # tokens; of text about so many
    output_len: int  # tokens that are wanted
    follows: int = -1  # the call of its session before it, by number: it comes `gap_s` after that one's answer
    gap_s: float = 0.0


def as_text(call: Call) -> str:
    """Return a prompt of as many words as it has tokens."""
    return " ".join(WORDS[place] for place in _drawn(call, 0, len(WORDS)).tolist())


def as_tokens(call: Call, vocab_size: int) -> list[int]:
    """Return a prompt of tokens that a vocabulary of this size has."""
    found: list[int] = _drawn(call, min(LOWEST_TOKEN, vocab_size - 1), vocab_size).tolist()
    return found


def _drawn(call: Call, low: int, high: int) -> I64:
    parts = [np.random.default_rng(int(name)).integers(low, high, BLOCK_TOKENS) for name in call.blocks]
    return np.concatenate(parts)[: call.prompt_len]


def asked_of(calls: Sequence[Call], vocab_size: int = 0) -> list[Asked]:
    """Return what to ask for the calls of a trace; with a vocabulary, in tokens."""
    last: dict[str, int] = {}
    asked = []
    for number, call in enumerate(calls):
        prompt: Prompt = as_tokens(call, vocab_size) if vocab_size else as_text(call)
        waits = not math.isnan(call.gap_s) and call.session in last
        before = (last[call.session], call.gap_s) if waits else (-1, 0.0)
        asked.append(Asked(call.arrival_s, prompt, call.prompt_len, call.output_len, *before))
        last[call.session] = number
    return asked


def random_calls(num: int, input_len: int, output_len: int, spread: float, rate: float, seed: int) -> list[Call]:
    """Return calls that share nothing, of lengths within `spread` (0 to 1) of what is said; `rate` 0: all at once."""
    rng = np.random.default_rng(seed)
    prompt_lens, output_lens = (
        rng.integers(max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread))) + 1, num)
        for mean in (input_len, output_len)
    )
    num_blocks = -(-prompt_lens // BLOCK_TOKENS)
    ends = np.cumsum(num_blocks)
    base = int(rng.integers(1 << 40)) << 20  # no two seeds share a prompt
    return [
        Call(when, prompt_len, wanted, names_of(base + np.arange(end - blocks, end)))
        for when, prompt_len, wanted, end, blocks in zip(
            arrivals(num, rate, seed), prompt_lens.tolist(), output_lens.tolist(), ends, num_blocks, strict=True
        )
    ]


def arrivals(num: int, rate: float, seed: int) -> list[float]:
    """Return when calls come, from 0 on: by chance, `rate` a second; 0: all at once."""
    if not rate:
        return [0.0] * num
    found = poisson(np.random.default_rng([seed, 1]), num, rate)
    times: list[float] = (found - found[0]).tolist()
    return times


def conversations(text: str, num: int, rate: float, seed: int) -> list[Asked]:
    """Return the first turns of a file of ShareGPT's form: a question, and as long an answer as it got.

    Lengths are those of the texts, by `CHARS_PER_TOKEN`; conversations are drawn without repeating any. Raises
    `ConfigError`.
    """
    pairs = [pair for each in _listed(text) if (pair := _first_turn(each)) is not None]
    if not pairs:
        raise ConfigError("it has no conversation of two turns, as ShareGPT's files do")
    order = np.random.default_rng(seed).permutation(len(pairs))[: num or len(pairs)]
    chosen = [pairs[index] for index in order.tolist()]
    return [
        Asked(when, question, _num_tokens(question), _num_tokens(answer))
        for when, (question, answer) in zip(arrivals(len(chosen), rate, seed), chosen, strict=True)
    ]


def fitting(asked: Sequence[Asked], context_len: int) -> list[int]:
    """Return the numbers of the calls that a context has room for."""
    return [number for number, each in enumerate(asked) if each.prompt_len + each.output_len <= context_len]


def within(asked: Sequence[Asked], context_len: int) -> list[Asked]:
    """Return the calls that a context has room for; who waited for one that is left out comes when it is due."""
    kept = fitting(asked, context_len)
    places = {index: place for place, index in enumerate(kept)}
    return [replace(asked[index], follows=places.get(asked[index].follows, -1)) for index in kept]


def _listed(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is no JSON: {error}") from None
    if not isinstance(found, list):
        raise ConfigError("it must be a list of conversations, as ShareGPT's files are")
    return found


def _first_turn(found: object) -> tuple[str, str] | None:
    turns = found.get("conversations") if isinstance(found, Mapping) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2]]
    question, answer = texts
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    return (question, answer) if min(map(_num_tokens, (question, answer))) >= MIN_TOKENS else None


def _num_tokens(text: str) -> int:
    return len(text) // CHARS_PER_TOKEN
