"""The formats of calls by name. Those whose marks occur in others' templates come last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.router.text.parsing.calls import ToolFormat
from diptych.router.text.parsing.formats.deepseek import DEEPSEEK
from diptych.router.text.parsing.formats.dsml import DSML
from diptych.router.text.parsing.formats.gemma4 import GEMMA4
from diptych.router.text.parsing.formats.glm import GLM
from diptych.router.text.parsing.formats.glm4 import GLM4
from diptych.router.text.parsing.formats.granite import GRANITE
from diptych.router.text.parsing.formats.harmony import HARMONY
from diptych.router.text.parsing.formats.hermes import HERMES
from diptych.router.text.parsing.formats.kimi import KIMI
from diptych.router.text.parsing.formats.lfm2 import LFM2
from diptych.router.text.parsing.formats.llama3 import LLAMA3
from diptych.router.text.parsing.formats.minimax import MINIMAX
from diptych.router.text.parsing.formats.mistral import MISTRAL
from diptych.router.text.parsing.formats.nemotron import NEMOTRON
from diptych.router.text.parsing.formats.olmo3 import OLMO3
from diptych.router.text.parsing.formats.phi4 import PHI4
from diptych.router.text.parsing.formats.pythonic import PYTHONIC
from diptych.router.text.parsing.formats.qwen3_coder import QWEN3_CODER
from diptych.router.text.parsing.formats.seed_oss import SEED_OSS

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "harmony": HARMONY,
    "gemma4": GEMMA4,
    "dsml": DSML,
    "minimax": MINIMAX,
    "seed_oss": SEED_OSS,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "glm4": GLM4,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "lfm2": LFM2,
    "nemotron": NEMOTRON,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
    "llama3": LLAMA3,
    "granite": GRANITE,
    "phi4": PHI4,
    "hermes": HERMES,
}
