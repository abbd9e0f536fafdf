"""Makes text of what requests output: a stream for each request of one model."""

from __future__ import annotations

from diptych.generation.output_text import OutputText, TextTokenizer
from diptych.generation.sampling_params import SamplingParams


class DetokenizerManager:
    """Opens an `OutputText` for each request."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def open(self, params: SamplingParams) -> OutputText:
        return OutputText(self._tokenizer, params)
