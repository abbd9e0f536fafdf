"""What a model makes of a whole prompt where it makes no text: an embedding, or scores of labels.

A checkpoint says it by the name of its architecture (`*Model`, `*ForSequenceClassification`, `*ForRewardModel`), or by
the modules that sentence-transformers lists beside it (`modules.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from diptych.common.errors import ConfigError

Purpose = Literal["embed", "classify"]
Method = Literal["last", "mean", "cls"]  # of hidden states: the last token's, the mean of all, the first token's
Activation = Literal["", "relu", "tanh", "gelu"]

ACTIVATIONS: Final[Mapping[str, Activation]] = {"Identity": "", "ReLU": "relu", "Tanh": "tanh", "GELU": "gelu"}
MODES: Final[Mapping[str, Method]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # sentence-transformers' names
OLD_MODES: Final[Mapping[str, str]] = {  # and how older files say which one is on
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix that a pooled vector is multiplied by."""

    name: str  # of its tensors in the checkpoint, without `.weight` and `.bias`
    rows: int
    columns: int
    bias: bool = False
    activation: Activation = ""  # of what comes of it
    norm: str = ""  # of that: the name of its weights, without `.weight`; it subtracts the mean. Empty: none


@dataclass(frozen=True, slots=True)
class Pooling:
    """From the normed hidden states of a prompt's tokens to one vector."""

    purpose: Purpose
    method: Method
    normalize: bool = False  # the vector has length 1
    head: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its scores
    sees_all: bool = False  # each token sees those behind it, too
    several_labels: bool = False  # each score is a probability of its own; else they are of one choice

    @property
    def needs_all_tokens(self) -> bool:
        """Whether a step must compute the whole prompt: what was computed before, or elsewhere, is not known there."""
        return self.sees_all or self.method != "last"

    def size(self, hidden_size: int) -> int:
        """Return the numbers of a vector."""
        return self.head[-1].rows if self.head else hidden_size


def of_architecture(values: Mapping[str, Any]) -> Pooling | None:
    """Return what the names of an architecture say of a decoder; None: it makes text."""
    names = values.get("architectures") or ()
    if found := classifier(values, (Dense("score", 0, 0),), "last"):
        return found
    if any(name.endswith("ForRewardModel") for name in names):  # Qwen2.5-Math-RM's
        hidden = values["hidden_size"]
        first = Dense("score.0", hidden, hidden, bias=True, activation="relu")
        return Pooling("classify", "last", head=(first, Dense("score.2", 1, hidden, bias=True)), labels=("LABEL_0",))
    if names and all(name.endswith("Model") for name in names):
        return Pooling("embed", "last", normalize=True)
    return None


def classifier(values: Mapping[str, Any], head: tuple[Dense, ...], method: Method) -> Pooling | None:
    """Return the pooling of a classifier, whose head ends with a matrix of a row a label; None: it is none."""
    if not any(name.endswith("ForSequenceClassification") for name in values.get("architectures") or ()):
        return None
    labels = labels_of(values)
    whole = (*head[:-1], replace(head[-1], rows=len(labels), columns=values["hidden_size"]))
    several = values.get("problem_type") == "multi_label_classification"
    return Pooling("classify", method, head=whole, labels=labels, several_labels=several, sees_all=method != "last")


def labels_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier: where nobody says any, transformers has two."""
    named = values.get("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(values.get("num_labels") or 2))
    return tuple(str(named[key]) for key in sorted(named, key=int))


def of_modules(modules: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]) -> Pooling | None:
    """Return what sentence-transformers' modules make of hidden states; None: they pool nothing.

    `settings` has the `config.json` of modules by their paths. Raises `ConfigError` for a module that is not computed.
    """
    pooling: Pooling | None = None
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = Pooling("embed", _method(settings[path]))
            case "Dense" if pooling is not None:
                pooling = replace(pooling, head=(*pooling.head, _dense(path, settings[path])))
            case "Normalize" if pooling is not None:
                pooling = replace(pooling, normalize=True)
            case _:
                raise ConfigError(f"modules.json: {kind or 'a module without a type'} is not supported at its place")
    return pooling


def _method(values: Mapping[str, Any]) -> Method:
    modes = [mode for key, mode in OLD_MODES.items() if values.get(key)]
    given = values.get("pooling_mode", modes)
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in MODES:
        said = " and ".join(map(str, modes)) or "nothing"
        raise ConfigError(f"pooling by {said} is not supported; one of {', '.join(MODES)} is")
    return MODES[modes[0]]


def _dense(path: str, values: Mapping[str, Any]) -> Dense:
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ConfigError(f"{path}: the activation {name} is not supported; {', '.join(ACTIVATIONS)} are")
    rows, columns = values["out_features"], values["in_features"]
    return Dense(f"{path}.linear", rows, columns, bool(values.get("bias", True)), ACTIVATIONS[name])
