"""Loads models for the processes of a scheduler: on a CPU onto the KV pool, on a GPU before there is one.

A GPU's pool takes what the weights leave of its memory, so the first model is loaded ahead, onto a few pages, and run
once; tensor-parallel ranks then agree on the smallest of their pools. Steps of all sizes are run on the real pool, so
that nothing is compiled while requests wait. Other weights are loaded only where both sets and a step have room.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import request_state_nbytes, token_nbytes, whole_layout
from diptych.engine.options.served_model import open_draft
from diptych.engine.runner.encoded_images import KEPT_NBYTES
from diptych.engine.runner.gpu.bus import KernelBus
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import (
    DeviceMemory,
    StepSpeed,
    longest_extend,
    longest_timed,
    measure,
    measure_beside,
    measure_speed,
    timed_limits,
)
from diptych.engine.runner.gpu.memory import (
    GIB,
    KvMemory,
    all_graphs_nbytes,
    beside,
    buffer_pages,
    check_room_beside,
    found_on,
    pool_nbytes,
    step_room,
)
from diptych.engine.runner.gpu.warm_up import log_late_kernels, warm_up
from diptych.engine.runner.in_place import PartsInPlace
from diptych.engine.runner.kv_pool import new_kv, own_views
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_with_draft
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.pace.step_sizes import REQUEST_TOKENS, Found, choose, usual
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.values.batch import OnLayer
from diptych.engine.values.kv_regions import state_nbytes
from diptych.engine.values.limits import PROMPT_ROWS
from diptych.engine.weights.taking import Taking

logger = logging.getLogger(__name__)

MIB: Final = 2**20
ListenerOfNextStep = Callable[[], OnLayer | None]
AnyRunner = ModelRunner | GpuRunner


class ModelInPlace:
    """Implements `InPlace` for the model of a runner. A model that guesses for it stays as it is."""

    def __init__(self, runner: AnyRunner, communicator: Communicator | None, renew: Callable[[AnyRunner], AnyRunner]):
        self._runner = runner
        self._communicator = communicator
        self._renew = renew
        self._parts = PartsInPlace(runner.model)

    def release(self) -> None:
        self._parts.release()
        if isinstance(self._runner, GpuRunner):
            torch.cuda.empty_cache()
        else:
            _give_back_freed()

    def take(self, source: ModelSource) -> None:
        try:
            options = self._runner.model.options
            part = ModelPart.of(source, self._communicator, whole_experts=options.expert_parallel)
            self._parts.take(part.tensors)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no GPU memory is left for a layer of {source.config.model_id}") from error

    def want_all(self) -> None:
        self._parts.want_all()

    def lacking(self) -> list[str]:
        return self._parts.lacking()

    def settle(self) -> None:
        self._parts.settle()

    def runner(self) -> AnyRunner:
        return self._renew(self._runner)


def _images_nbytes(model: LoadedModel, device: torch.device) -> int:
    """Return what images take of a GPU: the largest one while it is encoded, and rows that are kept."""
    images, vision = model.images, model.config.vision
    if images is None or vision is None:
        return 0
    with torch.inference_mode():
        nbytes = KEPT_NBYTES + measure_beside(lambda: images.encode_extremes(vision), device)
    torch.cuda.empty_cache()
    logger.info("images take up to %.1f GiB of GPU memory", nbytes / GIB)
    return nbytes


def _give_back_freed() -> None:
    """Have the C library give freed memory to the system: of freed matrices it would keep three quarters for others."""
    with contextlib.suppress(AttributeError):  # not every one can
        ctypes.CDLL(None).malloc_trim(0)


class ModelLoader:
    """Loads the model of one process onto its `device`."""

    def __init__(
        self,
        options: EngineOptions,
        device: torch.device,
        communicator: Communicator | None,
        taking: Taking | None = None,
        on_tower_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """`taking`: from whom the weights of the first model may come, instead of from disk."""
        self._on_tower_layer = on_tower_layer
        self._taking = taking
        self._options = options
        self._device = device
        self._communicator = communicator
        self.chosen = usual(options.given_sizes)
        self._ahead: LoadedModel | None = None
        self._weights_nbytes = 0  # of a GPU, that the first model has taken
        self._step_nbytes = 0  # that its largest step takes; 0: not measured
        self._images_nbytes = 0  # that a tower takes, and the rows it has made; 0: there is none
        self._late_times: Sequence[tuple[int, float]] = ()  # measured of the first model: others are of its shape

    def kv_cache_mib(self, source: ModelSource) -> int:
        """Return how large the pool is to be. On a GPU this loads the model that `load` will put on it."""
        if self._device.type == "cpu":
            return self._options.kv_cache_mib
        whole_experts = self._options.expert_parallel
        part = ModelPart.of(source, self._communicator, whole_experts=whole_experts).config
        limits = self._limits(source.config)
        model = self._load_on_gpu(source, self._few_pages(part, longest_extend(limits, self._options.page_size)))
        self._weights_nbytes = torch.cuda.memory_allocated(self._device)
        if self._options.lora:
            model.loras.reserve()
        self._images_nbytes = _images_nbytes(model, self._device)
        given, context_len = self._options.given_sizes, source.config.context_len
        self.chosen = choose(given, lambda: self._found(model), context_len, self._agreed)
        limits = self._limits(source.config)
        few_pages = self._few_pages(part, longest_extend(limits, self._options.page_size))
        self._ahead = model.for_requests(limits.max_requests + PROMPT_ROWS).on(few_pages)
        return self._options.kv_cache_mib or self._measured_mib(self._ahead, limits)

    def _found(self, model: LoadedModel) -> Found:
        """Measure a GPU's memory by a step as large as a CPU's, or as given, and its speed by a larger one.

        On tensor-parallel ranks this is a collective.
        """
        options, limits = self._options, self._limits(model.config)
        memory = self._measured(model, limits)
        token = token_nbytes(model.config, whole_layout(model.config, options.page_size, options.kv_dtype))
        recurrent = model.config.recurrent
        nbytes = state_nbytes(recurrent, options.dtype) + request_state_nbytes(recurrent, options) if recurrent else 0
        of_states = nbytes // REQUEST_TOKENS  # a request has a slot, and a copy in pages
        kv = KvMemory(token + of_states, options.kv_cache_mib * MIB)
        known = memory, options.gpu_memory_share, limits.max_step_tokens
        speed = self._speed(model, timed_limits(limits, self._agreed(int(step_room(*known, kv)))))
        return found_on(*known, speed, kv)

    def _measured(self, model: LoadedModel, limits: StepLimits) -> DeviceMemory:
        """Return what there is for steps and KV, beside what images take."""
        found = measure(self._new_runner(model, limits), limits, self._options.page_size, self._device)
        return beside(found, self._images_nbytes)

    def _speed(self, model: LoadedModel, limits: StepLimits) -> StepSpeed:
        page_size = self._options.page_size
        pages = self._few_pages(model.config, longest_timed(limits, page_size))
        speed = measure_speed(self._new_runner(model.on(pages), limits), limits, page_size, self._device)
        return speed if self._records_steps else replace(speed, launch_s=0.0)

    @property
    def _records_steps(self) -> bool:
        """Whether graphs will be there, once a step was computed: experts may be where none can be recorded."""
        experts = None if self._communicator is None else self._communicator.experts
        return self._options.cuda_graphs == "on" and (experts is None or experts.most_recorded > 0)

    def _agreed(self, number: int) -> int:
        return number if self._communicator is None else self._communicator.smallest(number)

    def load(self, source: ModelSource, kv: Tensor, layer_listener: ListenerOfNextStep) -> ModelRunner | GpuRunner:
        """Return a model that runs on the pool `kv`. In any thread. Raises `ConfigError`."""
        if self._device.type == "cpu":
            return self._on_cpu(source, kv, layer_listener)
        ahead, self._ahead = self._ahead, None
        with torch.cuda.device(self._device):
            model = self._load_beside(source, kv) if ahead is None else ahead.on(kv)
            runner = self._new_server(model, layer_listener)
            if ahead is not None:
                self._warm_up(model, runner, kv)
            return runner

    def in_place(self, runner: ModelRunner | GpuRunner) -> ModelInPlace:
        """Return what replaces the weights of the model that `runner` runs. A GPU's graphs are recorded anew."""
        return ModelInPlace(runner, self._communicator, self._renewed)

    def _renewed(self, runner: ModelRunner | GpuRunner) -> ModelRunner | GpuRunner:
        if isinstance(runner, ModelRunner):
            return runner
        with torch.cuda.device(self._device):
            return self._new_server(runner.model, runner.layer_listener)

    def _new_server(self, model: LoadedModel, layer_listener: ListenerOfNextStep) -> GpuRunner:
        """Return what runs a model for requests."""
        with_graphs = self._options.cuda_graphs == "on"
        runner = self._new_runner(model, self._limits(model.config), layer_listener, with_graphs=with_graphs)
        runner.take_late_times(self._late_times)
        return runner

    def _on_cpu(self, source: ModelSource, kv: Tensor, layer_listener: ListenerOfNextStep) -> ModelRunner:
        options: dict[str, Any] = asdict(self._model_options())
        parts = {**options, "communicator": self._communicator, "draft": open_draft(source, self._options)}
        parts["taking"] = self._first_taking()
        parts |= {"layer_listener": layer_listener, "on_tower_layer": self._on_tower_layer}
        return ModelRunner(source, kv, **parts)

    def _measured_mib(self, model: LoadedModel, limits: StepLimits) -> int:
        options = self._options
        memory = self._measured(model, limits)
        self._step_nbytes = memory.step_peak
        kinds = 0 if not self._records_steps else 2 if options.lora else 1
        graphs = all_graphs_nbytes(model.config, limits, memory.step_peak, kinds)
        layout = whole_layout(model.config, options.page_size, options.kv_dtype)
        buffered = buffer_pages(options.host_cache_mib * MIB, limits.max_step_tokens, layout)
        nbytes = pool_nbytes(memory, options.gpu_memory_share, graphs, buffered * layout.page_nbytes)
        words = "of %.1f GiB of GPU memory weights have %.1f, a step takes %.1f, %.1f are free; the KV pool gets %.1f"
        logger.info(words, *(each / GIB for each in (memory.total, memory.own, memory.step_peak, memory.free, nbytes)))
        return self._agreed(nbytes // MIB)

    def _warm_up(self, model: LoadedModel, runner: GpuRunner, kv: Tensor) -> None:
        options = self._options
        pages = own_views(kv, model.config, None)[0]
        longest = min(model.config.context_len, pages.shape[0] * pages.shape[3])
        limits, recorded = self._limits(model.config), (runner.row_rungs, runner.token_rungs)
        try:
            warm_up(self._new_runner(model, limits), runner, limits, options.page_size, longest, *recorded)
            runner.measure_late_rows(time.perf_counter)
            self._late_times = runner.graph_use.late_times
        except torch.OutOfMemoryError as error:
            what = f"a step of {limits.max_step_tokens} tokens or the graphs of {limits.max_samples} rows"
            words = f"no GPU memory is left beside weights and KV for {what}: lower --kv-cache-mib or --max-step-tokens"
            raise ConfigError(words) from error
        log_late_kernels()

    def _new_runner(
        self,
        model: LoadedModel,
        limits: StepLimits,
        layer_listener: ListenerOfNextStep = lambda: None,
        *,
        with_graphs: bool = False,
    ) -> GpuRunner:
        from diptych.engine.runner.gpu.new_runner import new_runner  # needs Triton

        bus = KernelBus(self._device) if self._options.host_cache_mib else None  # pages keep the copy engines busy
        return new_runner(
            model,
            limits,
            self._device,
            with_graphs=with_graphs,
            layer_listener=layer_listener,
            bus=bus,
            on_tower_layer=self._on_tower_layer,
        )

    def _load_beside(self, source: ModelSource, kv: Tensor) -> LoadedModel:
        """Load other weights, of the same shape, while the first ones serve."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + kept
        check_room_beside(self._weights_nbytes, self._step_nbytes, free)
        model = self._load_on_gpu(source, kv)
        if self._options.num_lora_slots:
            model.loras.reserve()  # adapters come into their slots when it is served: nothing may fail then
        return model

    def _load_on_gpu(self, source: ModelSource, kv: Tensor) -> LoadedModel:
        try:
            draft = open_draft(source, self._options)
            options = self._model_options()
            return load_with_draft(source, draft, kv, options, self._communicator, self._first_taking())
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{source.config.model_id} does not fit what is left of the GPU's memory") from error

    def _first_taking(self) -> Taking | None:
        """Givers are asked once: later weights are others."""
        taking, self._taking = self._taking, None
        return taking

    def _few_pages(self, part: ModelConfig, longest: int) -> Tensor:
        """Return a pool for requests of at most so many tokens: what is as long as a request has no more places."""
        page_size, dtype = self._options.page_size, self._options.kv_dtype
        layout = ModelRunner.pool_layout(part, num_pages=-(-longest // page_size), page_size=page_size, dtype=dtype)
        return new_kv(layout, self._device)

    def _limits(self, model: ModelConfig) -> StepLimits:
        sizes, max_pages = self.chosen.sizes, -(-model.context_len // self._options.page_size)
        return StepLimits(
            sizes.max_step_tokens,
            sizes.max_requests,
            max_pages,
            sizes.max_graph_tokens,
            self._options.max_drafts,
            num_window_groups=len(model.page_groups) - 1,
            max_loras=self._options.num_lora_slots,
            looks_ahead=model.sees_images_whole,
            num_axes=0 if model.mrope is None else len(model.mrope.sizes),
        )

    def _model_options(self) -> ModelOptions:
        options = self._options
        return ModelOptions(
            dtype=options.dtype,
            quantization=options.quantization,
            attention_backend=options.extend_backend,
            decode_attention_backend=options.decode_backend,
            num_threads=options.num_threads,
            max_loras=options.num_lora_slots,
            max_lora_rank=options.max_lora_rank,
            max_requests=self.chosen.sizes.max_requests + PROMPT_ROWS,
            row_tokens=options.row_tokens,
            deterministic=options.deterministic,
            expert_parallel=options.expert_parallel,
            overlap_batches=bool(options.overlap_batches),
        )
