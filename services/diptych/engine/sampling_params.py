"""How a request's tokens are chosen and when it ends, validated once at the edge."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Construct, then `validate()`."""

    max_tokens: int = 16  # output tokens, >= 1
    temperature: float = 1.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: all tokens
    seed: int = 0  # fixes every random draw of the request, whatever the batch
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field, for a value out of range."""
        _check(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _check(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1", self.top_p)
        _check(0 <= self.top_k < 2**31, "top_k", "must be 0 (off) or a positive count", self.top_k)
        _check(0 <= self.seed <= MAX_SEED, "seed", "must be an unsigned 64-bit number", self.seed)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _check(all(self.stop), "stop", "must not contain an empty string", self.stop)
        num_ids = len(self.stop_token_ids)
        _check(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids", num_ids)


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} {rule}, not {value!r}", param=param)
