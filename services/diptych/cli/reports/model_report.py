"""Formats what `diptych describe` prints: what a model has, what fits GPUs, what is handed over. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.placement import Piece
from diptych.architectures.registry import placement_of
from diptych.architectures.size import EXPERT, LINEAR, num_active_parameters, num_parameters, weights_nbytes
from diptych.architectures.stages import of_stage, stage_layers, target_in_stage
from diptych.architectures.tower_placement import num_tower_parameters
from diptych.checkpoints.shard import Shard
from diptych.engine.options.pool_size import region_words, whole_layout
from diptych.engine.values.kv_regions import (
    has_unlike_groups,
    pages_per_state,
    region_names,
    state_nbytes,
    window_pages,
)
from diptych.kernels.integer_layout import IntegerLayout
from diptych.kernels.quantized import int4_nbytes, mxfp4_nbytes
from diptych.planner.placing import num_nodes

STATE_DTYPE: Final = "bfloat16"  # of what is not kept in float32
WEIGHT_NBYTES: Final = (
    2  # GPUs compute with bfloat16, whatever a file holds but for FP8, integers and experts in four bits
)
SCALE_NBYTES: Final = 4  # of a row in FP8; blocks have fewer
GIB: Final = 2**30
PROMPT_LENS: Final = (1024, 32 * 1024, 128 * 1024)  # tokens
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Plan:
    """The GPUs of one worker, and how its KV is kept."""

    gpu_gib: float
    memory_share: float
    tp: int
    page_size: int  # tokens
    kv_dtype: str
    has_mxfp4: bool = False  # as the checkpoint's experts are
    int4_group: int | None = None  # columns of a scale of experts in integers of four bits, 0: all; None: they are not
    integers: IntegerLayout | None = None  # of the other matrices of layers; None: they are in floats
    integers_by_name: Mapping[str, IntegerLayout] = field(default_factory=dict)  # of the matrices of a GGUF file
    has_fp8: bool = False  # as the matrices of layers are, stored or made so
    gpus_per_node: int = 0  # 0: nobody asked
    num_sharing: int = 1  # schedulers that share experts, or networks, each with `tp` GPUs
    tps: Sequence[int] = ()  # that the model divides by, and its nodes' GPUs as well, ascending
    pp: int = 1  # stages, each with `tp` GPUs

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.num_sharing


@dataclass(frozen=True, slots=True)
class Fit:
    """What a GPU has room for, bytes but for the pages. Steps need some of the rest as well."""

    weights: int
    page: int
    pages: int  # 0: not even the weights fit


@dataclass(frozen=True, slots=True)
class StageFit:
    """What a GPU of a stage has, bytes."""

    layers: range
    weights: int
    page: int


def fit(model: ModelConfig, plan: Plan) -> Fit:
    """Return what one of the worker's GPUs holds: of stages, which have as many pages, the most that any has."""
    stages = stage_fits(model, plan)
    weights, page = max(each.weights for each in stages), max(each.page for each in stages)
    room = int(plan.gpu_gib * plan.memory_share * GIB) - weights
    return Fit(weights, page, max(0, room // page))


def stage_fits(model: ModelConfig, plan: Plan) -> list[StageFit]:
    """Return what a GPU of each stage has; without stages there is one. Raises `ConfigError`."""
    shard = shard_of(model, plan.tp, plan.num_sharing)
    part = replace(shard.config(model), vocab_size=shard.vocab_rows(model.vocab_size))
    return [_stage_fit(part, plan, shard, layers) for layers in stage_layers(model, plan.pp)]


def _stage_fit(part: ModelConfig, plan: Plan, shard: Shard, layers: range) -> StageFit:
    """`part`: what a GPU would have of all layers."""
    is_whole, tied = len(layers) == part.num_layers, part.tie_embeddings

    def has(target: str) -> bool:
        return is_whole or target_in_stage(target, layers, part.num_layers, tied=tied) is not None

    weights = weights_nbytes(part, WEIGHT_NBYTES, partial(_matrix_nbytes, plan, shard), has)
    own = part if is_whole else of_stage(part, layers)
    return StageFit(layers, weights, whole_layout(own, plan.page_size, plan.kv_dtype).page_nbytes)


def shard_of(model: ModelConfig, tp: int, num_sharing: int) -> Shard:
    """Return the GPU that has the most of a model, where so many schedulers share experts, or networks."""
    if num_sharing == 1:
        return Shard(0, tp)
    if model.moe is None or not model.has_experts:
        return Shard(0, tp, network=Shard(0, tp * num_sharing))
    most = range(-(-model.moe.num_experts // (tp * num_sharing)))
    return Shard(0, tp, whole_experts=True, owned=lambda layer: most)


def smallest_worker(model: ModelConfig, plan: Plan) -> int:
    """Return the fewest GPUs that hold the weights and a request of the whole context; 0: none of `tps` are enough."""
    for tp in plan.tps:
        found = fit(model, replace(plan, tp=tp))
        if found.pages * plan.page_size >= model.context_len:
            return tp
    return 0


def _matrix_nbytes(plan: Plan, shard: Shard, name: str, piece: Piece) -> int:
    """Return what a GPU keeps of a matrix, or of a part of it."""
    if shard.has_elsewhere(piece):
        return 0
    num_rows, num_columns = piece.shape
    if plan.has_mxfp4 and EXPERT.match(piece.target):
        return mxfp4_nbytes(num_rows, num_columns)
    if plan.int4_group is not None and EXPERT.match(piece.target):
        return int4_nbytes(num_rows, num_columns, plan.int4_group)
    layout = plan.integers_by_name.get(name) or (plan.integers if LINEAR.fullmatch(piece.target) else None)
    if layout is not None and not EXPERT.match(piece.target):
        return layout.nbytes(num_rows, num_columns)
    if plan.has_fp8 and LINEAR.fullmatch(piece.target):
        return num_rows * (num_columns + SCALE_NBYTES)
    return num_rows * num_columns * WEIGHT_NBYTES


def handed_over(model: ModelConfig, plan: Plan, num_tokens: int) -> int:
    """Return the bytes that a prompt sends from prefill to decode: whole pages, once for all ranks, and its state.

    Of layers whose windows have their own pages only those are sent that the next tokens see, or may see in the cache.
    """
    layout = whole_layout(model, plan.page_size, plan.kv_dtype)
    num_pages = -(-num_tokens // plan.page_size) + window_pages(model, 1).num_live(num_tokens, plan.page_size)
    return (num_pages + pages_per_state(model, 1, STATE_DTYPE, layout)) * _page_nbytes(model, plan)


def _page_nbytes(model: ModelConfig, plan: Plan) -> int:
    """Return the bytes of a page on all ranks, each head once: but pages that unlike layers share have copies, too."""
    if not has_unlike_groups(model):
        return whole_layout(model, plan.page_size, plan.kv_dtype).page_nbytes
    part = Shard(0, plan.tp).config(model)
    return plan.tp * whole_layout(part, plan.page_size, plan.kv_dtype).page_nbytes


def most_windowed(model: ModelConfig, plan: Plan) -> int:
    """Return the bytes that a request has at most, while it is decoded, in pages of windows."""
    return window_pages(model, 1).most_live(plan.page_size) * _page_nbytes(model, plan)


def as_json(model: ModelConfig, plan: Plan) -> dict[str, Any]:
    """Return everything as numbers; sizes in bytes."""
    found = fit(model, plan)
    return {
        "model": model.model_id,
        "architecture": model.architecture,
        "layers": model.num_layers,
        "context_tokens": model.context_len,
        "parameters": num_parameters(model),
        "active_parameters": num_active_parameters(model),
        "tower": _tower_json(model),
        "kv_token_bytes": _page_nbytes(model, plan) / plan.page_size,
        "kv_window_bytes": most_windowed(model, plan),
        "gpu": {"weights_bytes": found.weights, "page_bytes": found.page, "pages": found.pages},
        **_stages_as_json(model, plan),
        **_nodes_as_json(model, plan),
        "state_bytes": state_nbytes(model.recurrent, STATE_DTYPE) if model.recurrent else 0,
        "handed_over_bytes": {str(each): handed_over(model, plan, each) for each in _lens(model)},
    }


def _nodes_as_json(model: ModelConfig, plan: Plan) -> dict[str, Any]:
    if not plan.gpus_per_node:
        return {}
    return {"nodes": num_nodes(plan.tp * plan.pp, plan.gpus_per_node), "smallest_tp": smallest_worker(model, plan)}


def _stages_as_json(model: ModelConfig, plan: Plan) -> dict[str, Any]:
    """Return what a GPU of each stage has."""
    if plan.pp == 1:
        return {}
    stages = [
        {
            "layers": len(each.layers),
            "weights_bytes": each.weights,
            "kv_token_bytes": each.page / plan.page_size,
        }
        for each in stage_fits(model, plan)
    ]
    return {"stages": stages}


def as_text(model: ModelConfig, plan: Plan) -> str:
    """Return one line a fact."""
    return "\n".join(f"{name:<12} {value}" for name, value in _facts(model, plan))


def _facts(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    total, active = num_parameters(model), num_active_parameters(model)
    yield "model", f"{model.model_id} ({model.architecture})"
    yield "layers", f"{model.num_layers}{_experts(model)}"
    yield "context", f"{model.context_len:,} tokens"
    yield "parameters", _billions(total) + (f", of which a token meets {_billions(active)}" if active < total else "")
    yield from _tower_facts(model, plan)
    yield from _kv_facts(model, plan)
    if model.recurrent is not None:
        size, num_layers = state_nbytes(model.recurrent, STATE_DTYPE), len(model.recurrent.layers)
        yield "state", f"{_size(size)} a request, in {num_layers} layers that keep no KV"
    yield (
        f"{plan.num_gpus} GPU{'s' if plan.num_gpus > 1 else ''}",
        _on_gpus(model, plan),
    )
    if plan.pp > 1:
        yield from _stage_facts(model, plan)
    if plan.gpus_per_node:
        yield "nodes", _on_nodes(smallest_worker(model, plan), plan)
    yield "handed over", ", ".join(f"{each:,} tokens: {_size(handed_over(model, plan, each))}" for each in _lens(model))


def _tower_json(model: ModelConfig) -> dict[str, int] | None:
    """Return what looks at images; None: nothing does."""
    if model.tower is None or model.vision is None:
        return None
    parameters = num_tower_parameters(placement_of(model))
    return {
        "parameters": parameters,
        "weights_bytes": parameters * WEIGHT_NBYTES,
        "least_image_tokens": -(-model.vision.min_pixels // model.vision.step**2),
        "most_image_tokens": model.vision.max_pixels // model.vision.step**2,
        "image_token_bytes": model.tower.out_size * (1 + len(model.tower.taps)) * WEIGHT_NBYTES,
    }


def _tower_facts(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    found = _tower_json(model)
    if found is None or model.vision is None:
        return
    ranks = "every rank" if plan.pp == 1 else "every rank of the first stage"
    weights = f"{_billions(found['parameters'])} of the parameters, {_size(found['weights_bytes'])} on {ranks}"
    yield "images", f"a tower with {weights}"
    step, least, most = model.vision.step, found["least_image_tokens"], found["most_image_tokens"]
    an_image = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    tokens = f"a token for {step} by {step} pixels, {an_image} an image"
    yield "", f"{tokens}; {_size(found['image_token_bytes'])} a token until its prompt is computed"


def _stage_facts(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(stage_fits(model, plan)):
        first, last = each.layers[0], each.layers[-1]
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        token = f"KV {_size(each.page / plan.page_size)} a token"
        yield f"stage {number}", f"{layers}, a GPU: weights {_size(each.weights)}, {token}"


def _kv_facts(model: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    groups, token = model.page_groups, f"{_size(_page_nbytes(model, plan) / plan.page_size)} in {plan.kv_dtype}"
    if not has_unlike_groups(model):
        layout = whole_layout(model, plan.page_size, plan.kv_dtype)
        for name, region in zip(region_names(model), layout.regions, strict=True):
            yield "KV", region_words(name, region)
    else:
        for layers in (groups[0], [layer for group in groups[1:] for layer in group]):
            num_heads, dim = model.kv_heads_of(layers[0]), model.head_dim_of(layers[0])
            heads = f"{num_heads} heads" if num_heads > 1 else "one head"
            yield "KV", f"keys and values of {len(layers)} layers, {heads} of {dim}"
    if len(groups) == 1:
        yield "KV a token", token
        return
    whose = "layers that see all" if not model.window(groups[0][0]) else f"{len(groups[0])} layers that keep all"
    yield "KV a token", f"{token}, of {whose}"
    sizes = sorted({model.window(layer) for group in groups[1:] for layer in group})
    seen = f"{sum(map(len, groups[1:]))} layers that see {' or '.join(f'{each:,}' for each in sizes)} tokens"
    yield "KV windows", f"{_size(most_windowed(model, plan))} a request at most, in {seen}"


def _experts(model: ModelConfig) -> str:
    moe = model.moe
    if moe is None:
        return ""
    shared = " and a shared one" if moe.shared_ffn_size else ""
    dense = f", in {model.num_layers - len(moe.dense_layers)} of them" if moe.dense_layers else " each"
    return f", {moe.num_experts} experts{dense}: a token passes {moe.experts_per_token}{shared}"


def _on_gpus(model: ModelConfig, plan: Plan) -> str:
    found, num_windowed = fit(model, plan), window_pages(model, 1).most_live(plan.page_size)
    shared = "experts" if model.has_experts else "feed-forward networks"
    gpu = f"of {plan.gpu_gib:g} GiB{', each' if plan.num_gpus > 1 else ''}: weights {_size(found.weights)} in bfloat16"
    gpu += ", experts in MXFP4" if plan.has_mxfp4 else ""
    gpu += ", experts in INT4" if plan.int4_group is not None else ""
    gpu += ", matrices of layers in FP8" if plan.has_fp8 else ""
    gpu += f", matrices of layers in INT{plan.integers.bits}" if plan.integers else ""
    gpu += ", integers as stored" if plan.integers_by_name else ""
    gpu += f", a part of the {shared} of {plan.num_sharing} schedulers" if plan.num_sharing > 1 else ""
    if not found.pages:
        return f"{gpu}, which do not fit beside a KV pool: give a larger --tp, --pp or --gpu-gib"
    tokens = found.pages * plan.page_size
    less = f", less {num_windowed:,} pages a request for windows" if num_windowed else ""
    each = " for each scheduler" if plan.num_sharing > 1 else ""
    return f"{gpu}, at most {found.pages:,} KV pages of {plan.page_size} tokens: {tokens:,} tokens{each}{less}"


def _on_nodes(smallest: int, plan: Plan) -> str:
    """Say which group of GPUs is the smallest that serves the whole context, and on how many nodes this one is."""
    num_gpus = plan.tp * plan.pp
    own = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''} on {_nodes(num_gpus, plan.gpus_per_node)}"
    if not smallest:
        most = max(plan.tps, default=0) * plan.pp
        return f"{own}; no group up to {most} GPUs holds weights and a request of the whole context"
    return f"{own}; the smallest for a request of the whole context: {_options(smallest, plan)}"


def _options(tp: int, plan: Plan) -> str:
    count = num_nodes(tp * plan.pp, plan.gpus_per_node)
    return f"--tp {tp}" + (f" --pp {plan.pp}" if plan.pp > 1 else "") + (f" --nnodes {count}" if count > 1 else "")


def _nodes(tp: int, gpus_per_node: int) -> str:
    count = num_nodes(tp, gpus_per_node)
    return f"{count} nodes" if count > 1 else "one node"


def _lens(model: ModelConfig) -> list[int]:
    return [each for each in PROMPT_LENS if each <= model.context_len] or [model.context_len]


def _billions(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e8 else f"{number / 1e6:.1f} million"


def _size(nbytes: float) -> str:
    index = 0
    while nbytes >= 1024 and index < len(UNITS) - 1:
        nbytes, index = nbytes / 1024, index + 1
    return f"{nbytes:.4g} {UNITS[index]}"
