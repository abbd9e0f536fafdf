"""The operator's own changes to logits: a request names one, and a worker has it by that name.

SGLang's requests bring such code along, pickled (`sglang/srt/sampling/custom_logit_processor.py`), so that whoever may
ask may run anything there. Here they bring a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from diptych.common.arrays import I64


class LogitProcessor(Protocol):
    """Changes the logits of one sample. It must depend on nothing but what it is called with: a replay calls again."""

    def __call__(self, logits: Any, prompt: I64, output: I64, params: Mapping[str, Any]) -> None:
        """Change `logits`, a float32 tensor `[vocab_size]` beside the model, in place; read the tokens so far.

        `params` is what the request says. Minus infinity forbids a token. What it raises ends the request.
        """
        ...


Processors = Mapping[str, LogitProcessor]  # by the names that requests have for them
NO_PROCESSORS: Final[Processors] = {}


class Processed(NamedTuple):
    """A sample whose logits are changed."""

    row: int  # sample
    change: Callable[[Any], None]  # of its logits, in place; raises nothing
