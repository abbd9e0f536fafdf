"""How large a KV pool, and a host tier, the options allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diptych.architectures.fair_shares import check_divides
from diptych.architectures.stages import check_stages, of_stage, stage_layers
from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.engine.schedule.pace.step_sizes import REQUEST_TOKENS, usual
from diptych.engine.values.kv_regions import (
    cell_nbytes,
    given_nbytes,
    kv_layout,
    kv_regions,
    state_nbytes,
    window_pages,
    with_states,
)
from diptych.kvtransfer.layout import HeadShare, PoolLayout, Region

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.architectures.recurrent import Recurrent
    from diptych.engine.options.config import EngineOptions
    from diptych.engine.options.device_kind import DeviceKind

MIN_PAGES: Final = 2
MIB: Final = 2**20
GPU_SIGNS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/proc/driver/nvidia/gpus"))  # none: no GPU


def pool_layout(
    model: ModelConfig, options: EngineOptions, share: HeadShare | None = None, whole: ModelConfig | None = None
) -> PoolLayout:
    """Return the largest pool that fits `kv_cache_mib`; `model` is what this process computes, `share` whose heads.

    All stages of a pipeline, which `whole` is cut into, have as many pages as the one whose pages are largest. Raises
    `ConfigError` for a pool in which no request of `max_model_len` would ever fit.
    """
    one = whole_layout(model, options.page_size, options.kv_dtype, share)
    num_state_pages = 0 if whole is None else most_state_pages(one, model, whole, options.pp, options.dtype)
    one = with_states(one, model, options.dtype, num_state_pages)
    largest = largest_page_nbytes(one, whole or model, options)
    layout = replace(one, num_pages=options.kv_cache_mib * MIB // largest)
    _check_holds(model, layout, options, 1, largest)
    layout.validate()
    return layout


def largest_page_nbytes(layout: PoolLayout, model: ModelConfig, options: EngineOptions) -> int:
    """Return the bytes of a page of the stage of `model` with the largest; `layout`: of any rank's pool."""
    if options.pp == 1:
        return layout.page_nbytes
    of_layer = [region.layer_nbytes(layout.page_size) for region in layout.regions]
    stages = (of_stage(model, layers) for layers in stage_layers(model, options.pp))
    kept = (kv_regions(stage, layout.dtype) for stage in stages)
    return max(sum(len(each.layers) * nbytes for each, nbytes in zip(own, of_layer, strict=True)) for own in kept)


def rank_share(layout: PoolLayout, nbytes: int) -> int:
    """Return what of memory that all ranks have together is for one whose pool is laid out so, by the bytes of pages.

    So all ranks have room for as many pages.
    """
    of_all = sum(len(region.model_layers) * region.layer_nbytes(layout.page_size) for region in layout.regions)
    return nbytes * layout.page_nbytes // (of_all * layout.num_ranks)


def _kept_layers(model: ModelConfig, num_stages: int) -> list[tuple[int, int]]:
    """Return how many layers of each stage a page has places for, and how many keep a state."""
    stages = (of_stage(model, layers) for layers in stage_layers(model, num_stages))
    return [(len(each.page_groups[0]), len(each.recurrent.layers) if each.recurrent else 0) for each in stages]


def most_state_pages(layout: PoolLayout, model: ModelConfig, whole: ModelConfig, num_stages: int, dtype: str) -> int:
    """Return the pages of a state in the stage of `whole` where it takes the most; 0 where there are no stages.

    `layout`: of the one that computes `model`.
    """
    if model.recurrent is None or model.stage is None:
        return 0
    of_layer = model.recurrent.mixer.num_units * cell_nbytes(model.recurrent, dtype)
    page = layout.sole_region.layer_nbytes(layout.page_size)
    return max(-(-states * of_layer // (attending * page)) for attending, states in _kept_layers(whole, num_stages))


def whole_layout(model: ModelConfig, page_size: int, dtype: str, share: HeadShare | None = None) -> PoolLayout:
    """Return a pool of one page."""
    return kv_layout(model, 1, page_size, dtype, share)


def token_nbytes(model: ModelConfig, layout: PoolLayout) -> int:
    """Return what a token of a usual request takes, with its part of what windows hold. `model` is the process's."""
    num_live = window_pages(model, 1).num_live(REQUEST_TOKENS, layout.page_size)
    return layout.page_nbytes // layout.page_size + num_live * layout.page_nbytes // REQUEST_TOKENS


def region_words(name: str, region: Region) -> str:
    """Say what a token has in a region, which holds what `region_names` says."""
    heads = f"{region.total_heads} heads" if region.total_heads > 1 else "one head"
    return f"{name} of {len(region.layers)} layers, {heads} of {region.head_dim}"


def pool_words(model: ModelConfig, layout: PoolLayout, options: EngineOptions, max_requests: int) -> str:
    """Say what a process has memory for, of the whole `model`: pages, and beside them a state for each request."""
    pages = f"{layout.num_pages} KV pages of {layout.page_size} tokens"
    if most_live := window_pages(model, 1).most_live(layout.page_size):
        return f"{pages}, of which a request has up to {most_live} for windows while it is decoded"
    if model.recurrent is None:
        return pages
    stage = layout.state_stage
    own = (
        model.recurrent
        if stage is None
        else replace(model.recurrent, layers=model.recurrent.layers[: stage.num_layers])
    )
    nbytes = max_requests * request_state_nbytes(own.of_rank(options.tp), options)
    return f"{pages}, and {nbytes / MIB:,.0f} MiB beside them for states"


def request_state_nbytes(recurrent: Recurrent, options: EngineOptions) -> int:
    """Return what a request that runs has beside its pages: its state, and with drafts what a row was given."""
    of_row = options.row_tokens * given_nbytes(recurrent, options.dtype) if options.row_tokens > 1 else 0
    return state_nbytes(recurrent, options.dtype) + of_row


def check_pool(model: ModelConfig, options: EngineOptions, role: Role, device: DeviceKind) -> None:
    """Raise what a worker's processes would raise once they have begun. What a GPU has left only they can know."""
    check_divides(model, options.tp)
    check_stages(model, options.pp)
    options = options.on(device)
    if options.kv_cache_mib:
        from diptych.checkpoints.shard import Shard

        layers = stage_layers(model, options.pp)[0] if options.pp > 1 else None
        part = Shard(0, options.tp, layers=layers).config(model)
        layout = pool_layout(part, options, None, model)
        largest = largest_page_nbytes(layout, model, options)
        _check_holds(part, layout, options, 2 if role is Role.UNIFIED else 1, largest)


def likely_device(wanted: DeviceKind, signs: Sequence[Path] = GPU_SIGNS) -> DeviceKind:
    """Return what `--device` most likely means here, without asking a library that takes seconds to load."""
    if wanted != "auto":
        return wanted
    return "cuda" if any(sign.exists() for sign in signs) else "cpu"


def _check_holds(
    model: ModelConfig, layout: PoolLayout, options: EngineOptions, num_shares: int, page_nbytes: int
) -> None:
    """A worker that prefills and decodes gives either no more than its share of the pool.

    `model` is what this process computes; `page_nbytes` of the largest page of any stage.
    """
    page_size, longest = layout.page_size, options.max_model_len
    windows = window_pages(model, usual(options.given_sizes).sizes.max_step_tokens)
    num_state_pages = (1 + num_shares) * layout.pages_per_state
    fewest = windows.pool_pages(MIN_PAGES, page_size)
    of_tokens = max(fewest, num_shares * windows.pool_pages(-(-longest // page_size), page_size))
    needed = of_tokens + num_state_pages
    if layout.num_pages >= needed:
        return
    num_left = windows.fitting(max(0, layout.num_pages - num_state_pages), page_size)
    beside = f" beside {1 + num_shares} states of a request" if num_state_pages else ""
    has = f"{options.kv_cache_mib} MiB of KV memory hold {num_left * page_size:,} tokens{beside}"
    at_least = f"--kv-cache-mib {-(-needed * page_nbytes // MIB)} at least"
    if of_tokens == fewest:
        pages = f"{fewest} pages of {page_size} tokens ({page_nbytes:,} bytes each)"
        raise ConfigError(f"{has}, but {pages} are needed: give {at_least}")
    share = "" if num_shares == 1 else f", shared by {num_shares} parts"
    raise ConfigError(f"{has}{share}, fewer than --max-model-len {longest}: give {at_least}, or lower --max-model-len")


def head_share(model: ModelConfig, options: EngineOptions, rank: int) -> HeadShare | None:
    """Return which heads of the whole `model` a rank holds; None for one that is alone."""
    return HeadShare(rank % options.tp, options.tp, model.num_kv_heads) if options.tp > 1 else None


def num_host_slots(layout: PoolLayout, options: EngineOptions, model: ModelConfig) -> int:
    """Return how many pages of the whole `model` fit `host_cache_mib` on every rank; 0 when it is off."""
    page_nbytes = largest_page_nbytes(layout, model, options)
    num_slots = options.host_cache_mib * MIB // page_nbytes
    if options.host_cache_mib and not num_slots:
        raise ConfigError(f"--host-cache-mib {options.host_cache_mib} holds no page of {page_nbytes} bytes: raise it")
    return num_slots
