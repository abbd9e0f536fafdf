"""Pages of models in their published sizes, between workers of unlike pages, ranks and types that pair.

What their plans send is held against all that the transfer engine checks of a write and of a message, and against what
a device's kernels were compiled for: what an accepted pair has to send is never refused afterwards.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import from_hf
from diptych.architectures.stages import stage_layers
from diptych.checkpoints.shard import Shard
from diptych.common.errors import ConfigError
from diptych.engine.options.pool_size import most_state_pages
from diptych.engine.values.kv_regions import kv_layout, window_terms, with_states
from diptych.kernels.page_pack import PagePack
from diptych.kvtransfer import plan as rules
from diptych.kvtransfer.device import Device
from diptych.kvtransfer.layout import LINE_NBYTES, HeadShare, PoolLayout
from diptych.kvtransfer.plan import Conversion, check_on_device
from diptych.kvtransfer.runs import Copy
from tests.architectures.test_registry import PUBLISHED

PAGE_SIZES = (16, 48, 128)
DTYPES = ("bfloat16", "fp8_e4m3")
RANKS = ((1, 1), (1, 2), (2, 1), (2, 8), (8, 4), (4, 4))
LARGEST_I32 = 2**31 - 1


def sizes(layers: int, heads: int, kv_heads: int, head_dim: int, **others: Any) -> dict[str, Any]:
    names = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return names | {"head_dim": head_dim, "hidden_size": heads * head_dim, "max_position_embeddings": 4096} | others


def latents(layers: int, heads: int, rope: int = 64, **others: Any) -> dict[str, Any]:
    dims = {"kv_lora_rank": 512, "qk_rope_head_dim": rope, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return sizes(layers, heads, heads, rope, **dims) | others


def deltas(key_heads: int, value_heads: int) -> dict[str, Any]:
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    return heads | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}


def kinds(pattern: str, count: int) -> list[str]:
    names = {"w": "sliding_attention", "f": "full_attention", "l": "linear_attention"}
    return [names[kind] for kind, _ in zip(itertools.cycle(pattern), range(count), strict=False)]


KIMIS = [4, 8, 12, 16, 20, 24, 27]
KDA = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# What matters to pages. Those of Gemma 4 and of Nemotron 3 Nano are about right.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", sizes(32, 32, 8, 128)),
    "Llama 3.2 1B": ("llama", sizes(16, 32, 8, 64)),
    "Qwen2.5 0.5B": ("qwen2", sizes(24, 14, 2, 64)),
    "Qwen2.5 7B": ("qwen2", sizes(28, 28, 4, 128)),
    "Qwen3 235B-A22B": ("qwen3_moe", sizes(94, 64, 4, 128)),
    "Qwen3-Next 80B": ("qwen3_next", sizes(48, 16, 2, 256) | deltas(16, 32)),
    "Qwen3.5 27B": ("qwen3_5_text", sizes(64, 24, 4, 256, layer_types=kinds("lllf", 64)) | deltas(16, 48)),
    "DeepSeek V3": ("deepseek_v3", latents(61, 128)),
    "DeepSeek V3.2": ("deepseek_v32", latents(61, 128, index_head_dim=128, index_n_heads=64)),
    "Kimi Linear 48B": (
        "kimi_linear",
        latents(27, 32)
        | {
            "linear_attn_config": KDA
            | {"full_attn_layers": KIMIS, "kda_layers": [layer for layer in range(1, 28) if layer not in KIMIS]}
        },
    ),
    "MiniMax M2": ("minimax_m2", sizes(62, 48, 8, 128, rotary_dim=64, attn_type_list=[1] * 62)),
    "Nemotron-H 8B": (
        "nemotron_h",
        sizes(52, 32, 8, 128, hybrid_override_pattern=NEMOTRON_H)
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    ),
    "Nemotron 3 Nano": (
        "nemotron_h",
        sizes(52, 32, 2, 128, hybrid_override_pattern=NANO)
        | {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    ),
    "LFM2 1.2B": (
        "lfm2",
        sizes(16, 32, 8, 64, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_dim=2048, block_ff_dim=12288),
    ),
    "Gemma 2 9B": ("gemma2", sizes(42, 16, 8, 256)),
    "Gemma 3 1B": ("gemma3_text", sizes(26, 4, 1, 256, sliding_window_pattern=6)),
    "Gemma 3 27B": ("gemma3_text", sizes(62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6)),
    "Gemma 4 31B": (
        "gemma4_text",
        sizes(60, 32, 16, 256, global_head_dim=512, num_global_key_value_heads=4, layer_types=kinds("wwwwwf", 60))
        | {"sliding_window": 1024},
    ),
    "gpt-oss 20B": ("gpt_oss", sizes(24, 64, 8, 64, layer_types=kinds("wf", 24))),
    "Phi-3 mini": ("phi3", sizes(32, 32, 32, 96, rope_scaling=None, sliding_window=2047)),
    "Llama 4 Scout": ("llama4_text", sizes(48, 40, 8, 128, no_rope_layers=[1, 1, 1, 0] * 12)),
    "Mistral 7B": ("mistral", sizes(32, 32, 8, 128, sliding_window=4096)),
    "OLMo 3 7B": ("olmo3", sizes(32, 32, 32, 128, sliding_window=4096, layer_types=kinds("wwwf", 32))),
}


def models_of(name: str) -> Iterator[ModelConfig]:
    """The model, and where its windows have pages of their own, as `--kv-windows keep` has it."""
    family, changes = SHAPES[name]
    model = from_hf(PUBLISHED[family] | changes, {}, name)
    yield model
    if len(model.page_groups) > 1:
        yield replace(model, keeps_all=True)


def layouts(model: ModelConfig, num_ranks: int, page_size: int, dtype: str) -> list[PoolLayout]:
    """Those of all ranks. Raises `ConfigError` for numbers of ranks that the model does not have."""
    shares = [HeadShare(rank, num_ranks, model.num_kv_heads) if num_ranks > 1 else None for rank in range(num_ranks)]
    parts = [Shard(rank, num_ranks).config(model) for rank in range(num_ranks)]
    pages = [kv_layout(part, 64, page_size, dtype, share) for part, share in zip(parts, shares, strict=True)]
    return [with_states(each, part, "bfloat16") for each, part in zip(pages, parts, strict=True)]


def meet(model: ModelConfig, src: PoolLayout, dst: PoolLayout) -> bool:
    """Whether the terms of such workers, as words, let them pair at all."""
    return window_terms(model, src) == window_terms(model, dst)


def pairs(model: ModelConfig) -> Iterator[tuple[PoolLayout, PoolLayout]]:
    """The first ranks of two workers, and the last ones, for all workers that meet."""
    sides = list(itertools.product(PAGE_SIZES, DTYPES))
    for num_src, num_dst in RANKS:
        try:
            made = [{side: layouts(model, num, *side) for side in sides} for num in (num_src, num_dst)]
        except ConfigError:
            continue
        for one, other in itertools.product(sides, sides):
            src, dst = made[0][one], made[1][other]
            if meet(model, src[0], dst[0]):
                yield from {(src[0], dst[0]), (src[-1], dst[-1])}


def trouble(copy: Copy, src: PoolLayout, dst: PoolLayout, word: int) -> str | None:
    """What is wrong with a copy of all layers, or of one, to the transfer engine: `fits` and `take_pages` of it."""
    ours = copy.pack.image_nbytes if copy.pack else src.page_nbytes
    unit = math.lcm(copy.pack.row_nbytes, word) if copy.pack else word
    spans = [(0, copy.layers[-1] + 1), *((layer, layer + 1) for layer in (copy.layers[0], copy.layers[-1]))]
    for window in (copy.window(*span) for span in spans):
        if not window.nbytes or window.nbytes % unit or window.src % unit or window.dst % word:
            return f"{window} in units of {unit}"
        if window.src + window.nbytes > ours or window.dst + window.nbytes > dst.page_nbytes:
            return f"{window} is outside"
    if copy.pack and unit > limit("state/limits.h", "MESSAGE_BYTES"):
        return f"rows of {unit} bytes"
    return _trouble_of_pack(copy.pack, src) if copy.pack and word == LINE_NBYTES else None


def _trouble_of_pack(pack: PagePack, src: PoolLayout) -> str | None:
    """What is wrong with it to a device: `fits_device`, and what its kernels were compiled for."""
    head_dim = src.page_shape.head_dim
    chunk = min(head_dim & -head_dim, 128)  # as in `pack_constants`
    if pack.head_dim % chunk:
        return f"heads of {pack.head_dim} in chunks of {chunk}"
    if pack.dst_page_size // pack.src_page_size + 3 > 2 * limit("device/device.h", "MOVE_PAGES"):
        return "too many pages in one"
    whole = pack.src_stride // (pack.src_region_nbytes // (pack.num_layers * pack.num_planes * pack.src_page_size))
    sizes = pack.src_stride, 64 * whole, pack.num_rows * pack.num_heads * pack.head_dim // chunk
    return f"{sizes} as int32" if max(sizes) > LARGEST_I32 else None


WITH_STATES = [
    name for name, (family, changes) in SHAPES.items() if from_hf(PUBLISHED[family] | changes, {}, "").recurrent
]


def of_stages(model: ModelConfig, pp: int, tp: int, page_size: int) -> list[PoolLayout]:
    """Those of all ranks, stage by stage."""
    found = []
    for layers, rank in itertools.product(stage_layers(model, pp), range(tp)):
        part = Shard(rank, tp, layers=layers if pp > 1 else None).config(model)
        pages = kv_layout(part, 64, page_size, "bfloat16", HeadShare(rank, tp, model.num_kv_heads))
        num_pages = most_state_pages(pages, part, model, pp, "bfloat16")
        found.append(with_states(pages, part, "bfloat16", num_pages))
        found[-1].validate()
    return found


@pytest.mark.parametrize("name", WITH_STATES)
def test_stages_can_send_all_that_they_have_of_states(name: str) -> None:
    """A state goes by at most three runs for each unit that two ranks both have."""
    (model,) = models_of(name)
    for (pp, tp), (other_pp, other_tp) in (((2, 1), (1, 2)), ((1, 1), (3, 1)), ((2, 2), (1, 4)), ((3, 2), (2, 2))):
        for page_size, other_size in itertools.product((16, 128), repeat=2):
            src, dst = of_stages(model, pp, tp, page_size), of_stages(model, other_pp, other_tp, other_size)
            for one, other in itertools.product(src, dst):
                conversion = Conversion.between(one, other)
                check_on_device(conversion, one)
                copies = conversion.copies
                for copy in () if copies is None else copies.all:
                    assert trouble(copy, one, other, LINE_NBYTES) is None
                stage = one.state_stage or other.state_stage
                assert stage is not None
                assert copies is None or len(copies.state) <= 3 * stage.num_units // max(tp, other_tp)


GEMMA_3_12B = sizes(48, 16, 8, 256, sliding_window_pattern=6)


@pytest.mark.parametrize("name", ["gpt-oss 20B", "Gemma 2 9B", "OLMo 3 7B", "Llama 4 Scout", "Gemma 3 12B"])
def test_stages_can_send_their_places_of_windows(name: str) -> None:
    model = from_hf(PUBLISHED["gemma3_text"] | GEMMA_3_12B, {}, name) if name not in SHAPES else next(models_of(name))
    groups = len(model.page_groups)
    for (pp, tp), (other_pp, other_tp) in (((2, 1), (1, 2)), ((4, 2), (2, 1))):
        src, dst = of_stages(model, pp, tp, 16), of_stages(model, other_pp, other_tp, 64)
        for one, other in itertools.product(src, dst):
            conversion = Conversion.between(one, other)
            check_on_device(conversion, one)
            copies = () if conversion.copies is None else conversion.copies.all
            assert [found for each in copies if (found := trouble(each, one, other, LINE_NBYTES))] == []
        places = sum(len(each.sole_region.layers) for each in src[::tp])
        assert places * groups == model.num_layers, "no place is empty"


SHIM = Path(rules.__file__).parent / "ucx" / "shim"


def limit(header: str, name: str) -> int:
    """A constant of the transfer engine, in bytes or pages."""
    found = re.search(rf"#define {name} (?:\(\(size_t\))?(\d+)(?: << (\d+)\))?", (SHIM / header).read_text())
    assert found, name
    return int(found[1]) << int(found[2] or 0)


def test_the_plan_knows_the_bounds_of_the_transfer_engine() -> None:
    assert limit("state/limits.h", "MESSAGE_BYTES") == rules.MESSAGE_NBYTES
    assert 2 * limit("device/device.h", "MOVE_PAGES") == rules.PACK_ENTRIES


@pytest.mark.parametrize("name", SHAPES)
def test_workers_that_meet_can_send_all_they_have_in_pages_of_any_size(name: str) -> None:
    for model in models_of(name):
        met = list(pairs(model))
        assert len(met) >= len(PAGE_SIZES) * len(DTYPES) ** 2
        for src, dst in met:
            Device("emulated").validate(src)
            conversion = Conversion.between(src, dst)
            check_on_device(conversion, src)  # refuses none of these
            copies = () if conversion.copies is None else conversion.copies.all
            assert [
                found for copy in copies for word in (8, LINE_NBYTES) if (found := trouble(copy, src, dst, word))
            ] == []
