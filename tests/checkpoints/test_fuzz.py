"""Files of models with anything in them: read, or refused in words, in memory that follows from their size."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import hostile_files
from fuzzing import fuzz, malformed
from hostile_files import CONFIG, array, gguf, key, table, tensor, text
from hypothesis import given
from hypothesis import strategies as st

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import from_hf
from diptych.checkpoints.gguf import read_header, size_of
from diptych.checkpoints.gguf_model import GgufModel
from diptych.checkpoints.safetensors import Entry, read_entries
from diptych.common.errors import ConfigError

DATA_BYTES = 64
MAX_BYTES = 8 << 20  # for files of some hundred bytes
HEADER = json.dumps({"x": tensor(), "y": tensor("BF16", (2, 4), (8, 24)), "z": tensor("I8", (0,), (24, 24))}).encode()
TOKENS = (b"<s>", b"a", b"b", b"ab")
NUMBERS = {b"block_count": 1, b"context_length": 64, b"embedding_length": 8, b"feed_forward_length": 8}
METADATA = (
    key(b"general.architecture", 8, text(b"llama")),
    *(key(b"llama." + name, 4, struct.pack("<I", value)) for name, value in NUMBERS.items()),
    key(b"llama.attention.head_count", 4, struct.pack("<I", 2)),
    key(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
    key(b"tokenizer.ggml.model", 8, text(b"gpt2")),
    key(b"tokenizer.ggml.tokens", 9, array(8, len(TOKENS), b"".join(map(text, TOKENS)))),
    key(b"tokenizer.ggml.token_type", 9, array(5, len(TOKENS), struct.pack("<4i", 3, 1, 1, 1))),
    key(b"tokenizer.ggml.merges", 9, array(8, 1, text(b"a b"))),
    key(b"tokenizer.ggml.bos_token_id", 4, bytes(4)),
    key(b"tokenizer.chat_template", 8, text(b"{{ messages }}")),
)
WHOLE = gguf(*METADATA, table(b"token_embd.weight", 8, 4), keys=len(METADATA), tensors=1, data=bytes(128))


@fuzz
@given(header=malformed(HEADER))
def test_a_safetensors_header_is_refused_or_every_tensor_lies_alone_within_the_data(header: bytes) -> None:
    with contextlib.suppress(ValueError):
        check_entries(read_entries(header, DATA_BYTES))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from((2**40, 10**400)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("factor", "x")), inner, max_size=2),
    max_leaves=4,
)


@fuzz
@given(x=st.builds(tensor, JSON, st.lists(JSON | st.integers(0, 8), max_size=3), st.lists(st.integers(-1, 70))))
def test_an_entry_of_a_safetensors_header_may_hold_anything(x: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        check_entries(read_entries(json.dumps({"x": x, "y": tensor()}).encode(), DATA_BYTES))


def check_entries(entries: list[Entry]) -> None:
    used = [place for entry in entries for place in range(entry.begin, entry.end)]
    assert len(used) == len(set(used))
    assert all(0 <= place < DATA_BYTES for place in used)


@fuzz
@given(data=malformed(WHOLE, *(data for _, data in hostile_files.gguf_that_lie() if len(data) < 2000)))
def test_a_gguf_header_is_refused_in_words_and_in_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            header = read_header(data)
            ends = [info.offset + size_of(name, info) for name, info in header.tensors.items()]
            assert max(ends, default=0) <= len(data)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def test_a_gguf_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(WHOLE)
    assert GgufModel(path).tokenizer().encode("ab") == [3]
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with contextlib.suppress(ConfigError):
            GgufModel(path)
            raise AssertionError(f"{length} of {len(WHOLE)} bytes were believed")


@fuzz
@given(data=malformed(WHOLE))
def test_a_gguf_model_is_opened_or_refused(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        GgufModel(path).tokenizer()


@fuzz
@given(
    values=st.fixed_dictionaries(
        {},
        optional={name: st.just(value) | JSON for name, value in CONFIG.items()}
        | {name: JSON for name in ("head_dim", "rope_scaling", "rope_parameters", "eos_token_id", "rope_theta")}
        | {"partial_rotary_factor": JSON, "num_key_value_heads": JSON, "sliding_window": JSON, "layer_types": JSON},
    ),
    family=st.sampled_from(("llama", "gemma3_text", "mistral", "mixtral", "phi3", "qwen2", "qwen3_moe")),
)
def test_a_configuration_is_read_or_refused(values: dict[str, Any], family: str) -> None:
    given_values = {**CONFIG, **values, "architectures": None, "model_type": family}
    with contextlib.suppress(ConfigError):
        assert isinstance(from_hf(given_values, {}, "tiny"), ModelConfig)
