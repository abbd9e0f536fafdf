"""Turns grammars into what llguidance reads, and says whether it can be compiled.

A hostile grammar takes gigabytes, minutes, or the whole stack. So this runs in a process with limits, `check_process`,
and nowhere else; it imports little, as that process starts anew when it was killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from diptych.common.errors import InvalidRequest
from diptych.generation import json_schema
from diptych.generation.grammar import Grammar, GrammarKind, Preamble

# Between two JSON tokens. Without a bound a model may write blanks until it has no tokens left.
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
# Of a compiled grammar and all its matchers; 85 MiB. Usual grammars need hundreds, hostile ones a dozen a token.
MAX_LEXER_STATES: Final = 250_000
# Of a mask, for which a whole batch waits. An object of 100 optional properties needs some 1,400, random schemas 100.
MAX_STEP_ITEMS: Final = 4_000
# Text that can't be otherwise is not forced into the tokens that the tokenizer would choose: special ones may be among
# them where a grammar spells one out, and a replay might meet other tokens.
HEADER: Final = '%llguidance {"no_forcing": true}\n'
GBNF_HEADER: Final = "%llguidance {}\n"
BLANKS: Final = r"/[ \n\r\t]{0,8}/"  # between what a model thinks and what it answers
NUM_BYTES: Final = 256
TRIED_BYTES: Final = 4  # of an output, when a grammar is checked
MAX_WORDS_CHARS: Final = 1000  # of a refusal: the compiler quotes what it was given

_DUMP: Final = re.compile(r"(<non-verbose/>|<state>|\n +\d+ \| ).*", re.DOTALL)
_PLACE: Final = re.compile(r"^at \d+\(\d+\): ")


def check(grammar: Grammar) -> str:
    """Return what llguidance reads. Raise `InvalidRequest` with its words if no vocabulary could make it work.

    What takes long for a vocabulary of bytes takes several times as long for a model's: the first bytes are tried.
    """
    source = source_of(grammar)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0, limits=limits())
    for step in range(TRIED_BYTES):
        mask = matcher.compute_bitmask()
        if step == 0 and matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        if matcher.is_stopped() or not any(mask[: NUM_BYTES // 8]):
            break
        matcher.consume_token(_first_bit(mask))
    return source


def source_of(grammar: Grammar) -> str:
    """Return llguidance's own dialect of Lark's grammars, or several of them as JSON."""
    try:
        rules = HEADER + _rules(grammar)
        return rules if grammar.preamble is None else _behind(grammar.preamble, rules)
    except MemoryError:
        raise
    except Exception as error:  # the converter of GBNF raises nothing more special
        raise refusal(grammar, str(error)) from None


def limits() -> llguidance.LLParserLimits:
    """Return what one grammar may cost the parser, which does not heed them while it reads a schema."""
    return llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_STEP_ITEMS, verbose_errors=False
    )


def refusal(grammar: Grammar, words: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.kind.value} can't be compiled: {first_words(words)}", param=grammar.kind.value)


def first_words(words: str) -> str:
    """Cut off llguidance's dumps and places in what it made of the grammar; put its tersest word at more length."""
    words = _PLACE.sub("", _DUMP.sub("", words))
    return words.strip().replace("NoExtensionBias", "nothing can match it")[:MAX_WORDS_CHARS]


def _first_bit(mask: bytes) -> int:
    index, word = next((index, word) for index, word in enumerate(mask) if word)
    return 8 * index + (word & -word).bit_length() - 1


def _behind(preamble: Preamble, rules: str) -> str:
    """Return the grammar of texts that begin with the preamble. `rules` keep their names to themselves."""
    front = "thought" if not preamble.opening else f"({json.dumps(preamble.opening)} thought)?"
    lines = (
        f"start: {front} @answer",
        f"thought: free {BLANKS}",
        f"free[suffix={json.dumps(preamble.closing)}]: /(?s:.*)/",
    )
    parts = [("output", HEADER + "\n".join(lines)), ("answer", rules)]
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in parts]})


def _rules(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"start: %json {json.dumps(_with_options(json_schema.read(grammar.text)))}"
        case GrammarKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(grammar.text, '')}/"
        case GrammarKind.EBNF:
            return gbnf_to_lark(grammar.text).removeprefix(GBNF_HEADER)
        case GrammarKind.STRUCTURAL_TAG:
            return _tagged(json.loads(grammar.text)).removeprefix(GBNF_HEADER)


def _with_options(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    options = {"whitespace_pattern": WHITESPACE, **schema.get("x-guidance", {})}
    return {**schema, "x-guidance": options}


def _tagged(tags: Mapping[str, Any]) -> str:
    """Return the rules of free text with tagged parts; a trigger is text, as no special token is ever output."""
    triggers = sorted(tags["triggers"], key=len, reverse=True)
    made = [
        llguidance.StructTag(
            trigger=next(trigger for trigger in triggers if each["begin"].startswith(trigger)),
            begin=each["begin"],
            grammar=dict(_with_options(json_schema.read(json.dumps(each["schema"])))),
            end=each["end"],
        )
        for each in tags["structures"]
    ]
    return llguidance.StructTag.to_grammar(made, assume_special=False)
