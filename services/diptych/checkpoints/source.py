"""Finds out what a model name means and opens it.

sim                          a built-in one without weights, for simulations
smollm2                      the small model, fetched on first use (also SmolLM2-135M-Instruct)
path/to/model.gguf           one GGUF file
path/to/folder               a Hugging Face folder: config.json, *.safetensors, tokenizer.json
path/to/folder, dummy        the same without weights: they are made up

`bounded` gives a model a shorter context than it could take, for all that is sized by it; with `keeping_all` its layers
keep what no window sees any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from diptych.common.errors import ConfigError
from diptych.common.net.served import LoadFormat

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.checkpoints.quantization.units import Units
    from diptych.checkpoints.quantization.weight import Stored
    from diptych.tokens.tokenizer import Tokenizer

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SIMULATED: Final = "sim"
DEMO_NAMES: Final = ("smollm2", "smollm2-135m-instruct")


class ModelSource(Protocol):
    """An opened model. Opening reads headers only."""

    config: ModelConfig
    weights_id: str  # equal on two machines when the weights are, and in practice only then: see `fingerprint`
    weight_files: Sequence[Path]

    def tokenizer(self) -> Tokenizer: ...

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield each weight under its Hugging Face name, as it is stored.

        One tensor is in memory at a time; it may be a read-only view of the file.
        """
        ...

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        """Yield what `tensors` does, in the same form, with any numbers; as little as possible is read."""
        ...

    def units(self) -> Units:
        """Return which columns of its matrices ranks can't part, as far as that is known before any is read."""
        ...

    def next_layer(self) -> ModelSource:
        """Return the layer behind the model's last one that predicts one token more, as a model by itself.

        Raises `ConfigError` where there is none: see `architectures.next_layer`.
        """
        ...


def open_model(path_or_name: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Open a model. Raises `ConfigError` that names what is missing or not supported."""
    path = Path(path_or_name).expanduser()
    if load_format in PATHS:
        open_path, is_right, wanted = PATHS[load_format]
        if not (path_or_name and is_right(path)):
            raise ConfigError(f"no model {path_or_name!r}: --load-format {load_format} takes {wanted}")
        return open_path(path)
    if path_or_name == SIMULATED:
        return _built_in()
    if path_or_name.lower() in DEMO_NAMES:
        return _demo()
    if path_or_name and path.is_dir():
        return _folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path)
    wanted = "give 'smollm2', a .gguf file, or a folder with config.json and *.safetensors"
    raise ConfigError(f"no model {path_or_name!r}: {_of_a_hub(path_or_name) or wanted}")


def open_described(path_or_name: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Open a model for its configuration and tokenizer alone: a folder needs no weights. Raises `ConfigError`."""
    folder = Path(path_or_name).expanduser()
    if load_format in ("auto", "safetensors") and path_or_name and (folder / "tokenizer.json").is_file():
        return _dummy(folder)
    return open_model(path_or_name, load_format)


# A process opens one model, of one of these kinds, and imports no other.


def _built_in() -> ModelSource:
    from diptych.checkpoints.simulated import BuiltInModel

    return BuiltInModel()


def _demo() -> ModelSource:
    from diptych.checkpoints import demo
    from diptych.checkpoints.gguf_model import GgufModel

    with demo.console_progress() as progress:
        return GgufModel(demo.fetch(progress), demo.MODEL_ID)


def _folder(path: Path) -> ModelSource:
    from diptych.checkpoints.hf_folder import HfFolder

    return HfFolder(path)


def _gguf(path: Path) -> ModelSource:
    from diptych.checkpoints.gguf_model import GgufModel

    return GgufModel(path)


def _dummy(path: Path) -> ModelSource:
    from diptych.checkpoints.dummy import DummyModel

    return DummyModel(path)


def _of_a_hub(name: str) -> str:
    """Say what to do with what looks like a repository's name, ORGANISATION/MODEL; "" for what does not."""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
        return ""
    folder = name.rpartition("/")[2]
    return (
        "there is no such file or folder, and models of a hub are not downloaded at a start (only 'smollm2' is). Fetch"
        f" it by `diptych download {name} {folder}`, and give --model {folder}"
    )


PATHS: Final[Mapping[str, tuple[Callable[[Path], ModelSource], Callable[[Path], bool], str]]] = {
    "safetensors": (_folder, Path.is_dir, "a folder with config.json and *.safetensors"),
    "gguf": (_gguf, Path.is_file, "a GGUF file"),
    "dummy": (_dummy, Path.is_dir, "a folder with config.json"),
}


class ChangedModel:
    """A `ModelSource` with the files of another one, that is served in another way."""

    def __init__(self, source: ModelSource, config: ModelConfig) -> None:
        self._source = source
        self.config = config
        self.weights_id = source.weights_id
        self.weight_files = source.weight_files

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return self._source.tensors()

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self._source.blanks()

    def units(self) -> Units:
        return self._source.units()

    def next_layer(self) -> ModelSource:
        return self._source.next_layer()


class BlankModel(ChangedModel):
    """A `ModelSource` with the form of another one, and other numbers."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source, source.config)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return self._source.blanks()


class ExpandedModel(ChangedModel):
    """A `ModelSource` whose matrices are floats: ranks may part any columns. What has no scales stays as it is."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source, source.config)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        from diptych.checkpoints.quantization.weight import without_scales

        return without_scales(self._source.tensors())

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        from diptych.checkpoints.quantization.weight import without_scales

        return without_scales(self._source.blanks())

    def units(self) -> Units:
        from diptych.checkpoints.quantization.units import apart

        return apart

    def next_layer(self) -> ModelSource:
        return ExpandedModel(self._source.next_layer())


def bounded(source: ModelSource, max_model_len: int) -> ModelSource:
    """Return the model with at most `max_model_len` tokens of context; 0: as it is.

    Raises `ConfigError` for more than it can take.
    """
    if not max_model_len:
        return source
    own = source.config.context_len
    if max_model_len > own:
        words = f"--max-model-len {max_model_len} is more than the {own} tokens that {source.config.model_id} takes"
        raise ConfigError(f"{words}: lower it, or leave it out")
    return ChangedModel(source, replace(source.config, context_len=max_model_len))


def keeping_all(source: ModelSource) -> ModelSource:
    """Return the model with layers that keep all tokens of a request, whatever window they have."""
    return ChangedModel(source, replace(source.config, keeps_all=True))
