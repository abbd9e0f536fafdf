"""An EAGLE-3 head (arXiv 2503.01840) as a model of one layer that joins rows: its configuration, and its tensors.

The row of a token is made by one matrix (`fc`) of what comes out of three layers of the model. The layer reads the
embedding of a token and the row of the token before: each is normed, and attention's input is both side by side, twice
as wide as a row; the residual stream begins with the row as it is. What comes out, before the last norm, is the row for
a guess one token further. The head may say fewer tokens than the model has; `d2t` has, of each, the model's number less
its own.

This is the format of the authors' checkpoints, and what SGLang and vLLM read by the name `LlamaForCausalLMEagle3`. All
three pair token `t + 1` with row `t`, as `next_layer` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from diptych.architectures import placement
from diptych.architectures.config import EagleHead, ModelConfig
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Placed, Split
from diptych.architectures.registry import HEADS, NONSENSE
from diptych.architectures.shape_check import check_shapes
from diptych.common.errors import ConfigError

NUM_TAPS: Final = 3
WORDS: Final = "d2t"
TAPS: Final = "eagle_aux_hidden_state_layer_ids"
_LAYER: Final = "midlayer."
_BLOCK: Final = "model.layers.0."


def read_head(values: Mapping[str, Any], names: Collection[str], model: ModelConfig, model_id: str) -> ModelConfig:
    """Return the head of a `config.json` and a checkpoint with tensors of these names, that guesses for `model`.

    Raises `ConfigError` for another architecture, what no layer computes, or a model that it was not made for.
    """
    hf = HfConfig(values, {}, model_id)
    try:
        _check_architecture(hf)
        config = _config(hf, names, model)
        check_shapes(config)
    except KeyError as error:
        raise ConfigError(f"{model_id}: the configuration has no {error}") from None
    except NONSENSE as error:
        raise ConfigError(f"{model_id}: the configuration makes no sense: {error}") from None
    hf.log_unknown()
    return config


def placement_of(config: ModelConfig) -> Iterator[Placed]:
    """Yield where the tensors of a head go."""
    head, hidden = config.eagle, config.hidden_size
    assert head is not None
    if head.has_embed:
        yield placement.whole("embed_tokens.weight", "embed", (config.vocab_size, hidden), Split.ROWS)
    if head.has_output:
        yield placement.whole("lm_head.weight", "lm_head", (head.num_rows, hidden), Split.ROWS)
    if head.has_words:
        yield WORDS, (placement.Piece("words", 0, (head.num_words,), wide=True),)
    yield placement.whole("norm.weight", "norm", (hidden,))
    yield placement.whole("fc.weight", "fc", (hidden, NUM_TAPS * hidden))
    yield placement.whole(f"{_LAYER}hidden_norm.weight", "row_norm", (hidden,))
    for block in (placement.norms, _wide_attention, placement.dense):
        for name, pieces in block(config, 0):
            yield name.replace(_BLOCK, _LAYER), pieces


def own_name(name: str) -> str:
    """Return what a tensor of a checkpoint is called here: SGLang and vLLM read some that are called otherwise."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", _LAYER, 1) if name.startswith("layers.0.") else name


def _wide_attention(config: ModelConfig, layer: int) -> Iterator[Placed]:
    for name, pieces in placement.attention(config, layer):
        is_wide = pieces[0].target == f"{layer}.qkv"
        wide = (replace(each, shape=(each.shape[0], 2 * config.hidden_size)) for each in pieces)
        yield name, tuple(wide) if is_wide else pieces


def _config(hf: HfConfig, names: Collection[str], model: ModelConfig) -> ModelConfig:
    hf.refuse_unless({"hidden_act": ("silu",), "num_hidden_layers": (1,), "rope_interleaved": (False,)})
    plain = ("attention_bias", "mlp_bias", "bias", "qkv_bias", "norm_before_residual", "norm_before_fc")
    hf.refuse_unless({name: (False,) for name in plain} | {"target_hidden_size": (hf["hidden_size"],)})
    hf.ignore("target_layer_count", "draft_vocab_size", "eagle_config", TAPS, "eagle_module_type")
    config = hf.shared("llama")
    _check_sizes(config, model)
    if config.tie_embeddings and not model.tie_embeddings:
        words = "its output projection is an embedding, and that of the model is not"
        raise ConfigError(f"{config.model_id}: tie_word_embeddings=True is not supported: {words}")
    num_words, has_output = hf.get("draft_vocab_size") or model.vocab_size, "lm_head.weight" in names
    if type(num_words) is not int or not 0 < num_words <= model.vocab_size:
        words = f"draft_vocab_size must be a whole number up to {model.vocab_size}, not {num_words!r:.40}"
        raise ConfigError(f"{config.model_id}: {words}")
    if num_words < model.vocab_size and not (has_output and WORDS in names):
        missing = WORDS if has_output else "lm_head.weight"
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {missing}, and says {num_words} tokens of its own")
    has_embed = "embed_tokens.weight" in names
    head = EagleHead(_taps(hf, model), num_words, num_words, WORDS in names, has_embed, has_output)
    context_len = max(config.context_len, model.context_len)  # of training: further on its guesses may be worse
    return replace(config, joins_rows=True, tie_embeddings=False, context_len=context_len, eagle=head)


def _check_architecture(hf: HfConfig) -> None:
    given = [*map(str, hf.get("architectures") or [f"of model_type {hf.get('model_type')}"])]
    if not {*HEADS} & {*given}:
        words = f"{hf.model_id} is {', '.join(given)}, and heads of {HEADS[0]} are read"
        raise ConfigError(f"--speculate eagle: {words}: a model of its own is given as draft:PATH")


def _check_sizes(config: ModelConfig, model: ModelConfig) -> None:
    sizes = {
        "hidden_size": (config.hidden_size, model.hidden_size),
        "vocab_size": (config.vocab_size, model.vocab_size),
    }
    for name, (own, other) in sizes.items():
        if own != other:
            words = f"{config.model_id} is no head of {model.model_id}: its {name} is {own}, the model's {other}"
            raise ConfigError(f"--speculate eagle: {words}")


def _taps(hf: HfConfig, model: ModelConfig) -> tuple[int, int, int]:
    """Return the layers whose outputs it reads.

    In `eagle_config` they are counted so (SGLang); beside it, where vLLM looks, one more, since there 0 is the
    embedding. Who says nothing reads what goes into layers 2, n / 2 and n - 3, as all three programs have it.
    """
    said: Mapping[str, Any] = hf.get("eagle_config") or {}
    if said.get("use_aux_hidden_state") is False:
        words = "use_aux_hidden_state=False in eagle_config is not supported"
        raise ConfigError(f"{hf.model_id}: {words}: heads that read three layers are")
    inputs = hf.get(TAPS) or (2, model.num_layers // 2, model.num_layers - 3)
    layers = sorted({*(said.get(TAPS) or (each - 1 for each in inputs))})
    if len(layers) != NUM_TAPS or not 0 <= layers[0] <= layers[-1] < model.num_layers - 1:
        words = f"it reads what comes out of layers {layers}, but three of the first {model.num_layers - 1} are wanted"
        raise ConfigError(f"{hf.model_id} is no head of {model.model_id}: {words}: see {TAPS} of its config.json")
    low, middle, high = layers
    return low, middle, high
