"""How families of models write what they think before they answer: between two marks.

Where the prompt ends with the opening mark, as many templates have it, the output begins inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.generation.grammar import Preamble
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.writer import Read, Writer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks, which may be special tokens."""

    opening: str
    closing: str

    def begins_in(self, prompt: str) -> bool:
        """Tell whether the output of this prompt begins with reasoning, without a mark."""
        return prompt.rstrip().endswith(self.opening)

    def preamble(self, prompt: str) -> Preamble | None:
        """Return what may come before an answer of a given shape."""
        if self.begins_in(prompt):
            return Preamble("", self.closing)
        return None if prompt.rstrip().endswith(self.closing) else Preamble(self.opening, self.closing)

    def before(self, read: Read, *, is_open: bool) -> Read:
        """Return a reading of messages that may begin with reasoning; `read` reads what follows."""

        def read_message(reader: Reader, writer: Writer) -> Reading[None]:
            reader.hold()
            yield from reader.skip_blanks()
            has_mark = yield from reader.take(self.opening)
            blanks = reader.release()
            if has_mark or is_open:
                yield from reader.until((self.closing,), writer.reasoning)
            else:
                writer.content(blanks)
            yield from read(reader, writer)

        return read_message


def read_content(reader: Reader, writer: Writer) -> Reading[None]:
    """Read a message, or what is left of it, that is content and nothing else."""
    yield from reader.while_open(lambda _: None, writer.content)


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
