"""What a frontend tells the scheduler process that it starts: one JSON argument."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from diptych.common.config import option
from diptych.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one scheduler runs its model. The same names as the command's flags."""

    model: str = option("smollm2", help="model: 'smollm2', a .gguf file or a Hugging Face folder", group="engine")
    dtype: str = option("float32", help="weights, activations and KV: float32 or bfloat16", group="engine")
    num_threads: int = option(1, help="CPU threads for the model", group="engine")
    kv_cache_mib: int = option(1024, help="memory for KV pages, MiB", group="engine")
    page_size: int = option(16, help="tokens a KV page", group="engine")
    max_step_tokens: int = option(512, help="prompt tokens a step; longer prompts are chunked", group="engine")
    max_requests: int = option(64, help="requests that hold KV at once", group="engine")
    attention_backend: str = option("auto", help="attention implementation: auto, cpu or torch", group="engine")

    def validate(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"--dtype must be float32 or bfloat16, not {self.dtype!r}")
        for name in ("num_threads", "kv_cache_mib", "page_size", "max_step_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything a scheduler process needs."""

    component: str  # in log lines
    log_format: str
    log_level: str
    endpoint: str  # ZMQ ipc address that the frontend has bound
    parent_pid: int  # the scheduler ends with this process
    instance_id: int
    transports: str  # "auto", "shm" or "tcp"; for workers with peers
    engine: EngineOptions

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SchedulerConfig:
        fields = json.loads(text)
        return cls(**{**fields, "engine": EngineOptions(**fields["engine"])})
