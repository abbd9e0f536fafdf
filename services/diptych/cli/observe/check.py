"""Checks whether a running platform answers and moves KV: `diptych check`, for deployments such as `helm test`."""

from __future__ import annotations

import http.client
import json
import random
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import grpc

from diptych.cli.platform.local_platforms import local_platform
from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.reports.link_report import link_words, size
from diptych.cli.requests.asking import ask, members
from diptych.cli.requests.inference_client import DEFAULT_TARGET
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.v1.inference_pb2 import GenerateRequest, SamplingParams
from diptych.v1.inference_pb2_grpc import InferenceStub

PROMPT: Final = "The capital of France is"
MAX_TOKENS: Final = 8
KV_MAX_TOKENS: Final = 2  # the second is decode's
TOKENS: Final = range(32, 224)  # every vocabulary has these, and none of them ends an output here
ANSWER_S: Final = 5.0  # limit for a worker's answer about its links

DEFAULT_ROUTER: Final = "http://127.0.0.1:8000"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckConfig(MembersConfig):
    """Check that a platform works, and exit with 0 if it does.

    `answers` has one prompt completed over HTTP and over gRPC: the answers must be the same. `kv` has the KV of a new
    prompt handed over from a prefill to a decode worker, and says over what and how fast.
    """

    what: Literal["answers", "kv"] = argument(REQUIRED, help="answers, kv")
    router: str = option("", help=f"URL of a router's HTTP API; none: as here, else {DEFAULT_ROUTER}")
    target: str = option("", help=f"host:port of its gRPC API, for `answers`; none: as here, else {DEFAULT_TARGET}")
    api_key: str = option("", help="key of the API, where it needs one; better by the variable: others see flags")
    prompt_tokens: int = option(512, help="of the prompt whose KV is handed over; fewer in a short context")
    timeout_s: float = option(60.0, help="for an answer")

    def validate(self) -> None:
        if self.prompt_tokens < 1 or self.timeout_s <= 0:
            raise ConfigError("--prompt-tokens and --timeout-s must be positive")


class CheckFailed(DiptychError):
    """The platform does not do what it should; the words say what it does instead."""


def main(config: CheckConfig) -> int:
    """Print what was found. Raises `CheckFailed`."""
    if config.what == "answers":
        print(_check_answers(_addressed(config)), flush=True)
    else:
        print(_check_kv(located(_addressed(config))), flush=True)
    return 0


def _addressed(config: CheckConfig) -> CheckConfig:
    """Return a configuration that says where the router is: as it does, else that here. Raises `ConfigError`."""
    if config.router and (config.target or config.what == "kv"):
        return config
    platform = local_platform(config.platform)
    router, target = (f"http://{platform.http}", platform.grpc) if platform else (DEFAULT_ROUTER, DEFAULT_TARGET)
    return replace(config, router=config.router or router, target=config.target or target)


def _check_answers(config: CheckConfig) -> str:
    model = _first_model(config)["id"]
    over_http = _complete(config, {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS})["choices"][0]["text"]
    over_grpc = _generate(config, model)
    if not over_http or over_http != over_grpc:
        raise CheckFailed(f"HTTP answers {over_http!r}, gRPC {over_grpc!r}: they should say the same, and something")
    return f"HTTP and gRPC agree: {PROMPT!r} is continued by {over_http!r}"


def _check_kv(config: CheckConfig) -> str:
    model = _first_model(config)
    num_tokens = max(1, min(config.prompt_tokens, model["max_model_len"] - KV_MAX_TOKENS))
    prompt = random.SystemRandom().choices(TOKENS, k=num_tokens)
    body = {"model": model["id"], "prompt": prompt, "max_tokens": KV_MAX_TOKENS, "ignore_eos": True}
    timings = _complete(config, body)["diptych"]
    check_moved(timings)
    return f"{moved_words(timings)}\n{_link(config, timings)}"


def check_moved(timings: Mapping[str, Any]) -> None:
    """Raise `CheckFailed` unless all KV came to a decode worker as it left a prefill worker."""
    if not timings["whole"]:
        raise CheckFailed("a worker has not said what it measured: its report is not whole")
    if timings["prefill_instance"] == timings["decode_instance"]:
        raise CheckFailed(f"worker {timings['decode_instance']} served alone, and handed nothing over")
    if not timings["pages_moved"]:
        raise CheckFailed("no page was moved, though nobody can have had this prompt's KV")
    sent, found = timings.get("prefill_kv_digest"), timings.get("decode_kv_digest")  # of some hand-offs: --kv-integrity
    if sent and found and sent != found:
        raise CheckFailed(f"KV with the digest {sent} was sent, and {found} found")


def moved_words(timings: Mapping[str, Any]) -> str:
    added_ms = timings["prefill_added_ttft_us"] / 1000
    return (
        f"{timings['pages_moved']} pages, {size(timings['bytes_moved'])}, from prefill {timings['prefill_instance']} "
        f"to decode {timings['decode_instance']}; that took {added_ms:.1f} ms beyond the prompt's computation"
    )


def _link(config: CheckConfig, timings: Mapping[str, Any]) -> str:
    trust, wanted = config.trust(), int(timings["prefill_instance"], 16)
    for member in members(config.bootstrap, trust):
        if member.instance_id == wanted and (status := ask(member, trust, ANSWER_S).status):
            peer = int(timings["decode_instance"], 16)
            return "\n".join(link_words(link) for link in status.links if link.peer_instance_id == peer)
    raise CheckFailed(f"prefill {timings['prefill_instance']} does not tell about its links")


def _first_model(config: CheckConfig) -> Json:
    """Return what the router lists first: with one model that is all that it serves."""
    models = urllib.request.Request(f"{config.router}/v1/models", headers=_authorization(config))
    return dict(_ask(models, config.timeout_s)["data"][0])


def _complete(config: CheckConfig, body: Json) -> Json:
    headers = {"content-type": "application/json", "x-diptych-timings": "1", **_authorization(config)}
    data = json.dumps({"temperature": 0, **body}).encode()
    return _ask(urllib.request.Request(f"{config.router}/v1/completions", data, headers), config.timeout_s)


def _authorization(config: CheckConfig) -> dict[str, str]:
    return {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}


def _ask(request: urllib.request.Request, timeout_s: float) -> Json:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            raise CheckFailed(f"{request.full_url} answers {error.code}: {error.read().decode()}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CheckFailed(f"{request.full_url}: {getattr(error, 'reason', error)}") from None


def _generate(config: CheckConfig, model: str) -> str:
    metadata = (("authorization", f"Bearer {config.api_key}"),) if config.api_key else ()
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    request = GenerateRequest(text=PROMPT, model=model, sampling=sampling)
    with grpc.insecure_channel(config.target) as channel:
        try:
            return str(InferenceStub(channel).Generate(request, timeout=config.timeout_s, metadata=metadata).text)
        except grpc.RpcError as error:
            raise CheckFailed(f"gRPC at {config.target}: {error.details()} ({error.code().name})") from None
