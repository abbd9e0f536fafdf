"""What a model is where the options serve it: see `bounded` and `keeping_all`; and the model that guesses for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diptych.architectures.fair_shares import check_divides, check_experts, check_shared
from diptych.checkpoints.source import ChangedModel, ExpandedModel, ModelSource, bounded, keeping_all, open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.speculation import Speculation, parse_speculate
from diptych.generation.request_groups import OF_HEAD

if TYPE_CHECKING:
    from diptych.engine.options.config import EngineOptions

OF_EXPERTS: Final = ("redundant_experts", "rebalance_experts")  # options that mean nothing where there are none


def as_served(source: ModelSource, options: EngineOptions) -> ModelSource:
    """Return `source` with the context, the windows and the draft layers that `options` say. Raises `ConfigError`."""
    if options.quantization == "none":
        source = ExpandedModel(source)
    if options.expert_parallel:
        check_experts(source.config, options.tp)
    if options.dp_attention:
        _check_shared(source, options)
    _check_groups(source, options)
    _check_rows(source, options)
    if options.overlap_batches and source.config.recurrent is not None:
        words = "whose states are of a whole step: leave it out"
        raise ConfigError(f"--overlap-batches is not for recurrent layers, as {source.config.model_id} has, {words}")
    pooling = source.config.pooling
    if options.dp_attention and pooling is not None and pooling.needs_all_tokens:
        words = f"all rows of a prompt are needed for its vector (pooling by {pooling.method})"
        raise ConfigError(f"--dp-attention is not for {source.config.model_id}: {words}: leave it out, or give --tp")
    short = bounded(source, options.max_model_len)
    served = keeping_all(short) if options.kv_windows == "keep" else short
    draft = open_draft(served, options)
    if draft is None:
        return served
    if not draft.config.joins_rows:  # else it is of the same checkpoint, or made for it
        _check_same_tokens(served, draft)
    from diptych.architectures.config import DraftLayers

    layers = DraftLayers(draft.config, draft.config.num_kv_heads)
    return ChangedModel(served, replace(served.config, draft=layers))


def _check_shared(source: ModelSource, options: EngineOptions) -> None:
    """Raises `ConfigError` for what schedulers with attention of their own can't share."""
    num_ranks, moe = options.tp * options.dp, source.config.moe
    check_shared(source.config, num_ranks)
    if moe is None or not source.config.has_experts:
        for name in OF_EXPERTS:
            if getattr(options, name):
                raise ConfigError(f"{source.config.model_id} has no experts: leave out --{name.replace('_', '-')}")
        return
    most = moe.num_experts * (num_ranks - 1)
    if options.redundant_experts > most:
        raise ConfigError(f"--redundant-experts {options.redundant_experts} are more than {most}: all on all ranks")


def _check_groups(source: ModelSource, options: EngineOptions) -> None:
    """Raises `ConfigError` where ranks would divide columns of a weight that share a scale."""
    num_sharing = options.dp if options.dp_attention else 1
    if options.tp * num_sharing == 1:
        return
    from diptych.checkpoints.quantization.declared import check_groups
    from diptych.checkpoints.quantization.units import apart
    from diptych.checkpoints.shard import Shard

    has_experts = source.config.moe is not None and source.config.has_experts
    whole = options.expert_parallel or (options.dp_attention and has_experts)
    network = Shard(0, options.tp * num_sharing) if options.dp_attention and not has_experts else None
    units = source.units()
    if units is not apart:
        check_groups(source.config, Shard(0, options.tp, whole_experts=whole, network=network), units)


def _check_rows(source: ModelSource, options: EngineOptions) -> None:
    """Raises `ConfigError` where the rules of states would take a row of guesses for tokens that all came true."""
    by_torch = options.extend_backend == options.decode_backend == "torch"
    if source.config.recurrent is None or options.device != "cuda" or not by_torch or options.row_tokens == 1:
        return
    words = f"attention backend 'torch' has no guesses for recurrent layers on GPUs, which {source.config.model_id} has"
    raise ConfigError(f"--speculate {options.speculate}: {words}: give --attention-backend auto, or --speculate off")


def open_draft(source: ModelSource, options: EngineOptions) -> ModelSource | None:
    """Return the model that guesses for `source`, which is as it is served; None: there is none.

    Raises `ConfigError` for one whose keys and values can't lie in the pages of `source`.
    """
    guessing = parse_speculate(options.speculate)
    if not guessing.has_layers:
        return None
    draft = keeping_all(_opened(source, options, guessing))
    _check_pages(source, draft, guessing.source)
    check_divides(draft.config, options.tp)
    _check_groups(draft, options)
    return ChangedModel(draft, replace(draft.config, context_len=source.config.context_len))


def _opened(source: ModelSource, options: EngineOptions, guessing: Speculation) -> ModelSource:
    if guessing.source == OF_HEAD:
        from diptych.checkpoints.eagle_folder import EagleFolder

        return EagleFolder(Path(guessing.model).expanduser(), source)
    if not guessing.model:
        return source.next_layer()
    draft = open_model(guessing.model, options.load_format)
    return ExpandedModel(draft) if options.quantization == "none" else draft


def _check_pages(source: ModelSource, draft: ModelSource, name: str) -> None:
    """`name`: of the source that guesses."""
    main, own = source.config, draft.config
    if own.recurrent is not None:
        words = f"{own.model_id} has recurrent layers, whose state would be of guesses"
        raise ConfigError(f"--speculate {name}: {words}: give a model without them, or --speculate suffix")
    if own.context_len < main.context_len:
        words = f"{own.model_id} takes {own.context_len} tokens and can't guess behind {main.context_len}"
        raise ConfigError(f"--speculate draft: {words}: give --max-model-len {own.context_len}, or another draft model")


def _check_same_tokens(source: ModelSource, draft: ModelSource) -> None:
    ours, other = (_hash_of(each) for each in (source, draft))
    if ours != other:
        words = f"{draft.config.model_id} has another tokenizer than {source.config.model_id}"
        raise ConfigError(f"--speculate draft: {words} ({other[:12]}, not {ours[:12]}): give a model that has the same")


def _hash_of(source: ModelSource) -> str:
    """Return the same for two models exactly when all their texts are the same tokens."""
    return hashlib.sha256(source.tokenizer().to_json().encode()).hexdigest()
