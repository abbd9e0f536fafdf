"""What `--speculate` says: who guesses how requests go on."""

from __future__ import annotations

from typing import Final, NamedTuple

from diptych.common.errors import ConfigError
from diptych.generation.request_groups import NO_DRAFTS, OF_MODEL, OF_NEXT_LAYER

OF_TEXT: Final = ("suffix", "ngram")
SERVED: Final = f"{', '.join(OF_TEXT)}, {OF_MODEL}:PATH, {OF_NEXT_LAYER} and {NO_DRAFTS}"


class Speculation(NamedTuple):
    """Who guesses."""

    source: str  # one of `DRAFT_SOURCES`, or "off"
    model: str = ""  # of "draft", as for --model

    @property
    def has_layers(self) -> bool:
        """Whether pages hold something of who guesses."""
        return self.source in (OF_MODEL, OF_NEXT_LAYER)


def parse_speculate(text: str) -> Speculation:
    """Raises `ConfigError` for what isn't served."""
    source, colon, model = text.partition(":")
    if source == OF_MODEL and model:
        return Speculation(source, model)
    if colon or source not in (*OF_TEXT, OF_NEXT_LAYER, NO_DRAFTS):
        raise ConfigError(f"--speculate can't be {text!r}: {SERVED} are served; EAGLE heads are not yet")
    return Speculation(source)
