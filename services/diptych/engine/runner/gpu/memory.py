"""How much of a GPU's memory the KV pool takes: what is really free once the weights are there and a step was run.

Rule: a process takes at most its share of the device's memory, and what is free of it. The rest of the device is for
other processes, and for what nobody foresees: fragmentation, libraries that allocate late. Of what the process may
take, weights, the largest step and the graphs get theirs; what is left is the pool's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from diptych.architectures.config import ModelConfig
from diptych.common.errors import ConfigError
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.ladder import ladder, token_ladder
from diptych.engine.runner.gpu.measuring import DeviceMemory, StepSpeed
from diptych.engine.schedule.pace.step_sizes import STEP_SHARE, Found
from diptych.kvtransfer.layout import PoolLayout

GIB: Final = 2**30
GRAPH_NBYTES: Final = 16 << 20  # an estimate for one graph without its tensors; what each has taken is in the log
PIECE_NBYTES: Final = 512 << 10  # for the graph of one piece: 33 of an 8B model took 4 to 24 MiB on an H200
MOST_BUFFERED: Final = GIB  # of pages on their way to host memory
SPARE_NBYTES: Final = GIB  # for steps that run while other weights are loaded, where none was measured


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What is known of a pool before it is measured."""

    token_nbytes: int
    nbytes: int  # 0: what is left


def graphs_nbytes(limits: StepLimits, num_layers: int, step_peak: int, kinds: int = 1) -> int:
    """Return what graphs may take: each its own; and those of decode steps, and of pieces, the tensors of the largest.

    Of `kinds` 2 there are graphs of steps with adapters, too, which share those tensors; 0: there are none.

    A step's tensors have a row for each token: `step_peak` bytes for `max_step_tokens`.
    """
    rungs, token_rungs = ladder(limits.max_samples), token_ladder(limits.most_graph_tokens)
    own = len(rungs) * GRAPH_NBYTES + len(token_rungs) * (num_layers + 1) * PIECE_NBYTES
    most = limits.max_step_tokens
    return kinds * own + min(1, kinds) * step_peak * (min(rungs[-1], most) + limits.most_graph_tokens) // most


def all_graphs_nbytes(model: ModelConfig, limits: StepLimits, step_peak: int, kinds: int) -> int:
    """Return what the graphs of a model may take, and of its draft model, which records its own and has no adapters.

    A draft model's step takes no more than the whole step, of which it is a part. With drafts recurrent layers have
    graphs of what came true.
    """
    own = graphs_nbytes(limits, model.num_layers, step_peak, kinds)
    if kinds and model.recurrent is not None and limits.max_drafts:
        own += len(ladder(limits.max_samples)) * GRAPH_NBYTES
    if model.draft is None:
        return own
    return own + graphs_nbytes(limits, model.draft.model.num_layers, step_peak, min(1, kinds))


def buffer_pages(host_nbytes: int, step_tokens: int, layout: PoolLayout) -> int:
    """Return how many evicted pages may wait for host memory, of which there is `host_nbytes`.

    As many as the largest step of `step_tokens` writes: what makes room for it is read at the speed of the GPU's
    memory, and the step does not wait for the bus.
    """
    step_nbytes = -(-step_tokens // layout.page_size) * layout.page_nbytes
    return min(host_nbytes, step_nbytes, MOST_BUFFERED) // layout.page_nbytes


def found_on(memory: DeviceMemory, share: float, num_tokens: int, speed: StepSpeed, kv: KvMemory) -> Found:
    """Return what there is for steps and for KV; `memory` was measured with a largest step of `num_tokens`."""
    left, step_nbytes = _left(memory, share, kv)
    step_tokens = step_room(memory, share, num_tokens, kv)
    nbytes = kv.nbytes or left - step_nbytes
    return Found(speed.prompt_tokens_per_s, speed.launch_s, step_tokens, nbytes // kv.token_nbytes)


def step_room(memory: DeviceMemory, share: float, num_tokens: int, kv: KvMemory) -> float:
    """Return how many tokens a step has that takes as much as it may; `memory` as in `found_on`."""
    return _left(memory, share, kv)[1] * num_tokens / max(1, memory.step_peak)


def beside(memory: DeviceMemory, nbytes: int) -> DeviceMemory:
    """Return what there is where `nbytes` are for something else, at all times: they count as the process's own."""
    return replace(memory, own=memory.own + nbytes, free=max(0, memory.free - nbytes))


def _left(memory: DeviceMemory, share: float, kv: KvMemory) -> tuple[int, int]:
    """Return what weights leave, and what of it a step may take."""
    left = max(0, min(int(memory.total * share) - memory.own, memory.free))
    return left, max(0, left - kv.nbytes) // 2 if kv.nbytes else left // STEP_SHARE  # graphs need some, too


def pool_nbytes(memory: DeviceMemory, share: float, graphs: int, buffer: int = 0) -> int:
    """Return how many bytes of KV fit beside `graphs` and `buffer` bytes. Raises `ConfigError` when none do."""
    may_take = min(int(memory.total * share) - memory.own, memory.free)
    left = may_take - memory.step_peak - graphs - buffer
    if left <= 0:
        raise ConfigError(
            f"no GPU memory is left for KV: {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB are free, "
            f"the weights have {memory.own / GIB:.1f} of the {share:.0%} that --gpu-memory-share lets a process take, "
            f"a step takes {memory.step_peak / GIB:.1f} and graphs {graphs / GIB:.1f}: raise the share, "
            "lower --max-step-tokens, or share the model by --tp"
        )
    return left


def check_room_beside(weights: int, step_peak: int, free: int) -> None:
    """Raise `ConfigError` unless other weights fit into `free` bytes beside the ones that go on to serve.

    A step that runs meanwhile must find its memory: it would end the worker if it did not.
    """
    needed = weights + (step_peak or SPARE_NBYTES)
    if needed > free:
        raise ConfigError(
            f"other weights and a step beside them take {needed / GIB:.1f} GiB of GPU memory, {free / GIB:.1f} are "
            "free: lower --gpu-memory-share or --kv-cache-mib, or start a worker with the other weights"
        )
