"""What `--speculate` says: who guesses how requests go on."""

from __future__ import annotations

from typing import Final, NamedTuple

from diptych.common.errors import ConfigError
from diptych.generation.request_groups import NO_DRAFTS, OF_HEAD, OF_MODEL, OF_NEXT_LAYER

OF_TEXT: Final = ("suffix", "ngram")
WITH_PATH: Final = (OF_MODEL, OF_HEAD)
SERVED: Final = f"{', '.join(OF_TEXT)}, {OF_MODEL}:PATH, {OF_NEXT_LAYER}, {OF_HEAD}:PATH and {NO_DRAFTS}"


class Speculation(NamedTuple):
    """Who guesses."""

    source: str  # one of `DRAFT_SOURCES`, or "off"
    model: str = ""  # of "draft", as for --model; of "eagle", the folder of the head

    @property
    def has_layers(self) -> bool:
        """Whether pages hold something of who guesses."""
        return self.source in (OF_MODEL, OF_NEXT_LAYER, OF_HEAD)


def parse_speculate(text: str) -> Speculation:
    """Raises `ConfigError` for what isn't served."""
    source, colon, model = text.partition(":")
    if source in WITH_PATH and model:
        return Speculation(source, model)
    if colon or source not in (*OF_TEXT, OF_NEXT_LAYER, NO_DRAFTS):
        raise ConfigError(f"--speculate can't be {text!r}: {SERVED} are served")
    return Speculation(source)
