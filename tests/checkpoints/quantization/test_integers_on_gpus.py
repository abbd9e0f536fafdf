"""Models in integers by the kernels of GPUs: nothing is expanded, and the text is that of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from greedy_text import generate

from diptych.checkpoints.source import open_model
from diptych.cli.sizing.describe import integers_by_name
from diptych.engine.models.matrices.weights import load
from diptych.engine.runner.model_part import ModelPart
from diptych.kernels.integer_layout import layout_of
from diptych.kernels.quantized import QuantizedArray

PROMPT = np.random.default_rng(0).integers(0, 32, 5).tolist()
NUM_TOKENS = 3  # the interpreter is slow
HIDDEN, FFN, NUM_HEADS, VOCAB = 256, 256, 4, 32
KINDS = gguf.GGMLQuantizationType
AS_Q4_K_M = {"attn_v": KINDS.Q6_K, "ffn_down": KINDS.Q6_K, "token_embd": KINDS.Q6_K, "output": KINDS.Q8_0}


@pytest.mark.parametrize("checkpoint", ["awq", "compressed int8"], indirect=True)
def test_a_checkpoint_says_the_same_on_gpus(checkpoint: tuple[Path, Any], device: torch.device) -> None:
    folder, _ = checkpoint
    assert kept_in(folder, device) == {"GpuIntegers"}
    assert_same_text(folder, device)


def test_a_gguf_file_of_several_formats_says_the_same_on_gpus(tmp_path: Path, device: torch.device) -> None:
    """As `Q4_K_M` mixes them: queries, keys and values are one matrix in two formats, and embeddings are looked up."""
    path = write_gguf(tmp_path / "model.gguf")
    assert kept_in(path, device) == {"GpuIntegers", "StackedMatrix"}
    assert_same_text(path, device)


def test_what_is_described_is_how_gpus_keep_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    arrays = {name: array for name, array in open_model(str(path)).tensors() if isinstance(array, QuantizedArray)}
    assert len(arrays) == 9
    assert integers_by_name(path) == {name: layout_of(array) for name, array in arrays.items()}


def assert_same_text(model: Path, device: torch.device) -> None:
    found = generate(model, PROMPT, backend="triton", device=device, num_tokens=NUM_TOKENS)
    assert found == generate(model, PROMPT, num_tokens=NUM_TOKENS)


def kept_in(model: Path, device: torch.device) -> set[str]:
    """Return how the matrices of the first layer are kept."""
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps

    part = ModelPart.of(open_model(str(model)), None)
    weights = load(part.config, part.placement, part.tensors, GpuOps(torch.float32, device), torch.float32, device)
    return {type(weights.matrix(f"0.{kind}")).__name__ for kind in ("qkv", "o", "gate_up", "down")}


def write_gguf(path: Path) -> Path:
    """Write a tiny Llama of random blocks in Q4_K, some of its matrices as `AS_Q4_K_M` says."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    random = np.random.default_rng(0)
    for name, shape in tensors():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            kind = AS_Q4_K_M.get(name.rpartition(".")[2], KINDS.Q4_K)
            writer.add_tensor(f"{name}.weight", random_blocks(kind, shape, random), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes."""
    matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN)}
    matrices |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)}
    matrices |= {"ffn_down": (HIDDEN, FFN)}
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), **matrices}
    layers = [(f"blk.0.{name}", shape) for name, shape in layer.items()]
    return [("token_embd", (VOCAB, HIDDEN)), *layers, ("output_norm", (HIDDEN,)), ("output", (VOCAB, HIDDEN))]


def random_blocks(kind: KINDS, shape: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random codes with scales that make numbers of about 1/16."""
    (rows, columns), (size, nbytes) = shape, gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // size, nbytes), np.uint8)
    places = {KINDS.Q4_K: {0: 2e-4, 2: 1.5e-3}, KINDS.Q6_K: {208: 5e-5}, KINDS.Q8_0: {0: 1e-3}}[kind]
    for at, scale in places.items():
        blocks[..., at : at + 2] = np.full((*blocks.shape[:2], 1), scale, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
