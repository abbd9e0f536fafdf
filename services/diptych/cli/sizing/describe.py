"""Say what a model needs before any GPU is rented: `diptych describe FOLDER`. Its config.json is enough."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from diptych.architectures.config import ModelConfig
from diptych.architectures.fair_shares import check_divides, check_shared
from diptych.architectures.registry import from_hf
from diptych.architectures.stages import check_stages
from diptych.checkpoints import demo
from diptych.checkpoints.gguf_model import GgufModel
from diptych.checkpoints.hf_folder import quantization_of, read_scheme, with_processor
from diptych.checkpoints.quantization.declared import Declared, check_groups, declared
from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.source import DEMO_NAMES
from diptych.cli.reports.model_report import Plan, as_json, as_text, shard_of
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json
from diptych.engine.options.config import KV_WINDOWS, KvWindows, Quantization
from diptych.kernels.integer_layout import IntegerLayout, layout_of
from diptych.kernels.quantized import INT4_GROUPS, STRIP, QuantizedArray
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.planner.placing import check_placed

MAX_NODES: Final = 8  # of a worker that is proposed


@dataclass(frozen=True, slots=True)
class DescribeConfig:
    """Print a model's parameters, the KV of a token, what fits GPUs, and what prompts cost on the wire.

    Weights need not be there, and nothing is computed: no GPU and no torch are needed.
    """

    model: str = argument(REQUIRED, help="'smollm2', a folder with config.json, a config.json, or a GGUF file")
    gpu_gib: float = option(80.0, help="memory of one GPU")
    gpu_memory_share: float = option(0.9, help="of it, as workers are given it")
    tp: int = option(1, help="GPUs of a worker")
    pp: int = option(1, help="stages of a worker, each with --tp GPUs")
    dp_attention: int = option(
        1, help="schedulers of a worker that share experts or networks (--dp), each with --tp GPUs"
    )
    gpus_per_node: int = option(0, help="GPUs of a machine, to say which group of them is large enough; 0: not said")
    page_size: int = option(16, help="tokens a KV page")
    kv_cache_dtype: str = option("bfloat16", help="of keys and values: bfloat16 or fp8_e4m3, for example")
    quantization: Quantization = option("auto", help="of weights, as workers are given it: auto, none or fp8")
    kv_windows: KvWindows = option(
        KV_WINDOWS, help="KV behind the windows of layers that have some, as workers treat it"
    )
    json: bool = option(False, help="print JSON, for programs")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if self.kv_cache_dtype not in DTYPE_NBYTES:
            raise ConfigError(f"--kv-cache-dtype must be one of {', '.join(DTYPE_NBYTES)}, not {self.kv_cache_dtype!r}")
        if not 0 < self.gpu_gib < math.inf or not 0 < self.gpu_memory_share <= 1:
            raise ConfigError("--gpu-gib must be above 0, --gpu-memory-share above 0 and at most 1")
        if min(self.tp, self.pp, self.page_size, self.dp_attention) < 1:
            raise ConfigError("--tp, --pp, --dp-attention and --page-size must be at least 1")
        if self.pp > 1 and self.dp_attention > 1:
            raise ConfigError("--pp is not for --dp-attention, whose schedulers step at once: leave out one of them")
        check_placed(self.tp, self.gpus_per_node, self.pp)


def main(config: DescribeConfig) -> int:
    """Print the description; return the exit code."""
    path = _path(config.model)
    model = replace(read(path), keeps_all=config.kv_windows == "keep")
    check_stages(model, config.pp)
    stored = stored_as(path, model.model_id)
    kept = None if config.quantization == "none" else stored
    units = apart if config.quantization == "none" else units_of(path, stored)
    check_ranks(model, units, config.tp, config.dp_attention)
    plan = Plan(
        config.gpu_gib,
        config.gpu_memory_share,
        config.tp,
        config.page_size,
        config.kv_cache_dtype,
        has_mxfp4=kept is not None and kept.code == "fp4",
        int4_group=None if kept is None or model.moe is None else int4_group(kept),
        integers=None if kept is None else integers(kept),
        integers_by_name={} if config.quantization == "none" else integers_by_name(path),
        has_fp8=config.quantization == "fp8" or (kept is not None and kept.code == "fp8"),
        gpus_per_node=config.gpus_per_node,
        num_sharing=config.dp_attention,
        tps=_tps(model, units, config),
        pp=config.pp,
    )
    print(json.dumps(as_json(model, plan), indent=2) if config.json else as_text(model, plan))
    return 0


def _tps(model: ModelConfig, units: Units, config: DescribeConfig) -> list[int]:
    """Return the GPUs of a stage that the model divides by: of a worker on one node, or on several that are full."""
    most = config.gpus_per_node * MAX_NODES // config.pp
    return [tp for tp in range(1, most + 1) if _is_placed(tp, config) and _divides(model, units, tp, config)]


def _is_placed(tp: int, config: DescribeConfig) -> bool:
    try:
        check_placed(tp, config.gpus_per_node, config.pp)
    except ConfigError:
        return False
    return True


def _divides(model: ModelConfig, units: Units, tp: int, config: DescribeConfig) -> bool:
    try:
        check_ranks(model, units, tp, config.dp_attention)
    except ConfigError:
        return False
    return True


def check_ranks(model: ModelConfig, units: Units, tp: int, num_sharing: int) -> None:
    """Raise `ConfigError` unless schedulers of so many ranks can share a model whose columns are parted so."""
    check_divides(model, tp)
    if num_sharing > 1:
        check_shared(model, tp * num_sharing)
    if units is not apart and tp * num_sharing > 1:
        check_groups(model, shard_of(model, tp, num_sharing), units)


def _path(model: str) -> Path:
    """Return where a model is; the small one is fetched, as for workers."""
    if model.lower() not in DEMO_NAMES:
        return Path(model).expanduser()
    with demo.console_progress() as progress:
        return demo.fetch(progress)


def read(path: Path) -> ModelConfig:
    """Read a model's configuration. Raises `ConfigError` for what is not supported, or not there."""
    if path.suffix == ".gguf" and path.is_file():
        return GgufModel(path).config
    file = _config_file(path)
    if not file.is_file():
        raise ConfigError(
            f"no model {str(path)!r}: give 'smollm2', a folder with config.json, that file, or a GGUF file"
        )
    generation = file.with_name("generation_config.json")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    values = read_json(file)
    config = from_hf(values, read_json(generation) if generation.is_file() else {}, name)
    return with_processor(file.parent, config, values)


def int4_group(stored: Declared) -> int | None:
    """Return the columns of a scale of experts in integers of four bits, 0 for all; None if GPUs keep none."""
    if stored.code != "int4":
        return None
    return stored.group if stored.group in INT4_GROUPS or stored.group % STRIP == 0 else None


def integers(stored: Declared) -> IntegerLayout | None:
    """Return how GPUs keep the matrices of layers but experts; None if they are not in integers, or not kept."""
    return IntegerLayout.of(stored.code, stored.group, has_half_scales=stored.has_half_scales, has_mins=stored.has_mins)


def stored_as(path: Path, model_id: str) -> Declared | None:
    """Return how the weights of a model that `read` can read are stored. Raises `ConfigError` for what is not read."""
    said = {} if path.suffix == ".gguf" else quantization_of(read_json(_config_file(path))) or {}
    if said:
        read_scheme(said, model_id)
    return declared(said)


def units_of(path: Path, stored: Declared | None) -> Units:
    """Return which columns ranks can't part, as far as it is known without the weights."""
    if path.suffix == ".gguf":
        return GgufModel(path).units()
    return apart if stored is None else stored.unit_of


def integers_by_name(path: Path) -> dict[str, IntegerLayout]:
    """Return how GPUs keep each matrix of a GGUF file that is in integers."""
    if path.suffix != ".gguf":
        return {}
    arrays = ((name, block) for name, block in GgufModel(path).samples() if isinstance(block, QuantizedArray))
    layouts = ((name, layout_of(block)) for name, block in arrays)
    return {name: layout for name, layout in layouts if layout is not None}


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path
