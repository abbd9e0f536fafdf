"""The terms on which a worker of this version pairs: what it serves, what it speaks, what it insists on."""

from __future__ import annotations

from typing import Final

from diptych.checkpoints.source import ModelSource
from diptych.common.members.terms import FEATURES, Feature, Terms, bits
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kvtransfer.notes import PROTOCOL_VERSION

FP8: Final = "fp8_e4m3"


def worker_terms(source: ModelSource, kv_backend: str, kv_dtype: str, rules: TransferRules) -> Terms:
    """Page size, ranks and type of the KV are no terms: pages are converted on their way, but for FP8 with scales."""
    model = source.config
    scaled = ", FP8 with scales" if model.kv_scales and kv_dtype == FP8 else ""
    return Terms(
        weights=source.weights_id,
        vocab_size=model.vocab_size,
        kv_shape=f"{model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}{scaled}",
        kv_backend=kv_backend,
        oldest_protocol=PROTOCOL_VERSION,
        newest_protocol=PROTOCOL_VERSION,
        features=FEATURES,
        required_features=bits(Feature.VERIFIED_HAND_OFF) if rules.integrity == "always" else 0,
    )
