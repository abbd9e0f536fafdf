"""Folders as PEFT saves them, and what is refused, each by name."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_files
import numpy as np
import pytest
import torch

from diptych.architectures.placement import Piece, Placed, Split
from diptych.engine.lora.peft_folder import read_adapter, read_config
from diptych.engine.lora.registry import Adapter, InvalidAdapter

WriteAdapter = Callable[..., dict[str, Any]]
Q, V, FUSED = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.gate_up_proj"
SHAPES = {Q: (8, 6), V: (4, 6)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def placement() -> Iterator[Placed]:
    yield "model.embed_tokens.weight", (Piece("embed", 0, (50, 6)),)
    yield "lm_head.weight", (Piece("lm_head", 0, (50, 6)),)
    yield f"{Q}.weight", (Piece("1.qkv", 0, (8, 6), Split.ROWS),)
    yield f"{V}.weight", (Piece("1.qkv", 12, (4, 6), Split.ROWS),)
    yield f"{FUSED}.weight", (Piece("1.gate_up", 0, (5, 6)), Piece("1.gate_up", 5, (5, 6)))
    yield "model.layers.1.mlp.experts.0.gate_proj.weight", (Piece("1.experts.0.gate_up", 0, (5, 6)),)


def delta(adapter: Adapter, target: str, start: int) -> Any:
    """What an adapter adds to the rows of a matrix from `start` on."""
    (product,) = (p for p in adapter.products if (p.target, p.start) == (target, start))
    return torch.from_numpy(product.b @ product.a)


def test_each_module_goes_to_its_rows_of_the_merged_matrix(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    expected = write_adapter(tmp_path / "a", SHAPES | {FUSED: (10, 6)})
    adapter = read_adapter(tmp_path / "a", placement())
    places = [(p.target, p.start, p.b.shape[0]) for p in adapter.products]
    assert sorted(places) == [("1.gate_up", 0, 5), ("1.gate_up", 5, 5), ("1.qkv", 0, 8), ("1.qkv", 12, 4)]
    for module, start in ((Q, 0), (V, 12)):
        torch.testing.assert_close(delta(adapter, "1.qkv", start), expected[module])
    for rows in (slice(0, 5), slice(5, 10)):
        torch.testing.assert_close(delta(adapter, "1.gate_up", rows.start), expected[FUSED][rows])


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"v_proj": 2}}, (2.0, 0.5)),
        ({"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 12}}, (3.0, 2.0)),
        ({"alpha_pattern": {"proj": 12}}, (2.0, 2.0)),  # whole names only
        ({"r": 99, "rank_pattern": {".*_proj": 4}}, (2.0, 2.0)),
    ],
)
def test_the_scale_is_that_of_peft(
    tmp_path: Path, write_adapter: WriteAdapter, config: dict[str, Any], scales: tuple[float, float]
) -> None:
    doubled = write_adapter(tmp_path / "a", SHAPES, rank=4, alpha=8, **config)
    adapter = read_adapter(tmp_path / "a", placement())
    for module, start, scale in ((Q, 0, scales[0]), (V, 12, scales[1])):
        torch.testing.assert_close(delta(adapter, "1.qkv", start), doubled[module] * (scale / 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_are_widened(tmp_path: Path, write_adapter: WriteAdapter, dtype: torch.dtype) -> None:
    expected = write_adapter(tmp_path / "a", SHAPES, dtype=dtype)
    adapter = read_adapter(tmp_path / "a", placement())
    assert {p.a.dtype for p in adapter.products} == {np.dtype(np.float32)}
    torch.testing.assert_close(delta(adapter, "1.qkv", 0), expected[Q])


def test_the_fingerprint_covers_weights_and_scale_and_nothing_else(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    options: dict[str, dict[str, Any]] = {
        "one": {},
        "same": {"base_model_name_or_path": "elsewhere", "target_modules": "all-linear"},
        "other weights": {"seed": 1},
        "other scale": {"alpha": 9},
    }
    prints = {}
    for name, option in options.items():
        write_adapter(tmp_path / name, SHAPES, **option)
        prints[name] = read_adapter(tmp_path / name, placement()).fingerprint
    assert prints["one"] == prints["same"]
    assert len(set(prints.values())) == 3
    assert len(prints["one"]) == 32


@pytest.mark.parametrize(
    ("targets", "module", "expected"),
    [
        (["q_proj", "v_proj"], Q, True),
        (["proj"], Q, False),
        (["self_attn.q_proj"], Q, True),
        ([Q], Q, True),
        ("all-linear", Q, True),
        (r".*\.self_attn\.[qv]_proj", Q, True),
        (r"self_attn\.q_proj", Q, False),  # the whole name
        (r".*\.layers\.0\..*", Q, False),
    ],
)
def test_target_modules_are_ends_of_names_or_a_regular_expression(targets: Any, module: str, expected: bool) -> None:
    assert read_config(CONFIG | {"target_modules": targets}).targets(module) is expected


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"lora_bias": True},
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 1]]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
    ],
)
def test_a_feature_that_is_not_computed_is_refused_by_name(config: dict[str, Any]) -> None:
    (key,) = config
    with pytest.raises(InvalidAdapter, match=key):
        read_config(CONFIG | config)


@pytest.mark.parametrize("config", [{"r": 0}, {"r": "x"}, {"lora_alpha": None}, {"rank_pattern": {"q_proj": 0}}])
def test_nonsense_in_the_configuration_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidAdapter):
        read_config(CONFIG | config)


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(InvalidAdapter, match=key):
        read_config({name: value for name, value in CONFIG.items() if name != key})


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        ({Q: (8, 7)}, {}, r"lora_A of .*q_proj.* is \(4, 7\); model and configuration say \(4, 6\)"),
        ({Q: (9, 6)}, {}, r"lora_B of .* is \(9, 4\)"),
        ({Q: (8, 6)}, {"r": 5}, r"lora_A of .* say \(5, 6\)"),
        ({"model.layers.7.self_attn.q_proj": (8, 6)}, {}, "no module 'model.layers.7"),
        ({"model.layers.1.mlp.experts.0.gate_proj": (5, 6)}, {}, "experts.0.gate_proj' can't have an adapter"),
        ({Q: (8, 6)}, {"target_modules": ["q_proj", "k_proj"]}, "no weights for k_proj"),
        ({Q: (8, 6), V: (4, 6)}, {"target_modules": ["q_proj"]}, "'.*v_proj', which is not among its target_modules"),
        ({}, {}, "no weights for any module"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    tmp_path: Path, write_adapter: WriteAdapter, shapes: Any, config: dict[str, Any], words: str
) -> None:
    write_adapter(tmp_path / "a", shapes, **config)
    with pytest.raises(InvalidAdapter, match=words):
        read_adapter(tmp_path / "a", placement())


@pytest.mark.parametrize(
    "module", ["model.embed_tokens.lora_A.weight", f"{Q}.lora_embedding_A", f"{Q}.weight", f"{Q}.lora_A.bias"]
)
def test_a_tensor_that_is_no_linear_layers_a_or_b_is_refused(tmp_path: Path, module: str) -> None:
    from safetensors.torch import save_file

    save_file({f"base_model.model.{module}": torch.zeros(4, 6)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidAdapter, match=r"tensor .* is not (the|how the) A or B"):
        read_adapter(tmp_path, placement())


def test_a_missing_side_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"base_model.model.{Q}.lora_A.weight": torch.zeros(4, 6)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InvalidAdapter, match=f"'{Q}' has no lora_B"):
        read_adapter(tmp_path, placement())


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    match how:
        case "no folder":
            weights.unlink()
            config.unlink()
            folder.rmdir()
        case "no weights":
            weights.unlink()
        case "no configuration":
            config.unlink()
        case "configuration is no JSON":
            config.write_text("{")
        case "configuration is a list":
            config.write_text("[]")
        case "weights cut off":
            weights.write_bytes(weights.read_bytes()[:-5])
        case "header cut off":
            weights.write_bytes(weights.read_bytes()[:20])
        case "empty":
            weights.write_bytes(b"")
        case "header is no JSON":
            weights.write_bytes((5).to_bytes(8, "little") + b"hello")
        case "targets are no names":
            config.write_text(json.dumps(CONFIG | {"target_modules": 7}))
        case "target is no regular expression":
            config.write_text(json.dumps(CONFIG | {"target_modules": "("}))


@pytest.mark.parametrize(
    "how",
    [
        "no folder",
        "no weights",
        "no configuration",
        "configuration is no JSON",
        "configuration is a list",
        "weights cut off",
        "header cut off",
        "empty",
        "header is no JSON",
        "targets are no names",
        "target is no regular expression",
    ],
)
def test_a_damaged_folder_is_refused_and_named(tmp_path: Path, write_adapter: WriteAdapter, how: str) -> None:
    write_adapter(tmp_path / "a", SHAPES)
    damage(tmp_path / "a", how)
    with pytest.raises(InvalidAdapter, match=str(tmp_path / "a")):
        read_adapter(tmp_path / "a", placement())


@pytest.mark.parametrize(
    "config", [b"[" * 100_000, {"rank_pattern": [1]}, {"r": 1e400}, {"target_modules": 3}, {"lora_alpha": 10**400}]
)
def test_a_configuration_that_can_be_read_by_nobody_is_refused(
    tmp_path: Path, write_adapter: WriteAdapter, config: Any
) -> None:
    write_adapter(tmp_path / "a", SHAPES)
    text = config if isinstance(config, bytes) else json.dumps(CONFIG | config).encode()
    (tmp_path / "a" / "adapter_config.json").write_bytes(text)
    with pytest.raises(InvalidAdapter, match="adapter"):
        read_adapter(tmp_path / "a", placement())


@pytest.mark.parametrize("lie", dict(hostile_files.safetensors_that_lie()).values())
def test_weights_that_lie_are_refused(tmp_path: Path, lie: bytes) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.safetensors").write_bytes(lie)
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path, placement())


def test_weights_of_another_shape_are_not_copied(tmp_path: Path) -> None:
    """A file with a hole is as large as its header says, and takes no place."""
    num_rows = 1 << 28
    entry = hostile_files.tensor("F16", (num_rows, 2), (0, 4 * num_rows))
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(hostile_files.safetensors({f"base_model.model.{Q}.lora_{side}.weight": entry for side in "A"}))
    os.truncate(path, path.stat().st_size - 8 + 4 * num_rows)  # eight bytes of data are there already
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidAdapter, match=r"lora_A .* say \(4, 6\)"):
            read_adapter(tmp_path, placement())
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
