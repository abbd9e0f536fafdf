"""Presents a Hugging Face folder (config.json, safetensors sharded or not, tokenizer.json) as a `ModelSource`.

A checkpoint may bring scales of FP8 keys and values: a number stands for what is stored times its layer's scale. Names
in use are `self_attn.k_scale` (vLLM, SGLang), `self_attn.k_proj.k_scale` (ModelOpt) and `self_attn.k_proj.output_scale`
(compressed-tensors, Quark), and those of v. Scales of queries and of probabilities are for products of FP8, which there
are none of: they are left out. Rule: one number a layer for keys and one for values, for all layers or for none.

`SCHEMES` has the formats of quantised weights that a checkpoint's `quantization_config` may name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import next_layer
from diptych.architectures.pooling import Pooling, of_modules
from diptych.architectures.registry import FAMILIES, from_hf, pooled
from diptych.architectures.vision import READERS
from diptych.checkpoints.fingerprint import fingerprint
from diptych.checkpoints.quantization.awq import awq
from diptych.checkpoints.quantization.compressed_tensors import compressed_tensors
from diptych.checkpoints.quantization.declared import declared
from diptych.checkpoints.quantization.float8 import float8, stores_fp8
from diptych.checkpoints.quantization.gptq import gptq
from diptych.checkpoints.quantization.mxfp4 import mxfp4
from diptych.checkpoints.quantization.scheme import Scheme, assemble, quantized_names
from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored, as_floats
from diptych.checkpoints.safetensors import DERIVED, FLOATS, read_blanks, read_header, read_tensors, tensor_names
from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json, read_json_list
from diptych.kernels.quantized import Array
from diptych.tokens.hf_tokenizer import read_tokenizer
from diptych.tokens.tokenizer import Tokenizer

Read = Callable[[Path], Iterator[tuple[str, Array]]]  # all tensors of a file
KvScales = tuple[tuple[float, float], ...]  # [num_layers]: of keys, of values

NAME: Final = re.compile(
    r"\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<of>q|k|v|prob)_scale|[qkv]_proj\.(?P<of_product>[qkv])_scale|(?P<of_output>[qkv])_proj\.output_scale)$"
)
# files that say how images are to come, the last one that is there counts; and the part of them that does
PROCESSORS: Final = {"processor_config.json": "image_processor", "preprocessor_config.json": ""}
SCHEMES: Final[dict[str, Callable[[Mapping[str, Any]], Scheme]]] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": float8,
    "fbgemm_fp8": float8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
}


def read_scheme(config: Mapping[str, Any], model_id: str) -> Scheme:
    """Read `quantization_config`. Raises `ConfigError` for what is not supported."""
    method = str(config.get("quant_method"))
    if method not in SCHEMES:
        raise ConfigError(f"{model_id}: quant_method {method!r} is not supported; {', '.join(SCHEMES)} are")
    try:
        return SCHEMES[method](config)
    except KeyError as error:
        raise ConfigError(f"{model_id}: quantization_config has no {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{model_id}: {error}") from None


class HfFolder:
    """A `ModelSource` over a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = read_config(folder)
        quantization = quantization_of(read_json(folder / "config.json"))
        self._scheme = read_scheme(quantization, config.model_id) if quantization else None
        self._declared = declared(quantization) if quantization else None
        self._shards = shards_of(folder)
        kv_scales, fp8_weights = _kv_scales(self._shards, config), stores_fp8(quantization or {})
        config = replace(config, kv_scales=kv_scales, fp8_weights=fp8_weights)
        self.config = _with_learned(config, self._shards)
        header = (folder / "config.json").read_bytes() + b"".join(read_header(shard)[0] for shard in self._shards)
        self._heads = _heads(folder, self.config)
        self.weight_files: Sequence[Path] = [*self._shards, *self._heads.values()]
        self.weights_id = fingerprint(self.weight_files, header + _pooling_said(self.config))

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._folder, self.config.eos_ids)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return self.read(self._is_own)

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        """A checkpoint that is quantised is read whole: what form a tensor has is known then."""
        return self.read(self._is_own, read_tensors if self._scheme else read_blanks)

    def units(self) -> Units:
        """What is said of a matrix counts unless the files have it in floats."""
        said, names = self._declared, self.names
        if said is None or self._scheme is None:
            return apart
        floats = names - quantized_names(names, self._scheme)
        return lambda name, piece: 1 if name in floats else said.unit_of(name, piece)

    def _is_own(self, name: str) -> bool:
        not_read = FAMILIES[self.config.architecture].not_read(self.config)
        derived = (*DERIVED, "lm_head.weight") if self.config.tie_embeddings else DERIVED
        return not name.startswith(not_read) and not name.endswith(derived)

    def next_layer(self) -> NextLayer:
        return NextLayer(self, next_layer(self.config))

    @property
    def names(self) -> set[str]:
        """The names of all tensors of the files, as models that make text have them."""
        return {self._named(name) for shard in self._shards for name in tensor_names(shard)}

    def read(self, is_wanted: Callable[[str], bool], read: Read = read_tensors) -> Iterator[tuple[str, Stored]]:
        """Yield tensors by their names in the files, as `ModelSource.tensors` does."""
        unstack, names = FAMILIES[self.config.architecture].unstack, self.names
        tensors = self._plain_tensors(is_wanted, read)
        for name, tensor in assemble(tensors, names, self._scheme) if self._scheme else tensors:
            if isinstance(tensor, np.ndarray) and tensor.dtype.type not in FLOATS.values():
                raise ConfigError(f"{self._folder}: {name} is quantised, but quantization_config does not say how")
            yield from unstack(self.config, (name, tensor))

    def _plain_tensors(self, is_wanted: Callable[[str], bool], read: Read) -> Iterator[tuple[str, Array]]:
        for shard in self._shards:
            for stored, tensor in read(shard):
                name = self._named(stored)
                if is_wanted(name) and not is_kv_scale(name):
                    yield name, tensor
        for path, shard in self._heads.items():
            yield from ((f"{path}.{name}", tensor) for name, tensor in read(shard))

    def _named(self, name: str) -> str:
        """Return a tensor's name as models that make text have it: without an output, many leave the prefix out."""
        pooling, family = self.config.pooling, FAMILIES[self.config.architecture]
        if pooling is None:
            return name
        head = [part for dense in pooling.head for part in (dense.name, dense.norm) if part]
        known = (family.prefix, "lm_head.", *head, *family.not_read(self.config))
        return name if name.startswith(known) else f"{family.prefix}{name}"


class NextLayer:
    """A `ModelSource` of the layer that a folder's model has behind its last one."""

    def __init__(self, folder: HfFolder, config: ModelConfig) -> None:
        """`config` is that of the layer. Raises `ConfigError` where the files have none of its tensors."""
        self._folder = folder
        self.config = config
        self.weights_id = f"the next layer of {folder.weights_id}"
        self.weight_files = folder.weight_files
        if not any(map(self._own_name, folder.names)):
            lacks = f"{config.model_id}'s files lack the layer that predicts one token more"
            raise ConfigError(f"--speculate mtp: {lacks}, which its config.json names")

    def tokenizer(self) -> Tokenizer:
        return self._folder.tokenizer()

    def next_layer(self) -> NextLayer:
        return NextLayer(self._folder, next_layer(self.config))

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, tensor in self._folder.read(lambda name: self._own_name(name) is not None):
            own = self._own_name(name)
            assert own is not None, name
            yield own, tensor

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        """A configuration names modules as the files do, so groups of this layer are seen when it is read."""
        return apart

    def _own_name(self, name: str) -> str | None:
        own_name = FAMILIES[self.config.architecture].next_name
        assert own_name is not None, self.config.architecture
        return own_name(self._folder.config, name)


def quantization_of(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what is said of quantised weights: models that know images may say it of their text."""
    said: Mapping[str, Any] | None = values.get("quantization_config")
    text = values.get("text_config")
    return text.get("quantization_config") if said is None and isinstance(text, Mapping) else said


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, where there are such, `generation_config.json` and sentence-transformers' modules."""
    generation = folder / "generation_config.json"
    values = read_json(folder / "config.json")
    config = from_hf(values, read_json(generation) if generation.exists() else {}, folder.resolve().name)
    config = with_processor(folder, config, values)
    pooling = read_modules(folder) if (folder / "modules.json").exists() else None
    if pooling is None or (config.pooling is not None and config.pooling.purpose == "classify"):
        return _with_separator(folder, config)
    return _shortened(folder, pooled(config, pooling))


def with_processor(folder: Path, config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """Return a model that knows images with what the folder says of how these are to come."""
    if config.vision is None:
        return config
    said: Mapping[str, Any] = {}
    for name, part in PROCESSORS.items():
        if (folder / name).exists():
            file = read_json(folder / name)
            said = file.get(part) or {} if part else file
    return replace(config, vision=READERS[config.architecture](values, values["vision_config"], said))


def _with_separator(folder: Path, config: ModelConfig) -> ModelConfig:
    """Return a classifier of pairs with the token behind which its tokenizer says that the second text begins."""
    encoder, pooling = config.encoder, config.pooling
    if encoder is None or encoder.num_types < 2 or pooling is None or pooling.purpose != "classify":
        return config
    if not (folder / "tokenizer.json").exists():
        return config
    separator = read_tokenizer(folder, ()).separator()
    return config if separator is None else replace(config, encoder=replace(encoder, separator=separator))


def read_modules(folder: Path) -> Pooling | None:
    """Return what `modules.json` makes of hidden states. Raises `ConfigError` for what is not computed."""
    modules = read_json_list(folder / "modules.json")
    files = {str(each.get("path", "")): folder / str(each.get("path", "")) / "config.json" for each in modules}
    inside = {path: file for path, file in files.items() if path and ".." not in path and file.exists()}
    try:
        return of_modules(modules, {path: read_json(file) for path, file in inside.items()})
    except KeyError as error:
        raise ConfigError(f"{folder}: the modules of modules.json have no {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _shortened(folder: Path, config: ModelConfig) -> ModelConfig:
    """Return the model with as long a context as sentence-transformers gives it, if that says one."""
    file = folder / "sentence_bert_config.json"
    longest = read_json(file).get("max_seq_length") if file.exists() else None
    return replace(config, context_len=min(config.context_len, longest)) if longest else config


def _heads(folder: Path, config: ModelConfig) -> dict[str, Path]:
    """Return the files of dense modules by their paths."""
    names = [] if config.pooling is None else [dense.name for dense in config.pooling.head]
    paths = [name.removesuffix(".linear") for name in names if name.endswith(".linear")]
    missing = [path for path in paths if not (folder / path / "model.safetensors").exists()]
    if missing:
        raise ConfigError(f"{folder} lacks {missing[0]}/model.safetensors")
    return {path: folder / path / "model.safetensors" for path in paths}


def _pooling_said(config: ModelConfig) -> bytes:
    return b"" if config.pooling is None else repr(config.pooling).encode()


def _kv_scales(shards: list[Path], config: ModelConfig) -> KvScales:
    not_read = FAMILIES[config.architecture].not_read(config)
    with_scales = (shard for shard in shards if any(map(is_kv_scale, tensor_names(shard))))
    tensors = (named for shard in with_scales for named in read_tensors(shard) if not named[0].startswith(not_read))
    return read_kv_scales(tensors, config.num_layers, config.model_id)


def _with_learned(config: ModelConfig, shards: list[Path]) -> ModelConfig:
    """Return `config` with what a tensor of the checkpoint says of it, in families that have one."""
    family = FAMILIES[config.architecture]
    for shard in (shard for shard in shards if family.learned in tensor_names(shard)):
        tensors = dict(named for named in read_tensors(shard) if named[0] == family.learned)
        return family.with_learned(config, as_floats(tensors[str(family.learned)]))
    if family.learned is not None:
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {family.learned}")
    return config


def shards_of(folder: Path) -> list[Path]:
    """Return the files of weights of a folder. Raises `ConfigError` where some are missing."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    shards = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ConfigError(f"{folder} lacks the shards {', '.join(missing)}")
    return shards


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is such a scale, one of those that are left out included."""
    return NAME.search(name) is not None


def read_kv_scales(tensors: Iterable[tuple[str, Array]], num_layers: int, model_id: str) -> KvScales:
    """Return the scales among `tensors`; empty where there are none. Raises `ConfigError` for what can't be used."""
    found: dict[tuple[int, str], float] = {}
    for name, tensor in tensors:
        match = NAME.search(name)
        kind = match and (match["of"] or match["of_product"] or match["of_output"])
        if match is None or kind not in ("k", "v"):
            continue
        place, scale = (int(match["layer"]), kind), _number(name, tensor, model_id)
        if found.setdefault(place, scale) != scale:
            raise ConfigError(f"{model_id}: {name} is {scale}, but the layer has another such scale, {found[place]}")
    if not found:
        return ()
    odd = sorted({*found} ^ {(layer, kind) for layer in range(num_layers) for kind in ("k", "v")})
    if odd:
        layer, kind = odd[0]
        raise ConfigError(f"{model_id}: FP8 keys and values need two scales in all layers: see {kind} of layer {layer}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _number(name: str, tensor: Array, model_id: str) -> float:
    if tensor.size != 1:
        raise ConfigError(f"{model_id}: {name} has {tensor.size} scales; one a layer is supported")
    scale = float(as_floats(tensor).reshape(()))
    if not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(f"{model_id}: {name} is {scale}, but a scale is above 0")
    return scale
