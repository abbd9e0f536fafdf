"""BERT, and RoBERTa and XLM-RoBERTa, which number positions otherwise and have another head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Rope
from diptych.architectures.encoder import Encoder
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Family, Piece, Placed, whole
from diptych.architectures.pooling import Dense, Pooling, classifier

TRAINING_KEYS = (  # and such as generation alone would heed
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "gradient_checkpointing", "output_past", "directionality"),
    *("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "num_labels", "tie_word_embeddings"),
)
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh")


def _read(hf: HfConfig, architecture: str, head: tuple[str, str], reserved: int) -> ModelConfig:
    """`head`: the two matrices of a classifier; `reserved`: learned positions that are no token's."""
    hf.refuse_unless({"hidden_act": ACTIVATIONS, "position_embedding_type": ("absolute",)})
    hf.refuse_unless({"is_decoder": (False,), "add_cross_attention": (False,)})
    hf.ignore(*TRAINING_KEYS)
    hidden, num_heads, activation = hf["hidden_size"], hf["num_attention_heads"], hf.get("hidden_act", "gelu")
    dense = (Dense(head[0], hidden, hidden, bias=True, activation="tanh"), Dense(head[1], 0, hidden, bias=True))
    return ModelConfig(
        model_id=hf.model_id,
        architecture=architecture,
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        ffn_size=hf["intermediate_size"],
        rms_norm_eps=hf["layer_norm_eps"],
        rope=Rope.still(hidden // num_heads),
        context_len=hf["max_position_embeddings"] - reserved,
        tie_embeddings=True,
        bos_id=None,
        eos_ids=(),
        encoder=Encoder(
            num_positions=hf["max_position_embeddings"],
            first_position=reserved,
            num_types=hf.get("type_vocab_size") or 0,
            activation="gelu_tanh" if activation in ("gelu_new", "gelu_pytorch_tanh") else activation,
        ),
        pooling=classifier(hf, dense, "cls") or Pooling("embed", "mean", sees_all=True),
    )


def bert_placement(config: ModelConfig, prefix: str) -> Iterator[Placed]:
    """Yield all tensors but those of a head."""
    encoder, hidden = config.encoder, config.hidden_size
    assert encoder is not None
    embeddings = f"{prefix}embeddings."
    yield whole(f"{embeddings}word_embeddings.weight", "embed", (config.vocab_size, hidden))
    yield whole(f"{embeddings}position_embeddings.weight", "positions", (encoder.num_positions, hidden))
    if encoder.num_types:
        yield whole(f"{embeddings}token_type_embeddings.weight", "types", (encoder.num_types, hidden))
    yield from norm(f"{embeddings}LayerNorm", "first_norm", hidden)
    for layer in range(config.num_layers):
        block = f"{prefix}encoder.layer.{layer}."
        for place, name in enumerate(("query", "key", "value")):
            start = place * hidden
            yield f"{block}attention.self.{name}.weight", (Piece(f"{layer}.qkv", start, (hidden, hidden)),)
            yield f"{block}attention.self.{name}.bias", (Piece(f"{layer}.qkv_bias", start, (hidden,)),)
        yield from linear(f"{block}attention.output.dense", f"{layer}.o", hidden, hidden)
        yield from norm(f"{block}attention.output.LayerNorm", f"{layer}.attention_norm", hidden)
        yield from linear(f"{block}intermediate.dense", f"{layer}.up", config.ffn_size, hidden)
        yield from linear(f"{block}output.dense", f"{layer}.down", hidden, config.ffn_size)
        yield from norm(f"{block}output.LayerNorm", f"{layer}.ffn_norm", hidden)


def linear(name: str, target: str, rows: int, columns: int) -> Iterator[Placed]:
    yield whole(f"{name}.weight", target, (rows, columns))
    yield whole(f"{name}.bias", f"{target}_bias", (rows,))


def norm(name: str, target: str, size: int, *, bias: bool = True) -> Iterator[Placed]:
    yield whole(f"{name}.weight", target, (size,))
    if bias:
        yield whole(f"{name}.bias", f"{target}_bias", (size,))


def _family(kind: str, prefix: str, head: tuple[str, str], reserved: int) -> Family:
    read = partial(_read, architecture=prefix.rstrip("."), head=head, reserved=reserved)
    place = partial(bert_placement, prefix=prefix)
    aliases = (f"{kind}ForMaskedLM", f"{kind}ForSequenceClassification")
    unread = (f"{prefix}embeddings.position_ids", "cls.", "lm_head.")
    return placement.Family(
        f"{kind}Model", read, place, aliases=aliases, prefix=prefix, not_read=partial(_unread, names=unread)
    )


def _unread(config: ModelConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """A pooler is read only where it is part of a classifier."""
    pooling = config.pooling
    assert pooling is not None
    return names if pooling.purpose == "classify" else (*names, *(f"{x}pooler." for x in ("bert.", "roberta.")))


BERT = _family("Bert", "bert.", ("bert.pooler.dense", "classifier"), 0)
ROBERTA = _family("Roberta", "roberta.", ("classifier.dense", "classifier.out_proj"), 2)
XLM_ROBERTA = _family("XLMRoberta", "roberta.", ("classifier.dense", "classifier.out_proj"), 2)
