"""DeepSeek V3.2: DeepSeek V3 whose layers attend to few tokens, which an indexer has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import placement
from diptych.architectures.config import Indexer, ModelConfig
from diptych.architectures.families.latent.deepseek_v3 import latent_placement, layers_behind, read_moe, with_latents
from diptych.architectures.families.latent.glm4_moe_lite import listed_dense_layers
from diptych.architectures.hf_config import HfConfig

SPARSE_TYPES: Final = {"indexed_attention", "deepseek_sparse_attention"}  # one thing: the older name comes second


def read_sparse(hf: HfConfig, architecture: str) -> ModelConfig:
    """Read a model with latents and experts as DeepSeek V3.2 has them. The indexer is still missing."""
    hf.refuse_unless({"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)})
    hf.refuse_unless({"moe_layer_freq": (1,), "rope_interleave": (True,)})
    hf.ignore("num_nextn_predict_layers", "qk_head_dim", "ep_size")
    if {*(hf.get("layer_types") or ())} - SPARSE_TYPES:
        raise ValueError(f"layer_types other than indexed_attention: {hf['layer_types']}")
    config = hf.shared(architecture)
    moe = read_moe(hf, config.num_layers)
    if hf.get("mlp_layer_types"):
        moe = replace(moe, dense_layers=listed_dense_layers(hf, config.num_layers))
    return replace(with_latents(config, hf), moe=moe)


def read_indexer(hf: HfConfig, layers: tuple[int, ...], *, interleaved: bool) -> Indexer:
    """Read what chooses the tokens, in `layers`."""
    hf.refuse_unless({"indexer_rope_interleave": (interleaved,)})
    return Indexer(
        num_heads=hf["index_n_heads"],
        head_dim=hf["index_head_dim"],
        num_kept=hf["index_topk"],
        interleaved=interleaved,
        layers=layers,
    )


def sparse_placement(config: ModelConfig) -> Iterator[placement.Placed]:
    """Yield where the tensors of such a model go."""
    assert config.indexer is not None
    yield from latent_placement(config)
    for layer in config.indexer.layers:
        yield from placement.indexer(config, layer)


def _read(hf: HfConfig) -> ModelConfig:
    config = read_sparse(hf, "deepseek_v32")
    return replace(config, indexer=read_indexer(hf, tuple(range(config.num_layers)), interleaved=False))


DEEPSEEK_V32 = placement.Family("DeepseekV32ForCausalLM", _read, sparse_placement, not_read=layers_behind)
