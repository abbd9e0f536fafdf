"""What configurations say of models that make no text: as they are published, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.architectures.config import ModelConfig, Rope
from diptych.architectures.encoder import Encoder
from diptych.architectures.pooling import Dense, Pooling, of_modules
from diptych.architectures.registry import from_hf, placement_of
from diptych.common.errors import ConfigError

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.30.0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
XLM = BERT | {
    "architectures": ["XLMRobertaModel"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 4,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "repad_logits_with_grad": False,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 50368,
}
MEAN = Pooling("embed", "mean", sees_all=True)


def read(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> ModelConfig:
    config = from_hf(values, {}, "tiny")
    assert caplog.records == [], "every key is known"
    return config


def test_bert_is_read_whole(caplog: pytest.LogCaptureFixture) -> None:
    config = read(BERT, caplog)
    assert (config.pooling, config.encoder) == (MEAN, Encoder(num_positions=512, num_types=2))
    assert (config.head_dim, config.context_len, config.rms_norm_eps) == (32, 512, 1e-12)
    names = {name for name, _ in placement_of(config)}
    assert "bert.embeddings.LayerNorm.bias" in names
    assert not any("pooler" in name for name in names)


def test_xlm_roberta_has_two_positions_that_are_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    config = read(XLM, caplog)
    assert (config.context_len, config.encoder) == (512, Encoder(num_positions=514, first_position=2, num_types=1))


def test_modernbert_has_windows_on_both_sides_in_two_of_three_layers(caplog: pytest.LogCaptureFixture) -> None:
    config = read(MODERN, caplog)
    assert config.windows == (0, 65, 65, 0)
    assert (config.rope, config.local_rope) == (Rope(160_000.0, 64), Rope(10_000.0, 64))
    assert config.pooling == MEAN


def test_a_classifier_has_a_row_a_label_and_a_reward_model_one(caplog: pytest.LogCaptureFixture) -> None:
    of_bert = read(BERT | {"architectures": ["BertForSequenceClassification"]}, caplog).pooling
    assert of_bert is not None
    assert (of_bert.method, of_bert.labels) == ("cls", ("LABEL_0",))
    assert of_bert.head[1] == Dense("classifier", 1, 384, bias=True)
    llama: dict[str, Any] = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    llama |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 16}
    named = llama | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "b", "0": "a"}}
    assert from_hf(named, {}, "m").pooling == Pooling(
        "classify", "last", head=(Dense("score", 2, 8),), labels=("a", "b")
    )
    reward = from_hf(llama | {"architectures": ["Qwen2ForRewardModel"]}, {}, "m")
    assert [name for name, _ in placement_of(reward)][-4:] == [
        f"score.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    ]
    assert from_hf(llama | {"architectures": ["LlamaForCausalLM"]}, {}, "m").pooling is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        (BERT | {"is_decoder": True}, "is_decoder=True"),
        (BERT | {"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering is not supported"),
        (MODERN | {"norm_bias": True}, "norm_bias=True"),
    ],
)
def test_what_no_layer_computes_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hf(values, {}, "tiny")


def test_modules_are_read_in_their_order() -> None:
    modules = [
        {"type": f"s.{kind}", "path": path} for kind, path in (("Transformer", ""), ("Pooling", "p"), ("Dense", "d"))
    ]
    dense = {"in_features": 4, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    settings: dict[str, Any] = {"p": {"pooling_mode_cls_token": True}, "d": dense}
    head = (Dense("d.linear", 8, 4, bias=True, activation="tanh"),)
    assert of_modules(modules, settings) == Pooling("embed", "cls", head=head)
    assert of_modules(modules[:1], {}) is None
    with pytest.raises(ConfigError, match="Dense is not supported at its place"):
        of_modules(modules[2:], settings)
