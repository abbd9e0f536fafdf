"""How the served model writes its messages, and the parser that follows from it for each request."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych.generation.grammar import Preamble
from diptych.router.text.parsing.calls import ToolFormat, json_calls, read_or_restore
from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.parts import MessageParser
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.tool_use import ToolUse
from diptych.router.text.parsing.writer import Read, StreamParser, Writer

AUTO: Final = "auto"
NONE: Final = "none"
DEFAULT: Final = "hermes"  # of models whose template says nothing else

_ID_CHARS: Final = string.ascii_letters + string.digits
_ID_LEN: Final = 9  # as Mistral's templates demand

NewParser = Callable[[], MessageParser]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes what it thinks before it answers: between two marks, which may be special tokens.

    Where the prompt ends with the opening mark, as many templates have it, the output begins inside.
    """

    opening: str
    closing: str
    special: Sequence[str] = ()  # tokens that marks consist of, where they are not the marks themselves
    also_inside: Sequence[str] = ()  # other ends of a prompt whose output begins inside

    @property
    def tokens(self) -> Sequence[str]:
        return self.special or (self.opening, self.closing)

    def begins_in(self, prompt: str) -> bool:
        """Tell whether the output of this prompt begins with reasoning, without a mark."""
        return prompt.rstrip().endswith((self.opening, *self.also_inside))

    def preamble(self, prompt: str) -> Preamble | None:
        """Return what may come before an answer of a given shape."""
        if self.begins_in(prompt):
            return Preamble("", self.closing)
        return None if prompt.rstrip().endswith(self.closing) else Preamble(self.opening, self.closing)

    def before(self, read: Read, *, is_open: bool, also_closing: Sequence[str] = ()) -> Read:
        """Return a reading of messages that may begin with reasoning; `read` reads what follows.

        Marks of `also_closing` end reasoning, too, and are part of what follows.
        """

        def read_message(reader: Reader, writer: Writer) -> Reading[None]:
            reader.hold()
            yield from reader.skip_blanks()
            has_mark = yield from reader.consume(self.opening)
            blanks = reader.release()
            if has_mark or is_open:
                mark = yield from reader.until((self.closing, *also_closing), writer.reasoning)
                if mark in also_closing:
                    reader.back(mark)
            else:
                writer.content(blanks)
            yield from read(reader, writer)

        return read_message


def read_content(reader: Reader, writer: Writer) -> Reading[None]:
    """Read a message, or what is left of it, that is content and nothing else."""
    yield from reader.while_open(lambda _: None, writer.content)


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", also_inside=("<seed:cot_budget_reflect>",)),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", special=("<|channel>", "<channel|>")),
}


@dataclass(frozen=True, slots=True)
class MessageFormats:
    """None: nothing is looked for, and what the model writes of it is content."""

    tools: ToolFormat | None = TOOL_FORMATS[DEFAULT]
    reasoning: ReasoningFormat | None = None

    @classmethod
    def named(cls, tools: str, reasoning: str, template: str) -> MessageFormats:
        """Return the formats of these names; `auto` goes by the chat template, `none` is none."""
        return cls(
            _auto_tools(template) if tools == AUTO else TOOL_FORMATS.get(tools),
            _auto_reasoning(template) if reasoning == AUTO else REASONING_FORMATS.get(reasoning),
        )

    def told_in_words(self) -> MessageFormats:
        """Return the formats of the same model if it is told of tools in words, not by its template."""
        return self if self.tools and self.tools.is_for_all_messages else replace(self, tools=TOOL_FORMATS[DEFAULT])

    @property
    def tokens(self) -> frozenset[str]:
        """Special tokens that parsers must see in the text."""
        return frozenset((*self.reasoning_marks, *(self.tools.tokens if self.tools else ())))

    @property
    def reasoning_marks(self) -> Sequence[str]:
        """The tokens of reasoning among them."""
        return self.reasoning.tokens if self.reasoning else ()

    def preamble(self, prompt: str) -> Preamble | None:
        """Return what may come before an answer of a given shape."""
        return self.reasoning.preamble(prompt) if self.reasoning else None

    def splits(self, tool_use: ToolUse) -> bool:
        """Whether an output may be more than content."""
        return tool_use.is_forced or self.parser(tool_use, "") is not None

    def parser(self, tool_use: ToolUse, prompt: str) -> NewParser | None:
        """Return what makes parsers for free outputs of a rendered prompt; None: all of them is content."""
        reads_all = self.tools is not None and (tool_use.functions or self.tools.is_for_all_messages)
        tools = self.tools if reads_all else None
        read = tools.read if tools else None
        if self.reasoning is not None and not (tools and tools.reads_reasoning):
            is_open, ends = self.reasoning.begins_in(prompt), tools.ends_reasoning if tools else ()
            read = self.reasoning.before(read or read_content, is_open=is_open, also_closing=ends)
        return _maker(read, tool_use)

    def parser_of_shape(self, tool_use: ToolUse, preamble: Preamble | None) -> NewParser | None:
        """The same for outputs with a grammar: forced calls, or content alone, with reasoning in front or without."""
        read = _FORCED.get(tool_use.choice)
        if self.reasoning is not None and preamble is not None:
            read = self.reasoning.before(read or read_content, is_open=not preamble.opening)
        return _maker(read, tool_use)


DEFAULT_FORMATS: Final = MessageFormats()


def _maker(read: Read | None, tool_use: ToolUse) -> NewParser | None:
    return None if read is None else lambda: StreamParser(read, Writer(tool_use, new_call_id))


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LEN))


def _auto_tools(template: str) -> ToolFormat:
    found = (each for each in TOOL_FORMATS.values() if any(mark in template for mark in each.in_template))
    return next(found, TOOL_FORMATS[DEFAULT])


def _auto_reasoning(template: str) -> ReasoningFormat | None:
    """Go by either mark: some templates only open what they never show again."""
    found = (each for each in REASONING_FORMATS.values() if each.opening in template or each.closing in template)
    return next(found, None)


def _read_required(reader: Reader, writer: Writer) -> Reading[None]:
    """All of the output is a list of calls."""
    yield from read_or_restore(reader, writer, "", json_calls)
    yield from read_content(reader, writer)


def _read_named(reader: Reader, writer: Writer) -> Reading[None]:
    """All of the output is the arguments of the one function."""
    (name,) = writer.functions
    yield from reader.skip_blanks()
    if (yield from reader.peek()):
        writer.start_call(name)
    yield from reader.while_open(lambda _: None, writer.arguments)


_FORCED: Final[Mapping[str, Read]] = {"required": _read_required, "named": _read_named}
