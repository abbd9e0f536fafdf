"""What the engine must know of a model before it reads a weight, the same for every family and file format.

A family's file (`families`) fills it in; the engine's layers and attention read it and know no family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from diptych.architectures.encoder import Encoder
    from diptych.architectures.pooling import Pooling
    from diptych.architectures.recurrent import Recurrent
    from diptych.architectures.tower import Sections, Tower
    from diptych.architectures.vision import VisionInput

Scoring = Literal["softmax", "sigmoid"]
# each head by itself; all heads as one vector; each head by itself and without weights, in layers that rotate
QkNorm = Literal["heads", "all", "unweighted"]
GROUPS_OF_WINDOWS: Final = 8  # of layers, at least, where all have windows


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gpt-oss's activation: `(up + 1) * gate * sigmoid(alpha * gate)`; gates are clamped above, ups on both sides."""

    alpha: float
    limit: float


# relu_squared has no gates: what others multiply with them, it is made of
Activation = Literal["silu", "gelu_tanh", "relu_squared"] | ClampedSwiglu


def inner_size(activation: Activation, ffn_size: int) -> int:
    """Return the numbers that an activation makes `ffn_size` of: gates and ups."""
    return ffn_size if activation == "relu_squared" else 2 * ffn_size


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding of a layer. The two halves of the rotated dimensions turn against each other."""

    theta: float
    dim: int  # so many dimensions of a head rotate, from `start` on
    divisors: tuple[float, ...] = ()  # [dim / 2]: each frequency is divided by its own; empty: by 1
    scale: float = 1.0  # of cosines and sines
    start: int = 0
    interleaved: bool = False  # neighbours rotate against each other where weights are not laid out in halves

    @staticmethod
    def still(dim: int) -> Rope:
        """Return that of a layer without one: every angle is 0."""
        return Rope(1.0, dim, (math.inf,) * (dim // 2))

    @property
    def is_still(self) -> bool:
        return self.divisors[:1] == (math.inf,)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries that grow with the text before them (arXiv 2501.19399).

    By `1 + factor * ln(1 + n)`, where n whole `period`s end before the query's token.
    """

    period: int  # tokens
    factor: float
    still_only: bool = False  # of the layers that do not rotate
    counts_itself: bool = False  # a period that ends with the query's token counts as well


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts in place of one feed-forward network."""

    num_experts: int
    experts_per_token: int
    ffn_size: int  # of one expert
    normalize: bool  # the chosen experts' weights add up to 1
    dense_layers: frozenset[int] = frozenset()  # that have one network, of `ModelConfig.ffn_size`
    scoring: Scoring = "softmax"  # of what the router returns
    choice_bias: bool = False  # scores are corrected for the choice of experts, not for their shares
    num_groups: int = 1  # of experts, by their numbers. A group is as good as its two best experts together
    num_groups_kept: int = 1  # the best groups; experts are chosen from these
    scale: float = 1.0  # of all shares
    shared_ffn_size: int = 0  # of one more network that every token passes; 0: there is none
    latent_size: int = 0  # of what chosen experts see of a token, by a matrix, and return, by another; 0: all of it
    wide_router: bool = False  # it multiplies in float32, whatever else is so
    shared_gate: bool = False  # a sigmoid weighs what that network returns
    router_bias: bool = False  # added to what the router returns
    expert_bias: bool = False  # each expert has biases of gates, ups and results
    scales_inputs: bool = False  # a token has one expert, whose share weighs what it is given, not what it returns
    beside_dense: bool = False  # a token passes the layer's one network as well; each of both has norms (Gemma 4)
    own: range | None = None  # experts that this rank has, whole; None: all of them, or a part of each

    @property
    def is_routed_wide(self) -> bool:
        """Whether the router multiplies in float32: sigmoids are closer to each other than a narrow type can tell.

        So it does where a bias corrects the choice, as models that have one were trained.
        """
        return self.wide_router or self.scoring == "sigmoid" or self.choice_bias


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): a token keeps one vector for all heads, and one rotated key.

    Attention computes with latents as they are kept. A head's projection of keys is applied to its queries, and that of
    values to what attention returns; so to attention all heads share one KV head, the latent and behind it the rotated
    key, and values are its first `rank` dimensions.
    """

    query_rank: int  # queries are made of a latent of their own; 0: of hidden states
    rank: int  # of the latent
    nope_dim: int  # of a head's queries and keys, beside the `rope_dim` that rotate
    rope_dim: int
    value_dim: int  # of a head's values
    interleaved: bool  # neighbours rotate against each other where weights are not laid out in halves
    norm_eps: float

    @property
    def query_dim(self) -> int:
        """The width of a head's query, as the weights have it."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """The width of what a token keeps."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class WideHeads:
    """Keys and values of the layers without a window, where they differ from those of the others."""

    head_dim: int
    num_kv_heads: int  # of them a process computes so many,
    total_kv_heads: int  # the model has so many
    total_others: int  # heads for keys and values that the model has in the other layers
    keys_are_values: bool = False  # one projection makes both; they differ in norm and rotation


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the tokens that a query attends to, in sparse attention (DeepSeek V3.2).

    A token is scored by the heads' weights times the products of their queries with its index key, where negative
    products count as 0. The first dimensions of queries and keys rotate as those of attention do. Ranks do not share
    the heads: every one of them chooses the same tokens.
    """

    num_heads: int
    head_dim: int
    num_kept: int  # tokens that a query attends to, at most
    interleaved: bool  # neighbours rotate against each other where weights are not laid out in halves
    layers: tuple[int, ...]  # that choose, ascending; others attend to what the last of these before them has chosen
    own_queries: bool = False  # made of hidden states, normed for it, not of what attention's queries are made of

    @property
    def size(self) -> int:
        """The numbers of a token that attention is given: queries, the key, and weights."""
        return (self.num_heads + 1) * self.head_dim + self.num_heads


@dataclass(frozen=True, slots=True)
class EagleHead:
    """What an EAGLE-3 head is beside its one layer: see `architectures.eagle`."""

    taps: tuple[int, int, int]  # layers of the model it guesses for, ascending: it reads what comes out of them
    num_words: int  # tokens that it can say
    num_rows: int  # of the output projection; a rank may have a part
    has_words: bool  # it says by its own numbers: a vector has the model's
    has_embed: bool  # its own, in place of the model's;
    has_output: bool  # and so for the output projection


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """A smaller model that guesses what this one will say. In pages its layers lie behind those of this one."""

    model: ModelConfig  # of them a process computes so much,
    total_kv_heads: int  # the model has so many


@dataclass(frozen=True, slots=True)
class Stage:
    """Which of a model's layers those of a configuration are: neighbours, as one stage of a pipeline has them."""

    first_layer: int
    num_layers: int  # of the whole model
    kept: tuple[int, ...]  # of the whole model's pages: layers that keep something of each token, or places of groups
    first_kept: int  # what is added to numbers of the stage's: the first layer, or the first place
    recurrent: tuple[int, ...]  # of the whole model, those that keep a state
    groups: tuple[tuple[int, ...], ...] = ()  # of the stage's layers, see `page_groups`; empty: there is one
    choosing: tuple[int, ...] = ()  # layers of the whole model with an indexer
    by_kind: tuple[tuple[int, ...], ...] = ()  # layers of the whole model, see `layers_by_kind`


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model. The defaults are Llama's."""

    model_id: str  # the name that clients ask for
    architecture: str  # a name in `registry.FAMILIES`
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    rope: Rope
    context_len: int  # tokens
    tie_embeddings: bool  # the output projection is the input embedding
    bos_id: int | None
    eos_ids: tuple[int, ...]
    windows: tuple[int, ...] = ()  # [num_layers]: tokens that a layer sees, the newest; 0: all. Empty: all everywhere
    chunked: bool = False  # windows don't slide: they cut a text into chunks, and a token sees its own up to itself
    local_rope: Rope | None = None  # of the layers with a window; None: as the others
    still_layers: frozenset[int] = frozenset()  # that do not rotate where others do; see `latent_of`
    query_growth: QueryGrowth | None = None
    learned_growth: bool = False  # queries, an indexer's too, grow by what their head has learned of their position
    query_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they do not
    logits_softcap: float = 0.0
    logits_divisor: float = 1.0  # of logits, before they are capped
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False  # of attention's output projection
    attention_gate: bool = False  # what heads return is weighed by a sigmoid of what queries were made of
    sinks: bool = False  # each head has a learned score that takes part in its softmax and has no value
    qk_norm: QkNorm | None = None  # queries and keys are normed before they are rotated
    pre_norms: bool = True  # what goes into attention and feed-forward network is normed
    post_norms: bool = False  # what attention and feed-forward network add is normed, too
    norm_offset: float = 0.0  # added to every norm's weights
    centred_norms: bool = False  # norms of the residual stream subtract the mean, and have biases
    embedding_scale: float = 1.0
    scales_given_rows: bool = False  # rows given in place of embeddings are multiplied by that, as they are
    residual_scale: float = 1.0  # of what attention and feed-forward network add
    moe: Moe | None = None
    latent: Latent | None = None  # with it `num_kv_heads` is 1, and `head_dim` that of what a token keeps
    indexer: Indexer | None = None  # with it there are latents
    sources: tuple[int, ...] = ()  # [num_layers]: whose latents a layer attends to, maybe its own. Empty: all their own
    recurrent: Recurrent | None = None  # its layers have no attention
    wide: WideHeads | None = None  # of the layers without a window; None: they are as the others
    num_borrowing: int = 0  # the last layers have no keys and values: they attend to those of the last layer before
    borrowing_ffn_size: int = 0  # of these layers; 0: as the others
    value_norm: bool = False  # each head of values is normed, without weights
    per_layer_dim: int = 0  # of what each token gives each layer by an embedding of its own; 0: there is none
    layer_scales: bool = False  # what leaves a layer is multiplied by a learned number
    ffn_only: frozenset[int] = frozenset()  # layers that have neither attention nor a state
    without_ffn: frozenset[int] = frozenset()  # layers that have no feed-forward network
    kv_scales: tuple[tuple[float, float], ...] = ()  # [num_layers]: of FP8 keys, of FP8 values. Empty: 1 everywhere
    fp8_weights: bool = False  # as they are stored: GPUs quantise what they multiply them by
    keeps_all: bool = False  # layers with a window keep all tokens of a request, too; see `page_groups`
    encoder: Encoder | None = None  # its layers are none of a decoder
    tower: Tower | None = None  # that makes rows of images; None: the model knows text alone
    vision: VisionInput | None = None  # how images are to be when they come; with a tower
    mrope: Sections | None = None  # `rope` turns by time, height and width of what a token stands for
    pooling: Pooling | None = None  # what is made of a prompt where no text is: there is no output projection then
    draft: DraftLayers | None = None  # that worker and peers agree on; None: pages hold nothing of another model
    num_next_layers: int = 0  # that a checkpoint has behind these layers, and that predict further tokens
    joins_rows: bool = False  # a token begins with its embedding and the hidden row before it: see `next_layer`
    eagle: EagleHead | None = None  # it joins rows that are made of several layers' in a way of its own
    stage: Stage | None = None  # of a pipeline, whose layers these are; None: they are all

    @property
    def sees_images_whole(self) -> bool:
        """Whether the rows of an image see each other, in front and behind."""
        return self.vision is not None and self.vision.is_whole

    @property
    def embeds_behind(self) -> bool:
        """Whether the embedding is read behind the layers, too: as output projection, or by the next layer."""
        return self.tie_embeddings or (self.draft is not None and self.draft.model.joins_rows)

    @property
    def has_first_layer(self) -> bool:
        """Whether what is before the layers is here, too."""
        return self.stage is None or self.stage.first_layer == 0

    @property
    def has_last_layer(self) -> bool:
        """Whether what is behind the layers is here, too."""
        return self.stage is None or self.stage.first_layer + self.num_layers == self.stage.num_layers

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def output_size(self) -> int:
        """The numbers that the decoder returns of a token: logits, or the hidden state that is to be pooled."""
        if self.eagle is not None:
            return self.eagle.num_words
        return self.vocab_size if self.pooling is None else self.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that another model, which guesses for this one, reads what comes out of; ascending."""
        head = None if self.draft is None else self.draft.model.eagle
        return () if head is None else head.taps

    @property
    def num_planes(self) -> int:
        """What a token keeps for a KV head: keys and values, or one vector that is both."""
        return 2 if self.latent is None else 1

    @property
    def value_dim(self) -> int:
        """The dimensions of a head that attention returns."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def states_size(self) -> int:
        """The numbers of a token's queries, and of what is kept."""
        return (self.num_heads + self.num_planes * self.num_kv_heads) * self.head_dim

    @property
    def qkv_size(self) -> int:
        """The numbers of a token that attention is given: these, and behind them the indexer's."""
        return self.states_size + (0 if self.indexer is None else self.indexer.size)

    @property
    def page_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers whose keys and values of some tokens share a page.

        Group 0 has the layers that see all tokens, each further group as many layers with a window as take no more than
        those, or fewer: pages of these are free once no window sees their tokens. Where all layers have windows, the
        first ones stand for those that see all: their pages are the text's. Other models have one group.

        Layers of one window that fill all their groups are dealt out in turns: so neighbouring layers have the same
        places of all groups, and a stage of a pipeline some places of each.
        """
        if self.stage is not None and self.stage.groups:
            return self.stage.groups
        if not self._frees_windows:
            return (self.attention_layers,)
        full, windowed = self._kept_layers
        windowed.sort(key=self.window)  # those of one size lie together
        full, windowed = (full, windowed) if full else (windowed[: self._num_standing], windowed[self._num_standing :])
        size = max(1, len(full) * self._cells(full[0]) // self._cells(windowed[0]))
        if self.deals_windows:
            num_groups = len(windowed) // size
            return tuple(map(tuple, (full, *(windowed[group::num_groups] for group in range(num_groups)))))
        runs = (sorted(windowed[start : start + size]) for start in range(0, len(windowed), size))
        return tuple(map(tuple, (full, *runs)))

    @property
    def deals_windows(self) -> bool:
        """Whether groups of layers with a window are full, beside layers that see all, and alike in all else."""
        full, windowed = self._kept_layers
        if not full or self.wide is not None or self.num_borrowing or not self._frees_windows:
            return False
        return len({self.window(layer) for layer in windowed}) == 1 and len(windowed) % len(full) == 0

    @property
    def _kept_layers(self) -> tuple[list[int], list[int]]:
        """The layers that see all tokens, and those with a window, without those that borrow keys and values."""
        kept = [layer for layer in range(self.num_layers) if self.keeps(layer)]
        return [each for each in kept if not self.window(each)], [each for each in kept if self.window(each)]

    @property
    def _num_standing(self) -> int:
        """How many layers stand for those that see all, where none does."""
        return max(1, self.num_layers // GROUPS_OF_WINDOWS)

    def _cells(self, layer: int) -> int:
        """The numbers of a token in a plane of `layer`, of the whole model: ranks divide layers alike."""
        if self.wide is None:
            return self.num_kv_heads * self.head_dim
        total_heads = self.wide.total_others if self.window(layer) else self.wide.total_kv_heads
        return total_heads * self.head_dim_of(layer)

    @property
    def _frees_windows(self) -> bool:
        """Whether layers with a window have pages of their own, which others have no part in."""
        others = (self.latent, self.recurrent, self.sources, self.ffn_only, self.without_ffn)
        if self.keeps_all or any(others) or not self._has_usual_windows:
            return False
        full, windowed = self._kept_layers
        if not full:
            return self.num_layers > 1
        return len(full) * self._cells(full[0]) <= len(windowed) * self._cells(windowed[0])

    @property
    def _has_usual_windows(self) -> bool:
        """Whether those who borrow find what they borrow in one group, and chunks end together."""
        full, windowed = self._kept_layers
        num_sizes = len({self.window(layer) for layer in windowed})
        if self.num_borrowing:
            return self.wide is not None and bool(full) and num_sizes == 1
        return num_sizes == 1 if self.chunked else num_sizes > 0

    @property
    def layers_by_kind(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each kind of attention: those of each region of pages, with a window, then without.

        Or where pages are of groups of layers: those of each group, and in the last one of their kind those that borrow
        its keys and values.
        """
        groups = self.page_groups
        if len(groups) > 1:
            borrowing = [layer for layer in range(self.num_layers) if not self.keeps(layer)]
            last = {bool(self.window(layers[0])): index for index, layers in enumerate(groups)}
            by_group = [[each for each in borrowing if last[bool(self.window(each))] == i] for i in range(len(groups))]
            return tuple((*layers, *others) for layers, others in zip(groups, by_group, strict=True))
        if self.wide is None:
            return groups
        kinds = ([each for each in range(self.num_layers) if bool(self.window(each)) == slides] for slides in (1, 0))
        return tuple(tuple(layers) for layers in kinds if layers)

    @property
    def kinds(self) -> tuple[ModelConfig, ...]:
        """The model as attention of each kind knows it, with that kind's layers alone, which it counts."""
        kinds = self.layers_by_kind
        return (self,) if len(kinds) == 1 and self.wide is None else tuple(map(self._kind, kinds))

    def _kind(self, layers: tuple[int, ...]) -> ModelConfig:
        return replace(
            self,
            num_layers=len(layers),
            head_dim=self.head_dim_of(layers[0]),
            num_kv_heads=self.kv_heads_of(layers[0]),
            rope=self._turning_rope(layers[0]),
            local_rope=None,
            still_layers=frozenset(place for place, layer in enumerate(layers) if layer in self.still_layers),
            windows=tuple(self.windows[layer] for layer in layers) if self.windows else (),
            wide=None,
            num_borrowing=sum(not self.keeps(layer) for layer in layers),
            kv_scales=tuple(self.kv_scales[layer] for layer in layers) if self.kv_scales else (),
        )

    def wide_at(self, layer: int) -> WideHeads | None:
        """Return the heads of `layer` where they differ from those of others."""
        return None if self.window(layer) else self.wide

    def head_dim_of(self, layer: int) -> int:
        wide = self.wide_at(layer)
        return self.head_dim if wide is None else wide.head_dim

    def kv_heads_of(self, layer: int) -> int:
        wide = self.wide_at(layer)
        return self.num_kv_heads if wide is None else wide.num_kv_heads

    def keeps(self, layer: int) -> bool:
        """Return whether `layer` has keys and values of its own."""
        return self.source(layer) == layer

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values `layer` attends to, in a kind."""
        return self.sources[layer] if self.sources else min(layer, self.num_layers - self.num_borrowing - 1)

    def place(self, layer: int) -> int:
        """Return where, among the layers that keep something, that lies which `layer` attends to, in a kind."""
        return sum(map(self.keeps, range(self.source(layer))))

    def qkv_size_of(self, layer: int) -> int:
        """Return the numbers of a token that attention of `layer` is given.

        With latents a layer that borrows leaves the place of its own unused: an indexer's numbers are behind it.
        """
        if not self.keeps(layer) and self.latent is None:
            return self.num_heads * self.head_dim_of(layer)
        if self.wide_at(layer) is None:
            return self.qkv_size
        return (self.num_heads + 2 * self.kv_heads_of(layer)) * self.head_dim_of(layer)

    def attended_size_of(self, layer: int) -> int:
        """Return the numbers of a token that attention of `layer` returns."""
        return self.num_heads * (self.value_dim if self.wide_at(layer) is None else self.head_dim_of(layer))

    def ffn_size_of(self, layer: int) -> int:
        """Return the size of the one network of `layer`."""
        return self.ffn_size if self.keeps(layer) else self.borrowing_ffn_size or self.ffn_size

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep something of each token."""
        others = self.ffn_only.union(self.recurrent.layers if self.recurrent else ())
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def attending(self) -> ModelConfig:
        """The same model of its attention's layers alone: what attention knows of it, which counts these."""
        kept = self.attention_layers
        if self.mrope is not None:  # which is done before
            return replace(self, mrope=None, rope=Rope.still(self.rope.dim)).attending
        if len(kept) == self.num_layers:
            return self
        return replace(
            self,
            num_layers=len(kept),
            windows=tuple(self.windows[layer] for layer in kept) if self.windows else (),
            kv_scales=tuple(self.kv_scales[layer] for layer in kept) if self.kv_scales else (),
            still_layers=frozenset(place for place, layer in enumerate(kept) if layer in self.still_layers),
            recurrent=None,
            ffn_only=frozenset(),
            without_ffn=frozenset(),
        )

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer in self.recurrent.layers

    def window(self, layer: int) -> int:
        """Return how many tokens `layer` sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def kv_scale(self, layer: int) -> tuple[float, float]:
        """Return what stored FP8 keys, and values, of `layer` are multiplied by."""
        return self.kv_scales[layer] if self.kv_scales else (1.0, 1.0)

    def rope_of(self, layer: int) -> Rope:
        rope = self._turning_rope(layer)
        return replace(Rope.still(rope.dim), start=rope.start) if layer in self.still_layers else rope

    def _turning_rope(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def latent_of(self, layer: int) -> Latent | None:
        """Return what latents are in `layer`: in a still one, all that a head's query meets is made of the latent."""
        if self.latent is None or layer not in self.still_layers:
            return self.latent
        return replace(self.latent, nope_dim=self.latent.query_dim, rope_dim=0)

    def chooses(self, layer: int) -> bool:
        """Return whether an indexer chooses the tokens that `layer`, and maybe others behind it, attend to."""
        return self.indexer is not None and layer in self.indexer.layers

    def looks_back(self, layer: int) -> bool:
        """Return whether `layer` has attention or a state."""
        return layer not in self.ffn_only

    def has_ffn(self, layer: int) -> bool:
        return layer not in self.without_ffn

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_experts(self) -> bool:
        return any(self.is_moe(layer) for layer in range(self.num_layers))
