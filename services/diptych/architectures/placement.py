"""Where a checkpoint's tensors go: the names of the matrices that the forward pass multiplies, and rows in them.

q, k and v are one matrix, gate and up another: fewer, larger multiplications. A tensor that a checkpoint keeps fused is
several pieces all the same, because tensor-parallel ranks take a part of each.

A family's file describes and computes nothing; the layers compute. So a new family is new only in what it does
differently.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from diptych.architectures.recurrent import DeltaNet
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.architectures.hf_config import HfConfig
    from diptych.architectures.pooling import Pooling


class Split(enum.Enum):
    """What tensor-parallel ranks take of a tensor."""

    NONE = "none"  # each all of it
    ROWS = "rows"  # each an equal part of the rows: of what is computed
    COLUMNS = "columns"  # each an equal part of the columns: of what is read; the results are added up


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor: they go to the rows `[start, start + shape[0])` of `target`."""

    target: str  # "embed", "0.qkv", ...
    start: int
    shape: tuple[int, ...]
    split: Split = Split.NONE
    wide: bool = False  # float32, whatever the model's dtype


Placed = tuple[str, tuple[Piece, ...]]  # a tensor's name in the checkpoint, and its rows in order

Named = tuple[str, Array | QuantizedArray]  # a tensor of a checkpoint


def as_stored(config: ModelConfig, named: Named) -> Iterator[Named]:
    """Yield the tensor as it is: the placement names what checkpoints hold."""
    yield named


@dataclass(frozen=True, slots=True)
class Family:
    """One file of `families`."""

    architecture: str  # as in `config.json`
    read: Callable[[HfConfig], ModelConfig]
    placement: Callable[[ModelConfig], Iterator[Placed]]  # every tensor of a complete checkpoint,
    not_read: Callable[[ModelConfig], tuple[str, ...]] = lambda _: ()  # but those whose names begin so
    unstack: Callable[[ModelConfig, Named], Iterator[Named]] = as_stored  # to the tensors that `placement` names
    learned: str | None = None  # a tensor, not placed, that says more of the configuration:
    with_learned: Callable[[ModelConfig, Array], ModelConfig] = lambda config, _: config
    aliases: tuple[str, ...] = ()  # other names of the architecture
    prefix: str = "model."  # of tensors, which checkpoints that make no text may leave out
    next_name: Callable[[ModelConfig, str], str | None] | None = None  # see `next_layer`; None: it has no such layer


DENSE_NAMES: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERT_NAMES: Final = ("gate_proj", "up_proj", "down_proj")


def whole(name: str, target: str, shape: tuple[int, ...], split: Split = Split.NONE) -> Placed:
    """A tensor that is a target by itself."""
    return name, (Piece(target, 0, shape, split),)


def embeddings(config: ModelConfig) -> Iterator[Placed]:
    """Yield what is before and after the layers."""
    shape = (config.vocab_size, config.hidden_size)
    yield whole("model.embed_tokens.weight", "embed", shape, Split.ROWS)
    yield whole("model.norm.weight", "norm", (config.hidden_size,))
    if not config.tie_embeddings:
        yield whole("lm_head.weight", "lm_head", shape, Split.ROWS)


def head(pooling: Pooling) -> Iterator[Placed]:
    """Yield what pooled vectors are multiplied by; every rank has all of it."""
    for index, dense in enumerate(pooling.head):
        yield whole(f"{dense.name}.weight", f"head.{index}", (dense.rows, dense.columns))
        if dense.bias:
            yield whole(f"{dense.name}.bias", f"head.{index}_bias", (dense.rows,))
        if dense.norm:
            yield whole(f"{dense.norm}.weight", f"head.{index}_norm", (dense.rows,))


def with_output(placement: Iterable[Placed]) -> Iterator[Placed]:
    """Yield the tensors, and of a model whose output projection is its embedding that once more, as "lm_head"."""
    embedding: tuple[Piece, ...] = ()
    has_output = False
    for name, pieces in placement:
        yield name, pieces
        targets = {piece.target for piece in pieces}
        has_output |= "lm_head" in targets
        embedding = pieces if "embed" in targets else embedding
    if not has_output and embedding:
        yield "lm_head.weight", tuple(replace(piece, target="lm_head") for piece in embedding)


def attention(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield a layer's attention as most families name it."""
    prefix = f"model.layers.{layer}.self_attn."
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, start, rows in (("q", 0, q_rows), ("k", q_rows, kv_rows), ("v", q_rows + kv_rows, kv_rows)):
        piece = Piece(f"{layer}.qkv", start, (rows, config.hidden_size), Split.ROWS)
        yield f"{prefix}{name}_proj.weight", (piece,)
        if config.qkv_bias:
            yield f"{prefix}{name}_proj.bias", (Piece(f"{layer}.qkv_bias", start, (rows,), Split.ROWS),)
    if config.attention_gate:  # what `q_proj` of a checkpoint has beside queries, see `qwen3_next`
        yield whole(f"{prefix}gate_proj.weight", f"{layer}.gate", (q_rows, config.hidden_size), Split.ROWS)
    yield whole(f"{prefix}o_proj.weight", f"{layer}.o", (config.hidden_size, q_rows), Split.COLUMNS)
    if config.o_bias:
        yield whole(f"{prefix}o_proj.bias", f"{layer}.o_bias", (config.hidden_size,))
    for name, rows in (("q_norm", q_rows), ("k_norm", kv_rows)):
        if config.qk_norm == "heads":
            yield whole(f"{prefix}{name}.weight", f"{layer}.{name}", (config.head_dim,))
        elif config.qk_norm == "all":
            yield whole(f"{prefix}{name}.weight", f"{layer}.{name}", (rows,), Split.ROWS)


def latent_attention(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield a layer's attention by latents, named as in DeepSeek V3. All ranks have what makes the latents."""
    latent, prefix, hidden = config.latent_of(layer), f"model.layers.{layer}.self_attn.", config.hidden_size
    assert latent is not None
    query_rows = config.num_heads * latent.query_dim
    if latent.query_rank:
        yield whole(f"{prefix}q_a_proj.weight", f"{layer}.q_a", (latent.query_rank, hidden))
        yield whole(f"{prefix}q_a_layernorm.weight", f"{layer}.q_a_norm", (latent.query_rank,))
        yield whole(f"{prefix}q_b_proj.weight", f"{layer}.q_b", (query_rows, latent.query_rank), Split.ROWS)
    else:
        yield whole(f"{prefix}q_proj.weight", f"{layer}.q", (query_rows, hidden), Split.ROWS)
    if config.keeps(layer):
        yield whole(f"{prefix}kv_a_proj_with_mqa.weight", f"{layer}.kv_a", (latent.key_dim, hidden))
        yield whole(f"{prefix}kv_a_layernorm.weight", f"{layer}.kv_a_norm", (latent.rank,))
    head_rows = latent.nope_dim + latent.value_dim
    yield whole(f"{prefix}kv_b_proj.weight", f"{layer}.kv_b", (config.num_heads * head_rows, latent.rank), Split.ROWS)
    value_columns = config.num_heads * latent.value_dim
    yield whole(f"{prefix}o_proj.weight", f"{layer}.o", (hidden, value_columns), Split.COLUMNS)


def indexer(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield what chooses the tokens that a layer attends to, of which every rank has all."""
    assert config.indexer is not None
    assert config.latent is not None
    prefix, heads, dim = f"model.layers.{layer}.self_attn.indexer.", config.indexer.num_heads, config.indexer.head_dim
    seen = config.hidden_size if config.indexer.own_queries else config.latent.query_rank
    yield whole(f"{prefix}wq_b.weight", f"{layer}.index_q", (heads * dim, seen))
    if config.indexer.own_queries:
        yield whole(f"{prefix}q_input_norm.weight", f"{layer}.index_q_norm", (config.hidden_size,))
        yield whole(f"{prefix}q_input_norm.bias", f"{layer}.index_q_norm_bias", (config.hidden_size,))
    yield whole(f"{prefix}wk.weight", f"{layer}.index_k", (dim, config.hidden_size))
    yield whole(f"{prefix}k_norm.weight", f"{layer}.index_k_norm", (dim,))
    yield whole(f"{prefix}k_norm.bias", f"{layer}.index_k_norm_bias", (dim,))
    yield whole(f"{prefix}weights_proj.weight", f"{layer}.index_weights", (heads, config.hidden_size))


def delta_net(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield a layer's gated delta rule, named as in Qwen3.5, the convolution's weights as one vector."""
    assert config.recurrent is not None
    assert isinstance(config.recurrent.mixer, DeltaNet)
    net, prefix, hidden = config.recurrent.mixer, f"model.layers.{layer}.linear_attn.", config.hidden_size
    heads, keys, values = net.num_value_heads, net.num_key_heads * net.key_dim, net.out_size
    start = 0
    for name, sizes in (("qkv", (keys, keys, values)), ("z", (values,)), ("b", (heads,)), ("a", (heads,))):
        yield f"{prefix}in_proj_{name}.weight", _pieces(f"{layer}.mixer_in", start, sizes, (hidden,))
        start += sum(sizes)
    taps = tuple(size * net.conv_width for size in (keys, keys, values))
    yield f"{prefix}conv1d.weight", _pieces(f"{layer}.conv", 0, taps, ())
    for name, target in (("A_log", "decay_log"), ("dt_bias", "decay_bias")):
        yield f"{prefix}{name}", (Piece(f"{layer}.{target}", 0, (heads,), Split.ROWS, wide=True),)
    yield whole(f"{prefix}norm.weight", f"{layer}.mixer_norm", (net.value_dim,))
    yield whole(f"{prefix}out_proj.weight", f"{layer}.mixer_out", (hidden, values), Split.COLUMNS)


def _pieces(target: str, start: int, sizes: Iterable[int], columns: tuple[int, ...]) -> tuple[Piece, ...]:
    """Pieces of a tensor that follow each other in `target`, too; ranks take a part of each."""
    pieces = []
    for size in sizes:
        pieces.append(Piece(target, start, (size, *columns), Split.ROWS))
        start += size
    return tuple(pieces)


def feed_forward(
    prefix: str, target: str, hidden_size: int, ffn_size: int, names: tuple[str, str, str] = DENSE_NAMES
) -> Iterator[Placed]:
    """Yield gate, up and down of one network."""
    gate, up, down = names
    for name, start in ((gate, 0), (up, ffn_size)):
        piece = Piece(f"{target}gate_up", start, (ffn_size, hidden_size), Split.ROWS)
        yield f"{prefix}{name}.weight", (piece,)
    yield whole(f"{prefix}{down}.weight", f"{target}down", (hidden_size, ffn_size), Split.COLUMNS)


def dense(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield a layer's one feed-forward network as most families name it."""
    yield from feed_forward(f"model.layers.{layer}.", f"{layer}.", config.hidden_size, config.ffn_size)


def experts(config: ModelConfig, layer: int, block: str, names: tuple[str, str, str]) -> Iterator[Placed]:
    """Yield a layer's router and experts; `names` are those of an expert's gate, up and down."""
    assert config.moe is not None
    prefix, num_experts = f"model.layers.{layer}.{block}.", config.moe.num_experts
    router = Piece(f"{layer}.router", 0, (num_experts, config.hidden_size), wide=config.moe.is_routed_wide)
    yield f"{prefix}gate.weight", (router,)
    for i in range(num_experts):
        place = f"{layer}.experts.{i}."
        yield from feed_forward(f"{prefix}experts.{i}.", place, config.hidden_size, config.moe.ffn_size, names)


def shared_expert(config: ModelConfig, layer: int, name: str) -> Iterator[Placed]:
    """Yield the network beside a layer's experts that every token passes."""
    assert config.moe is not None
    size = config.moe.shared_ffn_size
    yield from feed_forward(f"model.layers.{layer}.{name}.", f"{layer}.shared.", config.hidden_size, size, EXPERT_NAMES)


def by_expert(config: ModelConfig, name: str, tensor: Array | QuantizedArray) -> Array:
    """Return a tensor that holds something of each expert of a layer. Raises `ConfigError` for another one."""
    assert config.moe is not None
    if isinstance(tensor, QuantizedArray):
        raise ConfigError(f"{config.model_id}: {name} is quantised, which experts in one tensor are not read as")
    if tensor.ndim != 3 or len(tensor) != config.moe.num_experts:
        raise ConfigError(
            f"{config.model_id}: {name} is {tensor.shape}, not the tensors of {config.moe.num_experts} experts"
        )
    return tensor


def unstacked(match: re.Match[str], experts: Iterable[Array]) -> Iterator[Named]:
    """Yield by `EXPERT_NAMES` what each expert has, rows first; `match` has the `block`, and `name`: gate_up or down.

    Ups lie behind gates.
    """
    for i, expert in enumerate(experts):
        prefix = f"{match['block']}{i}."
        if match["name"] == "down":
            yield f"{prefix}down_proj.weight", expert
        else:
            half = len(expert) // 2
            yield f"{prefix}gate_proj.weight", expert[:half]
            yield f"{prefix}up_proj.weight", expert[half:]


def fuse(name: str, target: str, placed: Iterable[Placed]) -> Iterator[Placed]:
    """Yield `placed`, but all that goes to `target` of its layer as one tensor of the checkpoint."""
    fused: list[Piece] = []
    for each, pieces in placed:
        if pieces[0].target.endswith(f".{target}"):
            fused.extend(pieces)
        else:
            yield each, pieces
    yield f"{name}.weight", tuple(fused)


def norms(config: ModelConfig, layer: int) -> Iterator[Placed]:
    """Yield the norms before attention and before the feed-forward network."""
    for name, target in (("input_layernorm", "input_norm"), ("post_attention_layernorm", "ffn_norm")):
        yield whole(f"model.layers.{layer}.{name}.weight", f"{layer}.{target}", (config.hidden_size,))


def llama(config: ModelConfig, block: str = "mlp", names: tuple[str, str, str] = EXPERT_NAMES) -> Iterator[Placed]:
    """Yield the layout that Llama's checkpoints have, and those of many others; `block` and `names`: see `experts`."""
    yield from embeddings(config)
    for layer in range(config.num_layers):
        yield from norms(config, layer)
        yield from attention(config, layer)
        yield from experts(config, layer, block, names) if config.is_moe(layer) else dense(config, layer)
