"""Cores of workers over a model that computes nothing: what they post, whom they admit and what they find cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import from_hf
from diptych.common.arrays import I64
from diptych.common.members.roles import Role
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.values.batch import ForwardBatch, StepResult
from diptych.engine.values.events import Effect, Emit, NoteArrived, PeerUp, SendNote, Start, StreamPages, WriteDone
from diptych.engine.values.events import WritePages as Write
from diptych.engine.values.kv_regions import kv_layout, window_pages
from diptych.engine.values.limits import PROMPT_ROWS, Limits, Scheduling
from diptych.engine.values.request import new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.prefill.core import PrefillCore
from diptych.unified.core import UnifiedCore

PAGE: Final = 16
STEP_TOKENS: Final = 2048
VOCAB: Final = 1 << 40  # texts are numbers that no model reads
PREFILL, DECODE = 11, 22
RULES: Final = TransferRules(integrity="off")

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
    "Gemma 3 27B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True)
class Shape:
    """A published model, as workers keep its KV in bfloat16."""

    name: str
    model: ModelConfig

    @property
    def page_nbytes(self) -> int:
        return kv_layout(self.model, 1, PAGE, "bfloat16").page_nbytes

    @property
    def layer_nbytes(self) -> int:
        """The bytes of a token in one layer."""
        return 2 * 2 * self.model.num_kv_heads * self.model.head_dim

    def live_nbytes(self, num_tokens: int) -> int:
        """Return the bytes that a token behind so many reads: those of all, and of a window where there is one."""
        seen = (min(num_tokens, self.model.window(layer) or num_tokens) for layer in range(self.model.num_layers))
        return self.layer_nbytes * sum(seen)

    def longest(self, nbytes: int) -> int:
        """Return how many tokens have so many live bytes."""
        windows = [window for window in self.model.windows if window]
        of_windows = self.layer_nbytes * sum(windows)
        return (nbytes - of_windows) // (self.layer_nbytes * (self.model.num_layers - len(windows)))

    def cache(self, num_pages: int, max_requests: int, max_tokens: int, step_tokens: int = STEP_TOKENS) -> KvCache:
        return KvCache(
            num_pages=num_pages,
            page_size=PAGE,
            max_requests=max_requests + PROMPT_ROWS,
            max_tokens_per_request=max_tokens,
            windows=window_pages(self.model, step_tokens),
        )


def shapes(name: str) -> tuple[Shape, Shape]:
    """Return a model as `keep` has it, and as `free` has it."""
    free = from_hf(CONFIGS[name], {}, name)
    return Shape(name, replace(free, keeps_all=True)), Shape(name, free)


def limits_of(max_requests: int, max_tokens: int) -> Limits:
    return Limits(max_tokens, VOCAB, frozenset(), STEP_TOKENS, max_requests, Scheduling(max_waiting=10**6))


def start(core: SchedulerCore, room: int, prompt: I64, max_tokens: int, peer: int = 0) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    core.handle(Start(new_request(room, prompt, params), peer), 0.0)


def step(core: SchedulerCore) -> ForwardBatch | None:
    """Plan and commit a step, whose tokens are all alike; None if there is nothing to compute."""
    batch = core.plan(0.0)
    if batch is not None:
        core.commit(StepResult(np.full(batch.num_samples, 7)), 0.0)
    return batch


def local_core(cache: KvCache, max_tokens: int) -> UnifiedCore:
    """Return the core of a worker that serves requests alone."""
    return UnifiedCore(cache, limits_of(cache.num_rows, max_tokens), TransferRules(), 0, Role.LOCAL)


def cached_tokens(effects: Iterable[Effect]) -> int:
    """Return how many tokens of their prompts requests that end have found; none of them fails."""
    found = 0
    for effect in effects:
        if isinstance(effect, Emit):
            assert effect.output.failure is None, effect.output.failure
            found += effect.output.stats.cached_tokens if effect.output.stats is not None else 0
    return found


class Pair:
    """A prefill and a decode core; all that they post arrives at once, and is counted."""

    def __init__(self, shape: Shape, max_tokens: int) -> None:
        limits, num_pages = limits_of(1, max_tokens), 8 * (max_tokens // PAGE + 2 * STEP_TOKENS // PAGE)
        caches = [shape.cache(num_pages, 1, max_tokens) for _ in range(2)]
        self.prefill = PrefillCore(caches[0], limits, RULES, shape.page_nbytes, StepPace(limits.mixed_step_s))
        self.decode = DecodeCore(caches[1], limits, shape.page_nbytes, StepPace(limits.mixed_step_s))
        self.num_written = 0  # pages
        self.has_ended = False
        self.prefill.handle(PeerUp(DECODE), 0.0)
        self.decode.handle(PeerUp(PREFILL), 0.0)

    def hand_over(self, prompt: I64) -> int:
        """Run a request of two tokens of output; return how many pages were written for it."""
        start(self.decode, 1, prompt, 2, PREFILL)
        start(self.prefill, 1, prompt, 2, DECODE)
        while not self.has_ended:
            batches = [step(core) for core in (self.prefill, self.decode)]
            assert any([*batches, self._deliver(self.prefill), self._deliver(self.decode)]), "nothing moves"
        return self.num_written

    def _deliver(self, core: PrefillCore | DecodeCore) -> bool:
        effects = core.pop_effects()
        for effect in effects:
            match effect:
                case Write() | StreamPages():
                    self.num_written += len(effect.write.dst)
                    core.handle(WriteDone(effect.room, None), 0.0)
                case SendNote():
                    other, me = (self.decode, PREFILL) if core is self.prefill else (self.prefill, DECODE)
                    other.handle(NoteArrived(me, effect.note), 0.0)
                case Emit(output):
                    assert output.failure is None, output.failure
                    self.has_ended |= core is self.decode and output.finish is not None
        return bool(effects)
