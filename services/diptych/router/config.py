"""Flags of the router."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from diptych.common.config import env_name, flag_name, option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogConfig
from diptych.common.members.replicas import check_replicas
from diptych.common.net.reachable import reachable_host
from diptych.common.net.served import LoadFormat, check_max_model_len, check_names
from diptych.common.trust.trust import TrustConfig
from diptych.generation.slo import Slo
from diptych.router.admission.body_budget import SHARE
from diptych.router.choose.policies import POLICIES
from diptych.router.http.exchange.cors import check_origins
from diptych.router.images.addresses import check_hosts
from diptych.router.images.limits import MOST_PIXELS, ImageLimits
from diptych.router.keys.config import KeyConfig
from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.message_formats import AUTO, NONE, REASONING_FORMATS
from diptych.router.text.tokenization import TokenizeAt
from diptych.router.values.slo_tiers import Tiers, tiers_of

_POSITIVE: Final = (
    "batch_concurrency",
    "batch_file_bytes",
    "batch_lease_s",
    "image_fetch_s",
    "image_memory_bytes",
    "image_threads",
    "max_choices",
    "max_concurrent",
    "max_queue_wait_s",
    "max_image_bytes",
    "max_image_pixels",
    "max_images",
    "max_body_bytes",
    "client_stall_s",
    "request_timeout_s",
    "tokenizer_threads",
    "workers",
)

_NOT_NEGATIVE: Final = (
    "breaker_failures",
    "cold_wait_s",
    "drain_s",
    "explained_requests",
    "hedge_after_s",
    "max_image_scaled_pixels",
    "max_queued",
    "tokenizer_cache_bytes",
    "tpot_slo_ms",
    "ttft_deadline_ms",
    "ttft_slo_ms",
)

RENAMED: Final[Mapping[str, str]] = {  # options by their former names
    "tpot_objective_s": "tpot_slo_ms",
    "ttft_objective_s": "ttft_slo_ms",
    "ttft_slo_s": "ttft_deadline_ms",
}


@dataclass(frozen=True, slots=True)
class RouterConfig(LogConfig, TrustConfig, KeyConfig):
    """Take requests over HTTP and gRPC, and have each served by a pair of workers."""

    model: str = option("smollm2", help="name or path of the model that the workers serve; for its tokenizer")
    load_format: LoadFormat = option("auto", help="the workers'; a dummy model may lack a tokenizer")
    served_model_name: tuple[str, ...] = option(
        (), help="what clients call the model, besides its id; answers and lists say the first"
    )
    further_models: tuple[str, ...] = option(
        (), help="models beside --model that other workers serve: PATH, or NAME=PATH with what clients call it"
    )
    max_model_len: int = option(0, help="tokens of prompt and output that a request may have; 0: what the model takes")
    bootstrap: tuple[str, ...] = option(
        ("127.0.0.1:7000",), help="bootstrap replicas; dns:///NAME:PORT: all behind a name"
    )
    host: str = option("127.0.0.1", help="address to listen on; `::`: every one, of IPv4 too")
    http_port: int = option(8000, help="port of the HTTP API; 0: any free one")
    grpc_port: int = option(9000, help="port of the gRPC API; 0: any free one")
    health_port: int = option(0, help="HTTP port of /health/live|ready|startup and /metrics; 0: any free one")
    open_metrics: bool = option(False, help="show /metrics at the API's port, too: to everybody, without a key")
    cors_origins: tuple[str, ...] = option(
        (), help="origins of web pages that may be clients, as https://chat.example; *: all pages"
    )
    console: Literal["on", "off"] = option("on", help="serve the console, a page for operators, at /console/")
    console_text: bool = option(False, help="the console may show texts of prompts: those of prefixes in caches")
    advertise_host: str = option("", help="host that others reach this router by; empty: the listening address")
    endpoint_slices: str = option("", help="labels of the EndpointSlices of workers, to check members by; empty: don't")
    pod_name: str = option("", help="pod that this process runs in, for `diptych status`")
    workers: int = option(1, help="processes that share the ports; each takes its part of the connections")
    drain_s: float = option(30.0, help="seconds that running requests get to finish after SIGTERM")
    policy: str = option("pair_cost", help="how to choose the pair for a request", group="routing", choices=POLICIES)
    prefill_policy: str | None = option(
        None, help="for the prefill worker, chosen first", group="routing", choices=POLICIES
    )
    decode_policy: str | None = option(
        None, help="for the decode worker, chosen second", group="routing", choices=POLICIES
    )
    pair_wait_s: float = option(1.5, help="how long a new request waits for a pair of workers", group="routing")
    cold_wait_s: float = option(
        0.0,
        help="how long a request waits for workers while there are none: they may be started for it",
        group="routing",
    )
    explained_requests: int = option(1000, help="last requests whose routing can be explained", group="routing")
    request_log: Path | None = option(
        None,
        help="file that gets a line a request for `diptych simulate`: lengths, times and names of blocks, no text",
        group="routing",
    )
    usage_log: Path | None = option(
        None, help="file that gets a line a request with what it used: key, model, tokens, outcome", group="limits"
    )
    lost_pair_wait_s: float = option(
        10.0,
        help="how long a request that lost a worker waits for another pair: one that ended may be there again",
        group="routing",
    )
    tool_parser: str = option(
        AUTO,
        help="how the model writes calls of tools; auto: as its chat template tells",
        group="chat",
        choices=(AUTO, NONE, *sorted(TOOL_FORMATS)),
    )
    chat_template: str = option(
        "", help="Jinja file, or template, in place of the model's own chat template", group="chat"
    )
    reasoning_parser: str = option(
        AUTO,
        help="how it writes what it thinks before it answers; likewise",
        group="chat",
        choices=(AUTO, NONE, *sorted(REASONING_FORMATS)),
    )
    ttft_slo_ms: float = option(
        0.0, help="a request is served well with its first token within so long; 0: not said", group="slo"
    )
    tpot_slo_ms: float = option(
        0.0, help="and with each token after it within so long, in the mean; 0: not said", group="slo"
    )
    slo_tiers: tuple[str, ...] = option(
        (), help="SLOs that requests may name: NAME:ttft_ms=300:tpot_ms=40:weight=2:sheddable", group="slo"
    )
    hedge_after_s: float = option(
        0.0, help="start a second attempt elsewhere after so long without a first token; 0: never", group="routing"
    )
    moves: Literal["on", "off"] = option(
        "on", help="outputs whose worker can't keep their time per token go on at one that can", group="routing"
    )
    breaker_failures: int = option(
        5, help="failures in a row after which a worker or link is left alone for a while; 0: never", group="routing"
    )
    declared_file: Path | None = option(
        None,
        help="TOML with what is to be so: adapters, weights of pools, level of logs; read again when it changes",
        group="adapters",
    )
    runtime_lora: bool = option(False, help="let clients load and unload adapters over HTTP", group="adapters")
    max_concurrent: int = option(1024, help="requests worked on at once; more wait in line", group="limits")
    max_queued: int = option(256, help="requests in line, by priority; more get 429. 0: no line", group="limits")
    max_queue_wait_s: float = option(5.0, help="a request that would wait longer in line gets 429", group="limits")
    ttft_deadline_ms: float = option(
        0.0, help="429 at once for what won't get its first token in so many milliseconds; 0: never", group="limits"
    )
    max_choices: int = option(128, help="outputs of a prompt (`n`, `best_of`); each takes a place", group="limits")
    max_body_bytes: int = option(8 << 20, help="longest request body or gRPC message", group="limits")
    client_stall_s: float = option(
        60.0, help="a client that takes or sends nothing for so long is cut off", group="limits"
    )
    request_timeout_s: float = option(600.0, help="a request without a token for so long ends with 504", group="limits")
    batch_store: str = option(
        "", help="directory, or URL of a bucket, for /v1/files and /v1/batches; empty: none", group="batches"
    )
    batch_concurrency: int = option(16, help="requests of batches at once in each process, at most", group="batches")
    batch_file_bytes: int = option(200 << 20, help="longest file that may be uploaded", group="batches")
    batch_lease_s: float = option(
        30.0, help="silence after which other routers go on with a router's batch", group="batches"
    )
    image_urls: tuple[str, ...] = option(
        (),
        help="hosts that images are fetched from: images.example, *.example, host:port; *: all public ones",
        group="images",
    )
    image_fetch_s: float = option(10.0, help="how long an image may take to come from its URL", group="images")
    image_threads: int = option(2, help="threads that decode and scale images", group="images")
    image_memory_bytes: int = option(
        1 << 30, help="memory for fetched files, pixels and rows of all requests; more get 429", group="images"
    )
    max_images: int = option(16, help="images that a request may have", group="images")
    max_image_bytes: int = option(16 << 20, help="longest file of an image", group="images")
    max_image_pixels: int = option(1 << 25, help="most pixels of an image, as its file has them", group="images")
    max_image_scaled_pixels: int = option(
        1 << 20,
        help="most pixels of an image as the model sees it: larger ones are made smaller; 0: what its files say",
        group="images",
    )
    tokenize_at: TokenizeAt = option(
        "router", help="who makes tokens of prompts; worker: long ones cost the router little", group="limits"
    )
    tokenizer_threads: int = option(2, help="threads that render templates and tokenise", group="limits")
    tokenizer_cache_bytes: int = option(
        64 << 20, help="memory for the tokens of earlier messages and prompts; 0: none", group="limits"
    )

    @property
    def tiers(self) -> Tiers:
        """Raises `ConfigError`."""
        return tiers_of(self.slo_tiers, Slo(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000))

    def of_further(self, further: str) -> RouterConfig:
        """Return the options as they are for one of `further_models`: those of how a model talks are of `model`."""
        name, _, path = further.rpartition("=")
        names = (name,) if name else ()
        return replace(
            self,
            model=path,
            further_models=(),
            served_model_name=names,
            max_model_len=0,
            chat_template="",
            tool_parser=AUTO,
            reasoning_parser=AUTO,
        )

    @property
    def image_limits(self) -> ImageLimits:
        request_bytes = self.image_memory_bytes // SHARE
        return ImageLimits(self.max_images, self.max_image_bytes, self.max_image_pixels, request_bytes)

    @staticmethod
    def advice(unknown: Sequence[str]) -> str:
        """Return what an option is called now, that had another name."""
        name = unknown[0].partition("=")[0].removeprefix("--").replace("-", "_")
        return f"; {_renamed(name)}" if name in RENAMED else ""

    @property
    def advertised_host(self) -> str:
        return reachable_host(self.host, self.advertise_host)

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        self.check_access(self.host, is_insecure=self.insecure)
        _check_variables(os.environ)
        check_replicas(self.bootstrap)
        check_max_model_len(self.max_model_len)
        check_origins(self.cors_origins)
        check_hosts(self.image_urls)
        if self.max_image_pixels > MOST_PIXELS:
            raise ConfigError(f"--max-image-pixels must be at most {MOST_PIXELS}, not {self.max_image_pixels}")
        check_names(self.served_model_name)
        for further in self.further_models:
            if not self.of_further(further).model:
                raise ConfigError(f"--further-models takes PATH or NAME=PATH, not {further!r}")
            check_names(self.of_further(further).served_model_name)
        for name in _NOT_NEGATIVE:
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, as {value} is")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        self.tiers  # noqa: B018  # raises


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an option by its former name: else nobody would notice that it has no effect."""
    for name in RENAMED:
        if environ.get(env_name(name)):
            raise ConfigError(f"{env_name(name)}: {_renamed(name)}")


def _renamed(name: str) -> str:
    now = RENAMED[name]
    return f"{flag_name(name)} is {flag_name(now)} ({env_name(now)}) now, in milliseconds"
