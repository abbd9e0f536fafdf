"""The model `sim`, which is built in and needs no file: its tokens are bytes, and its KV is 2 KiB a token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from diptych.architectures.config import ModelConfig, Rope
from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError
from diptych.tokens.token_bytes import byte_alphabet
from diptych.tokens.tokenizer import Tokenizer

NAME: Final = "sim"
START, END = "<|im_start|>", "<|im_end|>"  # 256 and 257, behind the bytes

_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
    weight_files: Sequence[Path] = ()

    def tokenizer(self) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE(dict(byte_alphabet()), []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True) for text in (START, END)])
        tokens = {"eos_token": END}
        return Tokenizer(backend, eos_ids=self.config.eos_ids, chat_template=_CHATML, special_tokens=tokens)

    def next_layer(self) -> NoReturn:
        """Raises `ConfigError`: there is none."""
        raise ConfigError(f"--speculate mtp: {self.config.model_id} has no layer that predicts one token more")

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError(f"the model {NAME!r} has no weights: give --device sim, or another --model")

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart
