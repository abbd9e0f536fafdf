"""Reads Hugging Face's `config.json` and `generation_config.json`, as far as they mean the same for every family.

Rule: a feature that the model code does not compute is refused by name, and keys that nobody knows are logged.

The ways in which published models stretch their rotary embedding over longer texts are all written as a divisor of each
frequency and a scale of the result, as `Rope` holds them. They are the same for every text: a key that is cached, or
sent to another worker, was rotated once and for all. Formulas: transformers' `modeling_rope_utils.py`, which names the
papers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from diptych.architectures.config import ModelConfig, Rope
from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

# of training, of other programs, and of generation defaults that requests state themselves
HARMLESS: Final = frozenset(
    """_attn_implementation _name_or_path architectures attention_dropout attn_implementation auto_map
    cache_implementation chunk_size_feed_forward classifier_dropout dtype embd_pdrop id2label initializer_range
    is_decoder is_encoder_decoder is_llama_config label2id max_length model_type output_attentions output_hidden_states
    output_router_logits pad_token_id pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef
    router_jitter_noise tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
    use_cache""".split()  # noqa: SIM905
)
# The largest that sizes may be, far above any model: lists of a layer's or a dimension's length are made of them.
MAX_SIZES: Final[Mapping[str, int]] = {
    "attention_chunk_size": 1 << 31,
    "block_ff_dim": 1 << 20,
    "block_multiple_of": 1 << 20,
    "conv_L_cache": 1 << 6,
    "conv_kernel": 1 << 6,
    "floor_scale": 1 << 31,
    "global_head_dim": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 18,
    "hidden_size_per_layer_input": 1 << 14,
    "index_head_dim": 1 << 14,
    "index_n_heads": 1 << 14,
    "index_topk": 1 << 31,
    "intermediate_size": 1 << 20,
    "intermediate_size_mlp": 1 << 20,
    "kv_lora_rank": 1 << 14,
    "linear_conv_kernel_dim": 1 << 6,
    "linear_head_dim": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_num_heads": 1 << 14,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "mamba_head_dim": 1 << 14,
    "mamba_num_heads": 1 << 14,
    "max_position_embeddings": 1 << 31,
    "max_window_layers": 1 << 31,
    "moe_intermediate_size": 1 << 20,
    "moe_latent_size": 1 << 18,
    "moe_shared_expert_intermediate_size": 1 << 20,
    "moe_k": 1 << 12,
    "moe_num_experts": 1 << 12,
    "moe_num_shared_experts": 1 << 12,
    "n_group": 1 << 12,
    "n_groups": 1 << 14,
    "n_routed_experts": 1 << 12,
    "n_shared_experts": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_dense_layers": 1 << 10,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "num_global_key_value_heads": 1 << 14,
    "num_hidden_layers": 1 << 10,
    "num_key_value_heads": 1 << 14,
    "num_kv_shared_layers": 1 << 10,
    "num_local_experts": 1 << 12,
    "original_max_position_embeddings": 1 << 31,
    "q_lora_rank": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "shared_expert_intermediate_size": 1 << 20,
    "sliding_window": 1 << 31,
    "ssm_state_size": 1 << 14,
    "top_k_experts": 1 << 12,
    "topk_group": 1 << 12,
    "v_head_dim": 1 << 14,
    "vocab_size": 1 << 22,
}
OF_WHOLE_HEADS: Final = ("proportional",)  # rotations that say themselves which dimensions are still
LAYER_TYPES: Final = ("full_attention", "sliding_attention")
Parameters = Mapping[str, Any]  # `rope_parameters` or `rope_scaling` of a `config.json`
ORIGINAL: Final = "original_max_position_embeddings"
COMMON_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


class HfConfig(Mapping[str, Any]):
    """`config.json` as a mapping that remembers what was asked of it; a value of null is as good as none."""

    def __init__(self, values: Mapping[str, Any], generation: Mapping[str, Any], model_id: str) -> None:
        self._values = values
        self._generation = generation
        self._asked: set[str] = set()
        self._beside_rope: set[str] = set()
        self.model_id = model_id
        self._refuse_sizes()

    def _refuse_sizes(self) -> None:
        """Raise `ConfigError` for a size that is no whole number, or larger than any model's."""
        for key, limit in MAX_SIZES.items():
            value = self._values.get(key)
            if value is not None and (type(value) is not int or not 0 <= value <= limit):
                raise ConfigError(f"{self.model_id}: {key} must be a whole number up to {limit}, not {value!r:.40}")

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse_unless(self, supported: Mapping[str, Collection[Any]]) -> None:
        """Raise `ConfigError` for a key that has a value other than those `supported`, null or nothing."""
        for key, values in supported.items():
            value = self.get(key)
            if value is not None and value not in values:
                raise ConfigError(f"{self.model_id}: {key}={value!r} in config.json is not supported")

    def ignore(self, *keys: str) -> None:
        """Say that `keys` have no meaning in this family."""
        self._asked.update(keys)

    def log_unknown(self) -> None:
        """Name what nobody has asked for."""
        given = {key for key, value in self._values.items() if value is not None}
        unknown = sorted(given - self._asked - HARMLESS)
        if unknown:
            logger.warning("%s: config.json has keys that are not known and ignored: %s", self.model_id, unknown)

    def part(self, values: Mapping[str, Any], read: Callable[[HfConfig], ModelConfig]) -> ModelConfig:
        """Return what `read` makes of the configuration of a part of the model."""
        part = HfConfig(values, self._generation, self.model_id)
        config = read(part)
        part.log_unknown()
        return config

    def shared(
        self,
        architecture: str,
        *,
        theta: float = 10_000.0,
        tied: bool = False,
        partial_rotary_factor: float = 1.0,
        ffn_key: str = "intermediate_size",
    ) -> ModelConfig:
        """Return what the common keys say; the rest is as in Llama. Other arguments are the family's defaults.

        `ffn_key` says how wide feed-forward networks are, or experts where no layer has another network.
        """
        num_heads = self["num_attention_heads"]
        head_dim = self.get("head_dim") or self["hidden_size"] // num_heads
        return ModelConfig(
            model_id=self.model_id,
            architecture=architecture,
            vocab_size=self["vocab_size"],
            hidden_size=self["hidden_size"],
            num_layers=self["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=self.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            ffn_size=self[ffn_key],
            rms_norm_eps=self["rms_norm_eps"],
            rope=self.rope(self.rope_parameters, head_dim, theta, partial_rotary_factor),
            context_len=stretched_len(self.rope_parameters, self["max_position_embeddings"]),
            tie_embeddings=self.get("tie_word_embeddings", tied),
            bos_id=self.get("bos_token_id"),
            eos_ids=self._eos_ids(),
        )

    @property
    def rope_parameters(self) -> Parameters:
        """As all layers have them, or those without a window."""
        parameters = self.get("rope_parameters") or self.get("rope_scaling") or {}
        full: Parameters = parameters.get("full_attention", parameters)
        return {key: value for key, value in full.items() if key not in self._beside_rope}

    def pop_from_rope(self, key: str) -> Any:
        """Return what `rope_parameters` say of something beside the rotation; from now on they are without it."""
        value = self.rope_parameters.get(key)
        self._beside_rope.add(key)
        return value

    def rope(self, parameters: Parameters, head_dim: int, theta: float, partial_rotary_factor: float = 1.0) -> Rope:
        """Return a kind of layers' rotary embedding; `theta` and `partial_rotary_factor` are the defaults."""
        part = parameters.get("partial_rotary_factor") or self.get("partial_rotary_factor") or partial_rotary_factor
        if not 0 < part <= 1:
            raise ConfigError(f"{self.model_id}: partial_rotary_factor must be above 0 and at most 1, not {part}")
        return read_rope(
            parameters,
            theta=float(parameters.get("rope_theta") or self.get("rope_theta") or theta),
            dim=head_dim if parameters.get("rope_type") in OF_WHOLE_HEADS else int(head_dim * part),
            context_len=self["max_position_embeddings"],
            original_len=self.get("original_max_position_embeddings") or self["max_position_embeddings"],
            model_id=self.model_id,
        )

    def windows(self, window: int | None, default: Collection[int]) -> tuple[int, ...]:
        """Return what `layer_types` says, else: the layers in `default` have the window."""
        types = self.get("layer_types")
        if types is None:
            types = [LAYER_TYPES[layer in default] for layer in range(self["num_hidden_layers"])]
        if len(types) != self["num_hidden_layers"]:
            raise ConfigError(f"{self.model_id}: {len(types)} layer_types for {self['num_hidden_layers']} layers")
        other = set(types) - set(LAYER_TYPES)
        if other:
            raise ConfigError(f"{self.model_id}: layer_types {', '.join(sorted(other))} are not supported")
        if window is None and LAYER_TYPES[1] in types:
            raise ConfigError(f"{self.model_id}: layer_types has {LAYER_TYPES[1]}, but there is no sliding_window")
        windows = tuple(window if each == LAYER_TYPES[1] and window else 0 for each in types)
        return windows if any(windows) else ()

    def _eos_ids(self) -> tuple[int, ...]:
        ids = self._generation.get("eos_token_id", self.get("eos_token_id"))
        listed = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
        if not all(type(each) is int for each in listed):
            raise ConfigError(f"{self.model_id}: eos_token_id is {ids!r:.40}, but tokens are whole numbers")
        return listed


def windows_everywhere(window: int | None, config: ModelConfig) -> tuple[int, ...]:
    """Return those of a model whose layers all have one: none, where no text that it takes outgrows them."""
    return (window,) * config.num_layers if window and window < config.context_len else ()


def read_rope(
    parameters: Parameters, *, theta: float, dim: int, context_len: int, original_len: int, model_id: str
) -> Rope:
    """Return the embedding of `dim` dimensions. `original_len`: of training, if `parameters` do not say another."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"{model_id}: rope scaling {kind!r} is not supported; {', '.join(KINDS)} are")
    read, keys = KINDS[kind]
    unknown = [key for key, value in parameters.items() if key not in COMMON_KEYS | keys and value is not None]
    if unknown:
        raise ConfigError(f"{model_id}: {', '.join(unknown)} of rope scaling {kind!r} is not supported")
    given = {key: value for key, value in parameters.items() if value is not None}
    return read({ORIGINAL: original_len, **given}, theta, dim, context_len)


def stretched_len(parameters: Parameters, context_len: int) -> int:
    """Return how long texts may be: with YaRN, `max_position_embeddings` may be the length before stretching."""
    if (parameters.get("rope_type") or parameters.get("type")) != "yarn":
        return context_len
    original = parameters.get(ORIGINAL) or context_len
    return max(context_len, int(original * parameters["factor"]))


def _plain(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim)


def _linear(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim, (float(parameters["factor"]),) * (dim // 2))


def _llama3(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    return Rope(theta, dim, tuple(_llama3_divisor(parameters, theta ** (2 * i / dim)) for i in range(dim // 2)))


def _llama3_divisor(parameters: Parameters, period: float) -> float:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = parameters[ORIGINAL] / (2 * math.pi * period)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], float(parameters["factor"])
    if turns < low:
        return factor
    if turns > high:
        return 1.0
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def _yarn(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    """YaRN: as `_llama3`, but the ramp between is over the dimensions, and scores grow."""
    factor, original = float(parameters["factor"]), parameters[ORIGINAL]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return Rope(theta, dim, tuple(1 / (each / factor + 1 - each) for each in ramp), _yarn_scale(parameters, factor))


def _yarn_scale(parameters: Parameters, factor: float) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dims:
        return _yarn_growth(factor, mscale) / _yarn_growth(factor, all_dims)
    return _yarn_growth(factor, 1.0)


def growth_of_all_dims(parameters: Parameters) -> float:
    """Return what queries and keys each grow by in models that scale those dimensions, too, that don't rotate."""
    all_dims = parameters.get("mscale_all_dim")
    return _yarn_growth(float(parameters["factor"]), all_dims) if all_dims else 1.0


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _proportional(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    """Gemma 4: of all pairs of a head, which are as far apart as if all rotated, the first part does."""
    part, factor = parameters.get("partial_rotary_factor", 1.0), float(parameters.get("factor", 1.0))
    num_turning = int(part * dim // 2)
    return Rope(theta, dim, (factor,) * num_turning + (math.inf,) * (dim // 2 - num_turning))


def _longrope(parameters: Parameters, theta: float, dim: int, context_len: int) -> Rope:
    """LongRoPE: a list of divisors for models served beyond their original length, and one for others.

    transformers changes lists when a text grows beyond the original length, and leaves cached keys as they are.
    """
    original = parameters[ORIGINAL]
    divisors = parameters["long_factor" if context_len > original else "short_factor"]
    scale, factor = parameters.get("attention_factor"), parameters.get("factor", context_len / original)
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(theta, dim, tuple(map(float, divisors)), float(scale))


Reader = Callable[[Parameters, float, int, int], Rope]
YARN_KEYS: Final = {"factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}
LONGROPE_KEYS: Final = {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"}
KINDS: Final[Mapping[str, tuple[Reader, set[str]]]] = {
    "default": (_plain, set()),
    "linear": (_linear, {"factor"}),
    "dynamic": (_plain, {"factor", ORIGINAL}),  # changes nothing up to `max_position_embeddings`, the longest we serve
    "llama3": (_llama3, {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "proportional": (_proportional, {"factor"}),
    "yarn": (_yarn, YARN_KEYS | {"truncate"}),
    "longrope": (_longrope, LONGROPE_KEYS),
    "su": (_longrope, LONGROPE_KEYS),  # its name in older files
}
