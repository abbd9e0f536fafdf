"""What a simulated model takes from a real one: its name, its shape and its tokenizer. Its weights are not read.

`sim` is built in and needs no file: its tokens are bytes, and its KV is 2 KiB a token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from diptych.common.errors import ConfigError
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.config import ModelConfig, Rope
from diptych.engine.loader.token_bytes import byte_alphabet
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.quantization.weight import Stored
from diptych.engine.sim.answers import Speech

if TYPE_CHECKING:  # it opens ours, too
    from diptych.engine.loader.source import ModelSource

NAME: Final = "sim"
START, END = "<|im_start|>", "<|im_end|>"  # 256 and 257, behind the bytes

_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS: Final = re.compile(rb"[ A-Za-z0-9]+")
_CONFIG: Final = ModelConfig(  # steps are cut as for Llama-3-8B; pages are small
    model_id=NAME,
    architecture="llama",
    vocab_size=258,
    hidden_size=4096,
    num_layers=4,
    num_heads=32,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=14336,
    rms_norm_eps=1e-5,
    rope=Rope(theta=500_000.0, dim=64),
    context_len=16384,
    tie_embeddings=True,
    bos_id=None,
    eos_ids=(257,),
)


class BuiltInModel:
    """A `ModelSource` that only a simulation can run."""

    config = _CONFIG
    weights_id = hashlib.sha256(NAME.encode()).hexdigest()[:32]

    def tokenizer(self) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(dict(byte_alphabet()), []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True) for text in (START, END)])
        return Tokenizer(backend, eos_ids=self.config.eos_ids, chat_template=ChatTemplate(_CHATML, {"eos_token": END}))

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError(f"the model {NAME!r} has no weights: give --device sim, or another --model")


class SimulatedModel:
    """A model as a simulation serves it. Workers that compute it are no peers: their KV is another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.config = source.config
        self.weights_id = hashlib.sha256(f"simulated {source.weights_id}".encode()).hexdigest()[:32]

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError("a simulated model has no weights")


def speech_of(tokenizer: Tokenizer, vocab_size: int) -> Speech:
    """Return the tokens that are words, or parts of some, and the one that ends an answer (or a word, without one)."""
    num_ids = min(vocab_size, tokenizer.vocab_size)
    words = [each for each in range(num_ids) if _WORDS.fullmatch(tokenizer.token_bytes[each])]
    if not words:
        raise ConfigError("--device sim finds no word in the model's vocabulary")
    ends = tokenizer.eos_ids or words
    return Speech(np.array([*words, ends[0]], np.int64))
