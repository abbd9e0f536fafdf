"""How a request's tokens are chosen and when it ends, validated once at the edge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.generation.attention_tokens import AttentionWish
from diptych.generation.grammar import Grammar
from diptych.generation.insight import InsightWish
from diptych.generation.logit_processor import ProcessorChoice
from diptych.generation.stop.pattern import compile_stop

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_REGEX = 4
MAX_LOGIT_BIAS = 1024  # tokens
MAX_ALLOWED_TOKENS = 16384
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SEED = 2**64 - 1
_STOPS: Final = (
    ("stop", MAX_STOP_STRINGS, "strings"),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids"),
    ("stop_regex", MAX_STOP_REGEX, "patterns"),
)
_ABOVE_0: Final = math.ulp(0.0)
_RANGES: Final = (
    ("temperature", 0.0, 100.0, "must be between 0 and 100"),
    ("top_p", _ABOVE_0, 1.0, "must be above 0 and at most 1"),
    ("top_k", 0, 2**31 - 1, "must be 0 (off) or a positive count"),
    ("seed", 0, MAX_SEED, "must be an unsigned 64-bit number"),
    ("min_p", 0.0, 1.0, "must be between 0 and 1"),
    ("frequency_penalty", -2.0, 2.0, "must be between -2 and 2"),
    ("presence_penalty", -2.0, 2.0, "must be between -2 and 2"),
    ("repetition_penalty", 0.01, 100.0, "must be between 0.01 and 100"),
    ("prompt_logprobs_start", 0, 2**31 - 1, "must be a place of the prompt, from 0 on"),
)
_in_ranges: Final = attrgetter(*(name for name, *_ in _RANGES))


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
    min_p: float = 0.0  # [0, 1]; drops tokens less likely than this part of the likeliest's probability
    frequency_penalty: float = 0.0  # [-2, 2]; subtracted from a logit for each time the token was output
    presence_penalty: float = 0.0  # [-2, 2]; subtracted once if the token was output
    repetition_penalty: float = 1.0  # [0.01, 100]; divides positive and multiplies negative logits of seen tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id; [-100, 100]
    allowed_token_ids: tuple[int, ...] = ()  # no others are output; none: all
    min_tokens: int = 0  # the output does not end by a stop or end-of-sequence token before so many
    stop_regex: tuple[str, ...] = ()
    logprobs: int | None = None  # report the output tokens' log-probabilities, and so many alternatives
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: report those of these tokens, too, at each output token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_start: int = 0  # for those behind this place only: KV of what is before it may come from a cache
    attention: AttentionWish | None = None  # report which earlier tokens each output token looked at most
    hidden_states: bool = False  # report the hidden state from which each output token was predicted
    processor: ProcessorChoice | None = None  # changes logits, behind bias and penalties and before what forbids tokens
    grammar: Grammar | None = None  # that the output must match; it also says where the output ends

    @property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def insight(self) -> InsightWish | None:
        """Return what is to be reported of the model's inside; None: nothing."""
        if self.attention is None and not self.hidden_states:
            return None
        return InsightWish(self.attention, self.hidden_states)

    @property
    def is_plain(self) -> bool:
        """Nothing but temperature, top-k and top-p bears on the choice, and nothing is reported about it."""
        extras = self.has_penalties or self.min_p or self.logit_bias or self.min_tokens or self.grammar
        reports = self.logprobs is not None or self.insight is not None
        return not (extras or self.allowed_token_ids or self.processor or reports)

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field, for a value out of range."""
        self.validate_with(self.max_tokens)

    def validate_with(self, max_tokens: int) -> None:
        """The same as if they had these `max_tokens`."""
        _check(max_tokens >= 1, "max_tokens", "must be at least 1", max_tokens)
        _check(0 <= self.min_tokens <= max_tokens, "min_tokens", "must be from 0 to max_tokens", self.min_tokens)
        for value, (name, least, most, rule) in zip(_in_ranges(self), _RANGES, strict=True):
            if not least <= value <= most:  # without a call for each
                _check(False, name, rule, value)
        if self.stop or self.stop_token_ids or self.stop_regex:
            self._validate_stops()
        if self.logit_bias:
            self._validate_bias()
        if self.allowed_token_ids:
            self._validate_allowed()
        if self.logprobs is not None or self.prompt_logprobs is not None or self.logprob_token_ids:
            self._validate_logprobs()
        if self.grammar is not None:
            self.grammar.validate()
        if self.attention is not None:
            self.attention.validate(max_tokens)
        if self.processor is not None:
            self.processor.validate()

    def validate_for(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, for a token outside the vocabulary, or for more than there are."""
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None:
                _check(wanted <= vocab_size, name, f"must be at most {vocab_size}, all tokens", wanted)
        ids: Iterable[int]
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
            ("logprob_token_ids", self.logprob_token_ids),
        ):
            if ids:
                wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
                _check(wrong is None, name, f"takes token ids from 0 to {vocab_size - 1}", wrong)

    def _validate_stops(self) -> None:
        for name, limit, kind in _STOPS:
            if given := getattr(self, name):
                _check(len(given) <= limit, name, f"takes at most {limit} {kind}", len(given))
        _check(all(self.stop), "stop", "must not contain an empty string", self.stop)
        if self.stop_regex:
            compile_stop(self.stop_regex)

    def _validate_bias(self) -> None:
        num_biased = len(self.logit_bias)
        _check(num_biased <= MAX_LOGIT_BIAS, "logit_bias", f"takes at most {MAX_LOGIT_BIAS} tokens", num_biased)
        for token_id, value in self.logit_bias.items():
            _check(-100.0 <= value <= 100.0, f"logit_bias[{token_id}]", "must be between -100 and 100", value)

    def _validate_allowed(self) -> None:
        """What else forbids tokens may leave none of them."""
        num_allowed, name = len(self.allowed_token_ids), "allowed_token_ids"
        _check(num_allowed <= MAX_ALLOWED_TOKENS, name, f"takes at most {MAX_ALLOWED_TOKENS} ids", num_allowed)
        if self.grammar is not None or self.min_tokens:
            raise InvalidRequest("allowed_token_ids can't be combined with a grammar or min_tokens", param=name)

    def _validate_logprobs(self) -> None:
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None:
                _check(0 <= wanted <= MAX_TOP_LOGPROBS, name, f"must be from 0 to {MAX_TOP_LOGPROBS}", wanted)
        num_named, name = len(self.logprob_token_ids), "logprob_token_ids"
        _check(num_named <= MAX_LOGPROB_TOKEN_IDS, name, f"takes at most {MAX_LOGPROB_TOKEN_IDS} ids", num_named)
        _check(not num_named or self.logprobs is not None, name, "needs logprobs, at least 0", self.logprob_token_ids)


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} {rule}, not {value!r}", param=param)
