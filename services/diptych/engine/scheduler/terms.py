"""On which terms workers share KV: what must be equal where it is computed and where it is used. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from diptych.architectures.stages import stage_layers
from diptych.checkpoints.fingerprint import contents, stamps
from diptych.common.members.terms import FEATURES, Feature, Terms, bits
from diptych.common.version import own_version
from diptych.engine.options.logit_processors import parse_processors
from diptych.engine.options.served_model import open_draft
from diptych.engine.tiers.page_format import VERSION
from diptych.engine.values.kv_regions import kv_shape, pages_per_state, state_terms, window_terms
from diptych.kvtransfer.notes import PROTOCOL_VERSION

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.options.config import EngineOptions
    from diptych.engine.values.transfer_rules import TransferRules
    from diptych.kvtransfer.layout import PoolLayout

FP8: Final = "fp8_e4m3"
# fields that came after pages were first kept, of models and layouts, as they are where a page has nothing of them
LATER: Final[dict[str, Any]] = {
    **{"state_nbytes": 0, "state_stage": None, "total_layers": (), "stage": None},
    "scales_given_rows": False,
}


def worker_terms(
    source: ModelSource,
    kv_backend: str,
    layout: PoolLayout,
    rules: TransferRules,
    engine: EngineOptions,
    device_name: str,
) -> Terms:
    """Return the terms on which a worker of this version pairs.

    Page size, ranks and type of the KV are no terms: pages are converted on their way, but for FP8 with scales. Where
    layers are recurrent, the type of layers is a term; where layers with a window have pages of their own and heads
    have several widths, page size and ranks are.
    Prefixes are neither pulled nor lent where layers have states: nobody can begin behind tokens alone.
    Of what is computed with, `product_terms` are terms, and names of
    `--logit-processors`. `engine`: what `auto` means is in it.
    """
    model = source.config
    scaled = ", FP8 with scales" if _has_scales(model) and layout.dtype == FP8 else ""
    windows = window_terms(model, layout)
    states = f", {state_terms(engine.dtype)}" if model.recurrent else ""
    draft, products = draft_terms(source, engine), product_terms(model, engine, device_name)
    return Terms(
        weights=source.weights_id,
        vocab_size=model.vocab_size,
        kv_shape=kv_shape(model) + scaled + states + windows + draft + products + _processor_terms(engine),
        kv_backend=kv_backend,
        oldest_protocol=PROTOCOL_VERSION,
        newest_protocol=PROTOCOL_VERSION,
        features=_features(model, rules, engine),
        required_features=bits(Feature.VERIFIED_HAND_OFF) if rules.integrity == "always" else 0,
    )


def _has_scales(model: ModelConfig) -> bool:
    """Return whether any layer of a page has scales, its own or a draft model's."""
    return bool(model.kv_scales or (model.draft and model.draft.model.kv_scales))


def _features(model: ModelConfig, rules: TransferRules, engine: EngineOptions) -> int:
    """Return what a worker offers of the features of this version."""
    has_states = model.recurrent is not None
    has_rows = model.tower is not None and engine.num_ranks == 1 and rules.pulls and not has_states
    lacking = ((Feature.PULL, has_states or not rules.pulls), (Feature.MOVE, has_states), (Feature.ROWS, not has_rows))
    return FEATURES & ~bits(*(feature for feature, is_lacking in lacking if is_lacking))


def file_terms(source: ModelSource, layout: PoolLayout, engine: EngineOptions, device_name: str) -> dict[str, Any]:
    """Return what must be equal where pages are kept in files and where they are used, as JSON has it.

    It is more than workers agree on: pages are not converted, and files of weights that were edited are others, even
    where samples of them are equal. Names of models say nothing, and are not in it.
    """
    model = source.config
    num_states = pages_per_state(model, engine.tp, engine.dtype, layout)  # pages of each
    return {
        "format": VERSION,
        "weights": source.weights_id,
        "weight_files": [stamps(each.weight_files) for each in _sources(source, engine)],
        "model": asdict(_nameless(model), dict_factory=_as_ever),
        "layout": asdict(layout, dict_factory=_as_ever) | {"num_pages": 0},
        "groups": model.page_groups,
        "states": num_states and [num_states, state_terms(engine.dtype)],
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "products": product_terms(model, engine, device_name),
        "draft": draft_terms(source, engine),
        **_stages(model, engine),
    }


def _stages(model: ModelConfig, engine: EngineOptions) -> dict[str, Any]:
    """Say which layers each stage has: names of what other ranks keep in a store follow from what rank 0 says."""
    return {"stages": [[each.start, each.stop] for each in stage_layers(model, engine.pp)]} if engine.pp > 1 else {}


def store_terms(source: ModelSource, layout: PoolLayout, engine: EngineOptions, device_name: str) -> dict[str, Any]:
    """Return what must be equal where pages are kept in a store and where they are used, as JSON has it.

    Workers that share one have copies of the weights, each with a time of change of its own: so these are told apart by
    all their bytes, which takes as long as reading them.
    """
    weights = {"weight_files": [contents(each.weight_files) for each in _sources(source, engine)]}
    return file_terms(source, layout, engine, device_name) | weights


def _as_ever(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a value, without those of later versions that say "none": what was kept before is found."""
    return {name: value for name, value in fields if name not in LATER or value != LATER[name]}


def _sources(source: ModelSource, engine: EngineOptions) -> list[ModelSource]:
    """Return what computes KV: a model, and its draft model if there is one."""
    draft = open_draft(source, engine)
    return [source] if draft is None else [source, draft]


def _nameless(model: ModelConfig) -> ModelConfig:
    draft = model.draft and replace(model.draft, model=_nameless(model.draft.model))
    return replace(model, model_id="", draft=draft)


def _processor_terms(engine: EngineOptions) -> str:
    """Name what requests may call on both sides, lest they end where it is missing."""
    names = sorted(parse_processors(engine.logit_processors))
    return f", logit processors {', '.join(names)}" if names else ""


def draft_terms(source: ModelSource, engine: EngineOptions) -> str:
    """Say whose draft layers a page has: those of another model guess nothing right."""
    draft = open_draft(source, engine)
    return "" if draft is None else f", of {draft.weights_id}"


def product_terms(model: ModelConfig, engine: EngineOptions, device_name: str) -> str:
    """Say by what products KV is made, where they are no products of the weights with states as they are.

    It is what was asked for that counts: a processor that has no such products makes finer ones.
    """
    if engine.deterministic:  # the same bits come of the same kernels and shards alone, in however many stages
        where = f"{engine.tp} x {device_name if engine.device == 'cuda' else 'CPU'}"
        return f", deterministic ({where}, {engine.dtype}, KV {engine.kv_dtype}, version {own_version()})"
    if engine.quantization == "fp8":
        return ", made by FP8 products (--quantization fp8)"
    return ", made by FP8 products (--quantization auto)" if model.fp8_weights and engine.quantization == "auto" else ""
