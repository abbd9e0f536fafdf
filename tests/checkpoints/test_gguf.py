"""The GGUF reader against the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from diptych.checkpoints.gguf import GgufFile
from diptych.checkpoints.gguf_model import GgufModel
from diptych.checkpoints.quantization.weight import as_floats
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALES]


def test_every_tensor_of_the_small_model_has_the_values_of_the_gguf_package(small_model_path: Path) -> None:
    file, reference = GgufFile(small_model_path), gguf.GGUFReader(small_model_path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(as_floats(file.read(tensor.name)), expected, err_msg=tensor.name)


def test_the_metadata_of_the_small_model_is_that_of_the_gguf_package(small_model_path: Path) -> None:
    reference = gguf.GGUFReader(small_model_path)
    expected = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert GgufFile(small_model_path).metadata == expected


def test_the_small_model_is_what_its_authors_say(small_model: ModelSource) -> None:
    config = small_model.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.ffn_size, config.vocab_size, config.context_len) == (64, 1536, 49152, 8192)
    assert (config.rope.theta, config.tie_embeddings, config.eos_ids) == (100_000.0, True, (2,))


@pytest.mark.parametrize("kind", TYPES)
def test_each_storage_type_reads_back_as_the_gguf_package_reads_it(kind: str, tmp_path: Path) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    stored = blocks(kind)
    path = write(tmp_path, {"x": (stored, ggml_type)})
    expected = gguf.dequantize(stored, ggml_type)
    np.testing.assert_array_equal(as_floats(GgufFile(path).read("x")).reshape(expected.shape), expected)


def blocks(kind: str) -> Array:
    """Six rows of two blocks. The package quantises the simple formats only; others are random bytes and scales."""
    ggml_type, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    _, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    if kind not in SCALES:
        values = random.standard_normal((6, 64)).astype(np.float32)
        return np.asarray(gguf.quantize(values, ggml_type))
    stored = random.integers(0, 256, (6, 2, block_bytes), dtype=np.uint8)
    for at in SCALES[kind]:
        stored[..., at : at + 2] = random.standard_normal((6, 2, 1)).astype(np.float16).view(np.uint8)
    return stored.reshape(6, -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALES])
def test_quantised_matrices_stay_quantised(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"x": (blocks(kind), gguf.GGMLQuantizationType[kind])})
    read = GgufFile(path).read("x")
    assert isinstance(read, QuantizedArray)
    assert read.nbytes <= as_floats(read).nbytes / 3


def test_a_storage_type_without_a_reader_is_named_with_the_tensor(tmp_path: Path) -> None:
    stored = np.zeros((1, 66), np.uint8)
    path = write(tmp_path, {"blk.0.attn_q.weight": (stored, gguf.GGMLQuantizationType.IQ2_XXS)})
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight has GGML type 16; readable are F32"):
        GgufFile(path).read("blk.0.attn_q.weight")


def test_a_file_that_is_cut_off_is_an_error_and_not_garbage(tmp_path: Path) -> None:
    values = np.ones((64, 64), np.float32)
    whole = write(tmp_path, {"x": (values, gguf.GGMLQuantizationType.F32)}).read_bytes()
    for length in (len(whole) - 1000, 40, 6):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut off|not a readable GGUF"):
            GgufFile(path).read("x")


def test_another_kind_of_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="not a readable GGUF"):
        GgufFile(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": (np.ones((2, 2), np.float32), gguf.GGMLQuantizationType.F32)}, architecture="mamba")
    with pytest.raises(ConfigError, match="mamba"):
        GgufModel(path)


def write(
    folder: Path, tensors: dict[str, tuple[Array, gguf.GGMLQuantizationType]], architecture: str = "llama"
) -> Path:
    path = folder / "written.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
