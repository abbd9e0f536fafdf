"""Provides what `diptych chat` and `diptych generate` share: sampling options, and a streamed answer over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import grpc

from diptych.cli.platform.local_platforms import PLATFORM_HELP, local_platform
from diptych.common.config import flag_name, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.v1 import inference_pb2, inference_pb2_grpc

ANSWER_S: Final = 10.0  # that a router may take to say what it serves
DEFAULT_TARGET: Final = "127.0.0.1:9000"
MOST: Final[Mapping[str, int]] = {"max_tokens": 2**32 - 1, "top_k": 2**32 - 1, "seed": 2**64 - 1}  # that the API takes


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Where to ask, and how to sample."""

    target: str = option("", help=f"host:port of a router's gRPC API; none: as here, else {DEFAULT_TARGET}")
    platform: str = option("", help=PLATFORM_HELP)
    api_key: str = option("", help="key of the API, where it needs one; better by the variable: others see flags")
    model: str = option("", help="model id; none: the only one served")
    max_tokens: int = option(256, help="most output tokens", group="sampling")
    temperature: float | None = option(None, help="0 is greedy; none: 1.0, in a chat 0.7", group="sampling")
    top_p: float | None = option(None, help="sample from this share of the probability", group="sampling")
    top_k: int | None = option(None, help="sample from so many tokens", group="sampling")
    seed: int | None = option(None, help="the same seed draws the same tokens", group="sampling")
    stop: str = option("", help="end before this string", group="sampling")

    def validate(self) -> None:
        """Raise `ConfigError` for numbers that the API can't take; all others are the router's to judge."""
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise ConfigError(f"{flag_name(name)} must be from 0 to {most}, not {value}")

    @property
    def sampling(self) -> inference_pb2.SamplingParams:
        """The options as the API wants them."""
        return inference_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=[self.stop] if self.stop else [],
        )


def read_text(read: Callable[[], str]) -> str:
    """Return what `read` takes from standard input. Raises `ConfigError` where that is no UTF-8."""
    try:
        text = read()
        text.encode()
    except UnicodeError:
        raise ConfigError("standard input is no UTF-8: convert it first, as with `iconv -t utf-8`") from None
    return text


Options = TypeVar("Options", bound=RequestOptions)


def addressed(options: Options) -> Options:
    """Return options that say whom to ask: as they do, else the platform here. Raises `ConfigError`."""
    if options.target and options.platform:
        raise ConfigError("--target and --platform (or their variables) both say where: give one of them")
    if options.target:
        return options
    platform = local_platform(options.platform)
    return replace(options, target=platform.grpc if platform else DEFAULT_TARGET)


class RequestFailed(DiptychError):
    """The router refused the request, or there is none."""


def check_served(options: RequestOptions) -> None:
    """Raise `RequestFailed` where nobody serves, or not us: before a word is written to nobody."""
    with grpc.insecure_channel(options.target) as channel:
        list_models = inference_pb2_grpc.InferenceStub(channel).ListModels
        try:
            list_models(inference_pb2.ListModelsRequest(), metadata=_metadata(options), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise RequestFailed(_explain(error, options.target)) from None


def stream_text(options: RequestOptions, request: inference_pb2.GenerateRequest) -> Generator[str, None, None]:
    """Yield the answer's text as it comes. Closing the iterator cancels the request. Raises `RequestFailed`."""
    with grpc.insecure_channel(options.target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request, metadata=_metadata(options))
        try:
            for chunk in call:
                yield chunk.text
        except grpc.RpcError as error:
            raise RequestFailed(_explain(error, options.target)) from None
        finally:
            call.cancel()


def _metadata(options: RequestOptions) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {options.api_key}"),) if options.api_key else ()


def _explain(error: grpc.RpcError, target: str) -> str:
    details = error.details() or ""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or _is_nobody(error):
        return f"nobody answers at {target}: start Diptych with `diptych up`, or name a router's gRPC API with --target"
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "the router asks for an API key that it knows: set DIPTYCH_API_KEY"
    return f"{details} ({error.code().name})"


def _is_nobody(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or "")
