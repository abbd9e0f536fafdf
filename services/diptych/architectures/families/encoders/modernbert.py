"""ModernBERT (arXiv 2412.13663): rotary positions, gates, and windows on both sides in most layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diptych.architectures.config import ModelConfig
from diptych.architectures.encoder import Encoder
from diptych.architectures.families.encoders.bert import TRAINING_KEYS, norm
from diptych.architectures.hf_config import LAYER_TYPES, HfConfig
from diptych.architectures.placement import Family, Placed, whole
from diptych.architectures.pooling import Dense, Method, Pooling, classifier

OTHER_KEYS = (  # of masked tokens, and of how transformers computes
    *("sliding_window", "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "embedding_dropout"),
    *("mlp_dropout", "deterministic_flash_attn", "initializer_cutoff_factor", "repad_logits_with_grad"),
    *("layer_norm_eps", "position_embedding_type", "reference_compile"),
)
THETAS: Mapping[str, float] = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}


def _read(hf: HfConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_activation": ("gelu",), "attention_bias": (False,), "mlp_bias": (False,)})
    hf.refuse_unless({"classifier_activation": ("gelu",), "norm_bias": (False,), "classifier_bias": (False,)})
    hidden, num_heads, num_layers = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
    parameters, every = hf.get("rope_parameters") or {}, hf.get("global_attn_every_n_layers") or 3
    hf.ignore(*TRAINING_KEYS, *OTHER_KEYS)
    said = {"full_attention": hf.get("global_rope_theta"), "sliding_attention": hf.get("local_rope_theta")}
    ropes = {
        kind: hf.rope({"rope_theta": said[kind] or theta, **(parameters.get(kind) or {})}, hidden // num_heads, theta)
        for kind, theta in THETAS.items()
    }
    dense = (
        Dense("head.dense", hidden, hidden, activation="gelu", norm="head.norm"),
        Dense("classifier", 0, hidden, bias=True),
    )
    local = [layer for layer in range(num_layers) if layer % every]
    method: Method = "mean" if hf.get("classifier_pooling") == "mean" else "cls"
    return ModelConfig(
        model_id=hf.model_id,
        architecture="modernbert",
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        ffn_size=hf["intermediate_size"],
        rms_norm_eps=hf.get("norm_eps", 1e-5),
        rope=ropes[LAYER_TYPES[0]],
        local_rope=ropes[LAYER_TYPES[1]],
        context_len=hf["max_position_embeddings"],
        tie_embeddings=True,
        bos_id=None,
        eos_ids=(),
        windows=hf.windows(hf["local_attention"] // 2 + 1, local),
        keeps_all=True,
        encoder=Encoder(norms_behind=False, gated=True, norm_bias=False, attention_bias=False),
        pooling=classifier(hf, dense, method) or Pooling("embed", "mean", sees_all=True),
    )


def _placement(config: ModelConfig) -> Iterator[Placed]:
    hidden, ffn = config.hidden_size, config.ffn_size
    yield whole("model.embeddings.tok_embeddings.weight", "embed", (config.vocab_size, hidden))
    yield from norm("model.embeddings.norm", "first_norm", hidden, bias=False)
    yield from norm("model.final_norm", "last_norm", hidden, bias=False)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}."
        if layer:
            yield from norm(f"{block}attn_norm", f"{layer}.attention_norm", hidden, bias=False)
        yield whole(f"{block}attn.Wqkv.weight", f"{layer}.qkv", (3 * hidden, hidden))
        yield whole(f"{block}attn.Wo.weight", f"{layer}.o", (hidden, hidden))
        yield from norm(f"{block}mlp_norm", f"{layer}.ffn_norm", hidden, bias=False)
        yield whole(f"{block}mlp.Wi.weight", f"{layer}.up", (2 * ffn, hidden))
        yield whole(f"{block}mlp.Wo.weight", f"{layer}.down", (hidden, ffn))


def _unread(config: ModelConfig) -> tuple[str, ...]:
    assert config.pooling is not None
    return ("decoder.",) if config.pooling.purpose == "classify" else ("decoder.", "head.")


MODERNBERT = Family(
    "ModernBertModel",
    _read,
    _placement,
    not_read=_unread,
    aliases=("ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
)
