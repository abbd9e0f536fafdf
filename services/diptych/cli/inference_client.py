"""What `diptych chat` and `diptych generate` share: sampling options, and one streamed answer of the gRPC API."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import grpc

from diptych.common.config import option
from diptych.common.errors import DiptychError
from diptych.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Where to ask, and how to sample."""

    target: str = option("127.0.0.1:9000", help="host:port of a router's gRPC API")
    api_key: str = option("", help="key of the API, where it needs one; better by the variable: others see flags")
    model: str = option("", help="model id; none: the only one served")
    max_tokens: int = option(256, help="most output tokens", group="sampling")
    temperature: float | None = option(None, help="0 is greedy; none: 1.0", group="sampling")
    top_p: float | None = option(None, help="sample from this share of the probability", group="sampling")
    top_k: int | None = option(None, help="sample from so many tokens", group="sampling")
    seed: int | None = option(None, help="the same seed gives the same output", group="sampling")
    stop: str = option("", help="end before this string", group="sampling")

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


class RequestFailed(DiptychError):
    """The router refused the request, or there is none."""


def stream_text(options: RequestOptions, request: inference_pb2.GenerateRequest) -> Generator[str, None, None]:
    """Yield the answer's text as it comes. Closing the iterator cancels the request. Raises `RequestFailed`."""
    metadata = (("authorization", f"Bearer {options.api_key}"),) if options.api_key else ()
    with grpc.insecure_channel(options.target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request, metadata=metadata)
        try:
            for chunk in call:
                yield chunk.text
        except grpc.RpcError as error:
            raise RequestFailed(_explain(error, options.target)) from None
        finally:
            call.cancel()


def _explain(error: grpc.RpcError, target: str) -> str:
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in details:
        return f"nobody answers at {target}: start Diptych with `diptych up`, or name a router's gRPC API with --target"
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "the router asks for an API key that it knows: set DIPTYCH_API_KEY"
    return f"{details} ({error.code().name})"
