"""A model whose weights are loaded, and the KV pool that it attends to.

Weights do not depend on the pool: on a GPU they are loaded first, onto a small pool, and the real one gets what memory
they leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import SHARED
from diptych.architectures.placement import Placed
from diptych.checkpoints.quantization.weight import Stored, expanded
from diptych.checkpoints.source import BlankModel, ModelSource
from diptych.common.arrays import F32
from diptych.common.errors import ConfigError
from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.layer_constants import new_sinks, rope_tables
from diptych.engine.attention.staged_batch import StagedBatch, logits_rows
from diptych.engine.models.adapters.lora import Loras, LowRankSetting, adapted_matrices
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.encoder import EncoderModel
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Assembly, Weights, load
from diptych.engine.models.pieces import Pieces
from diptych.engine.models.vision_tower import VisionTower, brought
from diptych.engine.pooling.pooler import Pooler
from diptych.engine.runner.attention_capture import AttentionCapture
from diptych.engine.runner.backends import Backend, Setting, choose, narrowing
from diptych.engine.runner.encoded_images import EncodedImages
from diptych.engine.runner.hidden_rows import HiddenRows
from diptych.engine.runner.kv_pool import DTYPES, own_views
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.sampling.sampler import Sampler
from diptych.engine.runner.states import SlotStates
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.values.batch import ForwardBatch, ImageCounts, OnLayer
from diptych.engine.weights.memory import WeightMemory, weight_memory
from diptych.engine.weights.taking import Taking


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded and computed."""

    dtype: str
    quantization: str = "auto"
    attention_backend: str = "auto"
    decode_attention_backend: str | None = None  # of steps without prompts; None: as the others
    num_threads: int = 1
    max_loras: int = 0
    max_lora_rank: int = 16  # on GPUs
    max_requests: int = 1  # that hold KV at once: each has a state, in models with recurrent layers
    row_tokens: int = 1  # of the longest row that a request may have, with its drafts
    deterministic: bool = False  # a token's bits do not depend on what else is in its step
    expert_parallel: bool = False  # ranks have whole experts
    overlap_batches: bool = False  # a step may have two micro-batches, see `Decoder.forward_both`


@dataclass(frozen=True, slots=True, eq=False)
class Blueprint:
    """What a model's parts are made by."""

    placement: Sequence[Placed]
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    vectors: dict[str, Tensor]  # that it has now: all that is no matrix

    def assembly(self, config: ModelConfig) -> Assembly:
        """Return what puts the tensors of another checkpoint together."""
        return Assembly(config, self.placement, self.ops, self.dtype, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """Make it with `load_model`. One thread at a time may run it."""

    config: ModelConfig  # of this rank's part
    options: ModelOptions
    decoder: Decoder | EncoderModel
    loras: Loras
    sampler: Sampler
    attention: PhasedAttention
    states: SlotStates | None  # of recurrent layers
    sinks: Tensor | None  # that `attention` reads
    communicator: Communicator | None
    blueprint: Blueprint
    capture: AttentionCapture  # of what tokens look at
    only_queues: bool  # all but attention, whatever the numbers: a GPU can record it
    late_attention: PhasedAttention | None = None  # of the second of two micro-batches
    pooler: Pooler | None = None  # None: the model makes text
    main: ModelConfig | None = None  # of the model whose draft this is; None: of none
    draft: LoadedModel | None = None  # that guesses what this one will say, on the same pool
    rows: HiddenRows | None = None  # that the draft joins; both have them
    words: Tensor | None = None  # int64: the tokens that it says by other numbers; None: by theirs
    images: EncodedImages | None = None  # None: the model knows text alone
    shared: Mapping[str, Matrix] = field(default_factory=dict)  # that the draft has of this one, or it of the draft
    weights_id: str = ""

    def memory(self) -> WeightMemory:
        """Return where its own weights lie, without those of adapters and of its draft."""
        made = f"{self.weights_id} as {self.options.dtype}, quantization {self.options.quantization}"
        return weight_memory(self.decoder, made, self.sinks)

    def on(self, kv: Tensor) -> LoadedModel:
        """Return the same model on another pool of such pages. States stay where they are."""
        with torch.inference_mode():
            kinds = _kinds(self.config.attending, self.main, kv, self.options, self.sinks)
            attention, capture = _choose(kinds, self.options).attention, AttentionCapture(self.config, kinds)
            late = _late_attention(kinds, self.options)
            made = self.options, self.blueprint.ops
            states = self.states.on(kv) if self.states else _new_states(self.config, kv, *made)
            draft, images = self.draft and self.draft.on(kv), self.images and self.images.on(kv)
            at_once = replace(self, attention=attention, late_attention=late, capture=capture)
            return replace(at_once, states=states, draft=draft, images=images)

    @property
    def image_counts(self) -> ImageCounts:
        return ImageCounts() if self.images is None else self.images.counts

    def with_rows(self, staged: StagedBatch, on_tower_layer: Callable[[], None]) -> StagedBatch:
        """Return the step with the rows that stand in place of tokens: of images, which are encoded if they are not
        there, and those that clients gave. Behind the first stage of a pipeline they come with all others.
        """
        if not self.config.has_first_layer:
            return staged
        given = staged.host.embeds
        if given is not None:
            tokens, rows = brought(given.tokens, staged.input_ids.device), self._given(given.values)
            staged = replace(staged, embed_tokens=tokens, embed_rows=rows)
        if not staged.host.images:
            return staged
        assert self.images is not None, "admission refuses images where there is no tower"
        found = self.images.of_step(staged.host.images, staged.input_ids.device, on_tower_layer)
        return replace(staged, image_tokens=found.tokens, image_rows=found.rows)

    def _given(self, values: F32) -> Tensor:
        """Return rows in the type of the model's own, multiplied where those of tokens are behind their table."""
        dtype, device = DTYPES[self.options.dtype], self.blueprint.device
        rows = brought(values, device).to(dtype)
        return rows * torch.tensor(self.config.embedding_scale, dtype=dtype) if self.config.scales_given_rows else rows

    def encode(self, batch: ForwardBatch, on_tower_layer: Callable[[], None]) -> Tensor:
        """Write the rows of the step's images to their pages; return logits that mean nothing."""
        assert self.images is not None, "admission refuses images where there is no tower"
        self.images.write(batch.encodes, on_tower_layer)
        rows, device = len(logits_rows(batch)), self.blueprint.device
        return torch.zeros(rows, self.config.output_size, dtype=DTYPES[self.options.dtype], device=device)

    def new_buffers(self, num_tokens: int, device: torch.device) -> Buffers:
        """Return what a step of so many tokens needs for its pieces. Encoders have none."""
        assert isinstance(self.decoder, Decoder), "encoders are refused on GPUs"
        return self.decoder.new_buffers(num_tokens, device)

    def for_requests(self, max_requests: int) -> LoadedModel:
        """Return the same model, to be put on a pool, for so many requests at once."""
        return replace(self, options=replace(self.options, max_requests=max_requests), states=None)

    def sink_place(self, name: str) -> Tensor | None:
        """Return where the attention backends look for a vector; None for any but "LAYER.sinks"."""
        if self.sinks is None or not name.endswith(".sinks"):
            return None
        layers = list(chain(*self.config.attending.layers_by_kind))
        return self.sinks[layers.index(int(name.removesuffix(".sinks")))]

    def serve_others(self, device: torch.device) -> None:
        """See `Decoder.serve_others`."""
        assert isinstance(self.decoder, Decoder), "encoders share no experts"
        self.decoder.serve_others(device)

    def forward(self, batch: StagedBatch, on_layer: OnLayer | None = None, pieces: Pieces | None = None) -> Tensor:
        """Return the logits of `batch.logits_rows`. Attention was told of the batch before, and so were adapters."""
        return self.decoder.forward(batch, self.attention, on_layer, pieces, self.states, self.rows)

    def forward_both(
        self, micro_batches: Sequence[StagedBatch | None], device: torch.device, on_layer: OnLayer | None = None
    ) -> list[Tensor | None]:
        """Do the same for both micro-batches of a round, each of which its own attention was told of."""
        assert isinstance(self.decoder, Decoder), "encoders share no experts"
        pairs = zip(micro_batches, self.attentions, strict=True)
        at_hand = [None if batch is None else (batch, attention) for batch, attention in pairs]
        return self.decoder.forward_both(at_hand, device, on_layer)

    @property
    def attentions(self) -> tuple[PhasedAttention, PhasedAttention]:
        """Those of two micro-batches."""
        assert self.late_attention is not None, "a step has no halves without --overlap-batches"
        return self.attention, self.late_attention

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens `[num_rows]`."""
        found = logits.argmax(dim=-1)
        return found if self.words is None else self.words[found]


def load_with_draft(
    source: ModelSource,
    draft: ModelSource | None,
    kv: Tensor,
    options: ModelOptions,
    communicator: Communicator | None = None,
    taking: Taking | None = None,
) -> LoadedModel:
    """Load a model as `load_model` does, and beside it the one that guesses for it, which has no adapters.

    `taking`: from whom its weights may come, instead of from disk. A model that makes vectors reads its disk.
    """
    may_take = taking is not None and taking.is_hopeful and source.config.pooling is None
    taken = _taken(source, kv, options, taking) if taking is not None and may_take else None
    loaded = taken or load_model(source, kv, options, communicator)
    model = replace(loaded, shared={})  # nobody but a draft holds them beside the model, which may drop its own
    if draft is None or not model.config.has_last_layer:
        return model
    if model.images is not None:
        words = "a draft model would see no image"
        raise ConfigError(f"{model.config.model_id}: {words}: give --speculate suffix or ngram")
    plain, joins = replace(options, max_loras=0), draft.config.joins_rows
    shared = loaded.shared if joins else {}
    ranks = None if communicator is None else communicator.of_one_stage()
    beside = load_model(draft, kv, plain, ranks, main=model.config, shared=shared)
    if not joins:
        return replace(model, draft=beside)
    page_size = own_views(kv, model.config, None)[0].shape[3]
    fc = beside.shared.get("fc")
    rows = HiddenRows(model.config.hidden_size, DTYPES[options.dtype], kv.device, page_size, fc)
    return replace(model, rows=rows, draft=replace(beside, rows=rows, shared={}))


def _taken(source: ModelSource, kv: Tensor, options: ModelOptions, taking: Taking) -> LoadedModel | None:
    """Return a model with the weights of a worker that runs; None: there is none that has them in this form."""
    blank = load_model(BlankModel(source), kv, options)
    return blank if taking.fill(blank.memory()) else None


def as_kept(tensors: Iterable[tuple[str, Stored]], options: ModelOptions) -> Iterable[tuple[str, Stored]]:
    """Return the tensors of a checkpoint in the form that the model keeps them in: as they are stored, or expanded."""
    return expanded(tensors) if options.quantization == "none" else tensors


def load_model(
    source: ModelSource,
    kv: Tensor,
    options: ModelOptions,
    communicator: Communicator | None = None,
    main: ModelConfig | None = None,
    shared: Mapping[str, Matrix] | None = None,
) -> LoadedModel:
    """Load a model to the device of `kv`. With a `communicator` load one rank's part; `kv` is that part's pool.

    `main`: the model, as this process computes it, whose draft this is; `shared`: what it reads of that one.
    """
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not supported; {', '.join(DTYPES)} are")
    dtype = DTYPES[options.dtype]
    with torch.inference_mode():
        part = ModelPart.of(source, communicator, whole_experts=options.expert_parallel)
        if kv.is_cuda:
            _check_on_gpu(part.config, options, communicator)
        sinks = new_sinks(part.config.attending, kv.device)
        kinds = _kinds(part.config.attending, main, kv, options, sinks)
        backend = _choose(kinds, options)
        ops = part.wrap(narrowing(backend, dtype, kv.device) if options.quantization == "fp8" else backend.ops)
        placement = list(part.placement)
        weights = load(part.config, placement, as_kept(part.tensors, options), ops, dtype, kv.device)
        weights = weights.beside({name: each for name, each in (shared or {}).items() if not weights.has(name)})
        _fill(sinks, chain(*part.config.attending.layers_by_kind), weights)
        late_layer = part.config.num_layers - 1 if part.config.has_last_layer else None
        loras = Loras(late_layer, _adapters_of(part.adapted, options, dtype, kv.device), backend.low_rank)
        wrapped = weights.wrapped(loras.wrap)
        decoder: Decoder | EncoderModel
        if part.config.encoder is not None:
            decoder = EncoderModel(part.config, wrapped, dtype)
        else:
            stages = None if communicator is None else communicator.stages
            decoder = Decoder(part.config, wrapped, ops, dtype, stages)
    return LoadedModel(
        config=part.config,
        options=options,
        decoder=decoder,
        loras=loras,
        sampler=backend.sampler,
        attention=backend.attention,
        late_attention=_late_attention(kinds, options),
        states=_new_states(part.config, kv, options, ops),
        sinks=sinks,
        communicator=communicator,
        capture=AttentionCapture(part.config, kinds),
        only_queues=backend.only_queues,
        pooler=None if part.config.pooling is None else Pooler(part.config.pooling, weights, part.config.rms_norm_eps),
        main=main,
        weights_id=source.weights_id,
        images=_new_images(decoder, kv),
        shared={name: weights.matrix(name) for name in _shared(part.config) if weights.has(name)},
        words=weights.constant("words").long() if part.config.eagle and part.config.eagle.has_words else None,
        blueprint=Blueprint(placement, ops, dtype, kv.device, weights.vectors()),
    )


def _check_on_gpu(config: ModelConfig, options: ModelOptions, communicator: Communicator | None) -> None:
    """Raise `ConfigError` if a GPU can't compute the model as it is asked to."""
    if options.deterministic:
        _check_fixed_order(config, 1 if communicator is None else communicator.size)
    if config.pooling is not None and config.pooling.needs_all_tokens:
        words = f"pooling by {config.pooling.method} is not computed on GPUs yet: give --device cpu"
        raise ConfigError(f"{config.model_id}: {words}")


def _shared(config: ModelConfig) -> Sequence[str]:
    """Return what a draft has of its model, or the model of it; a stage has a part of these."""
    return (*SHARED, "fc") if config.eagle else SHARED


def _new_images(decoder: Decoder | EncoderModel, kv: Tensor) -> EncodedImages | None:
    if not isinstance(decoder, Decoder) or decoder.tower is None:
        return None

    def tower() -> VisionTower:
        assert decoder.tower is not None, "the weights were released"
        return decoder.tower

    return EncodedImages(tower, kv)


def _new_states(config: ModelConfig, kv: Tensor, options: ModelOptions, ops: Ops) -> SlotStates | None:
    if config.recurrent is None:
        return None
    sizes = options.max_requests, options.dtype, options.row_tokens
    return SlotStates(config, kv, *sizes, by_token=ops.mixes_by_token)


def _check_fixed_order(config: ModelConfig, num_ranks: int) -> None:
    """Raises `ConfigError` for layers whose sums torch makes on GPUs: they depend on how many rows there are."""
    if config.recurrent is not None:
        raise ConfigError("--deterministic is not for models with recurrent layers on GPUs yet")
    if config.qk_norm == "all" and num_ranks > 1:
        raise ConfigError("--deterministic needs --tp 1 for models that norm all heads as one, on GPUs")


def _adapters_of(
    placement: Iterable[Placed], options: ModelOptions, dtype: torch.dtype, device: torch.device
) -> LowRankSetting:
    return LowRankSetting(options.max_loras, options.max_lora_rank, adapted_matrices(placement), dtype, device)


def _fill(sinks: Tensor | None, layers: Iterable[int], weights: Weights) -> None:
    """Write what was loaded to where the attention backends look for it; `layers`: in the order of `new_sinks`."""
    for layer, place in () if sinks is None else zip(layers, sinks, strict=True):
        loaded = weights.vector(f"{layer}.sinks")
        assert loaded is not None, layer
        place.copy_(loaded)


def _choose(kinds: Sequence[Setting], options: ModelOptions) -> Backend:
    extend = options.attention_backend
    return choose(extend, options.decode_attention_backend or extend, *kinds)


def _late_attention(kinds: Sequence[Setting], options: ModelOptions) -> PhasedAttention | None:
    return _choose(kinds, options).attention if options.overlap_batches else None


def _kinds(
    config: ModelConfig, main: ModelConfig | None, kv: Tensor, options: ModelOptions, sinks: Tensor | None
) -> list[Setting]:
    """Return what is to be computed of each kind of layers."""
    dtype = DTYPES[options.dtype]
    views = own_views(kv, config, main and main.attending)
    if len(config.kinds) == 1:
        index_keys = views[1] if config.indexer is not None else None
        kinds = [Setting(config, views[0], dtype, options.num_threads, sinks, index_keys=index_keys)]
    else:
        whole = Setting(config, views[0], dtype, options.num_threads, sinks, rope_tables(config, views[0]))
        kinds = _of_groups(whole) if len(config.page_groups) > 1 else _of_regions(whole, views)
    return [replace(kind, fixed_order=options.deterministic) for kind in kinds]


def _of_regions(whole: Setting, views: Sequence[Tensor]) -> list[Setting]:
    """Return the kinds of a model whose pages have a region for each."""
    assert whole.sinks is None, "layers of several kinds have no sinks yet"
    each = zip(whole.config.kinds, views, whole.config.layers_by_kind, strict=True)
    return [replace(whole, config=kind, kv=view, layers=layers) for kind, view, layers in each]


def _of_groups(whole: Setting) -> list[Setting]:
    """Return the kinds of a model whose pages are of one of several groups of layers: a page has places for each."""
    config, kinds, end = whole.config, list[Setting](), 0
    for group, (kind, layers) in enumerate(zip(config.kinds, config.layers_by_kind, strict=True)):
        begin, end = end, end + len(layers)
        sinks = None if whole.sinks is None else whole.sinks[begin:end]
        places = _places(whole.kv, kind)
        kinds.append(replace(whole, config=kind, kv=places, sinks=sinks, layers=layers, group=group))
    return kinds


def _places(kv: Tensor, kind: ModelConfig) -> Tensor:
    """Return where in each page the layers of a group lie: at its beginning. What is behind them is unused."""
    shape = kind.num_layers - kind.num_borrowing, kind.num_planes, kv.shape[3], kind.num_kv_heads, kind.head_dim
    return kv.flatten(1)[:, : math.prod(shape)].view(len(kv), *shape)
