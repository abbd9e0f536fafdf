"""Run the whole platform on this machine: `diptych up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from diptych.cli.log_view import LogView
from diptych.cli.plan import Model, Site, Workers, components, threads_each
from diptych.cli.shared_trust import SharedTrust, shared_trust
from diptych.cli.supervisor import ComponentFailed, Supervisor
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.lifecycle import run_until_signal
from diptych.common.logging import colours_wanted, setup
from diptych.common.ports import claim
from diptych.common.reachable import bracketed
from diptych.common.trust import TrustConfig
from diptych.engine.loader.load_format import LoadFormat
from diptych.engine.runner.device_kind import DeviceKind
from diptych.router.keys.config import KeyConfig

_READY_INTERVAL_S: Final = 0.1
_ANSWER_TIMEOUT_S: Final = 2.0
_HINT_INTERVAL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class UpConfig(TrustConfig, KeyConfig):
    """Run bootstrap, workers and the router, each as a process of its own, until Ctrl-C.

    The options of a worker (`diptych decode --help`) apply to all workers through their environment variables.
    """

    model: str = option("smollm2", help="model: 'smollm2', a .gguf file or a Hugging Face folder")
    load_format: LoadFormat = option("auto", help="of the weights; dummy: random ones, for benchmarks")
    device: DeviceKind = option("auto", help="what computes in all workers; sim: nothing, KV and time only")
    prefill: int = option(1, help="number of prefill workers")
    decode: int = option(1, help="number of decode workers")
    unified: int = option(0, help="number of workers that do both; with some, --prefill and --decode may be 0")
    prefill_options: str = option("", help="further options of prefill workers, as in '--tp 2 --page-size 64'")
    decode_options: str = option("", help="further options of decode workers")
    unified_options: str = option("", help="further options of unified workers")
    threads: int = option(0, help="CPU threads a worker; 0: an equal share of the cores")
    host: str = option("127.0.0.1", help="address that the APIs listen on", group="network")
    http_port: int = option(8000, help="port of the OpenAI-compatible HTTP API; 0: any free one", group="network")
    grpc_port: int = option(9000, help="port of the gRPC API; 0: any free one", group="network")
    bootstrap_port: int = option(0, help="port of the membership service; 0: any free one", group="network")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if min(self.prefill, self.decode, self.unified) < 0:
            raise ConfigError("--prefill, --decode and --unified must be 0 or more")
        if self.unified + min(self.prefill, self.decode) < 1:
            raise ConfigError("--prefill and --decode must be at least 1 without --unified: a request needs both")
        self.check_access(self.host, is_insecure=self.insecure)
        if self.threads < 0:
            raise ConfigError("--threads must be 0 or more")
        wanted = [port for port in (self.http_port, self.grpc_port, self.bootstrap_port) if port]
        if len(set(wanted)) < len(wanted):
            raise ConfigError("--http-port, --grpc-port and --bootstrap-port must differ")

    @property
    def workers(self) -> tuple[Workers, ...]:
        """What to run of each role."""
        asked = (
            ("prefill", self.prefill, self.prefill_options),
            ("decode", self.decode, self.decode_options),
            ("unified", self.unified, self.unified_options),
        )
        device = ("--device", self.device)
        return tuple(Workers(role, count, (*device, *shlex.split(more))) for role, count, more in asked if count)


def main(config: UpConfig) -> int:
    """Run until SIGINT or SIGTERM; return the exit code."""
    setup("up", "text")
    with shared_trust(config) as trust:
        return _run(config, trust)


def _run(config: UpConfig, trust: SharedTrust) -> int:
    site = _claim_site(config)
    model_id = _fetch(config.model, config.load_format)
    num_threads = threads_each(config.threads, sum(each.count for each in config.workers), os.cpu_count() or 1)
    model = Model(config.model, config.load_format)
    planned = [
        replace(component, environment={**trust.environment, **config.key_environment})
        for component in components(model, site, config.workers, num_threads)
    ]
    view = LogView(sys.stdout, tuple(component.name for component in planned), colours_wanted(sys.stdout))
    view.say(f"starting {', '.join(component.name for component in planned)}; {num_threads} threads a worker")
    supervisor = Supervisor(planned, view, partial(_wait_until_ready, site, view))
    ready = partial(print, banner(config, site, model_id, trust.token_file), flush=True)
    try:
        asyncio.run(run_until_signal(partial(supervisor.run, on_ready=ready)))
    except ComponentFailed as failed:
        view.say(str(failed), level="error")
        return 1
    except asyncio.CancelledError:  # a third Ctrl-C
        view.say("killed", level="warning")
    return 0


def banner(config: UpConfig, site: Site, model_id: str, token_file: Path | None = None) -> str:
    """Return what a newcomer needs next."""
    workers = ", ".join(f"{each.count} {each.role}" for each in config.workers)
    host = bracketed(site.client_host)
    url = f"http://{host}:{site.http_port}"
    token = f"\n  token      export DIPTYCH_AUTH_TOKEN_FILE={token_file}" if token_file else ""
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    return f"""
  Diptych is ready: {workers}. Ctrl-C stops it.

  HTTP       {url}/v1
  gRPC       {host}:{site.grpc_port}
  bootstrap  {site.bootstrap}{token}

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model_id}", "temperature": 0, {question}}}'
"""


def _claim_site(config: UpConfig) -> Site:
    return Site(
        host=config.host,
        http_port=claim(config.host, config.http_port, flag="--http-port"),
        grpc_port=claim(config.host, config.grpc_port, flag="--grpc-port"),
        bootstrap_port=claim("127.0.0.1", config.bootstrap_port, flag="--bootstrap-port"),
    )


def _fetch(model: str, load_format: LoadFormat) -> str:
    """Open the model before anything starts: downloaded by one process, a wrong name fails early. Return its id."""
    from diptych.engine.loader.source import open_model  # heavy; not for --help

    return open_model(model, load_format).config.model_id


async def _wait_until_ready(site: Site, view: LogView) -> None:
    """Ask the router until it has a pair of workers to route to."""
    for attempt in range(1, sys.maxsize):
        if await _status(site.client_host, site.http_port, "/ready") == 200:
            return
        if attempt % round(_HINT_INTERVAL_S / _READY_INTERVAL_S) == 0:
            view.say("still waiting for the workers: loading a large model takes a while")
        await asyncio.sleep(_READY_INTERVAL_S)


async def _status(host: str, port: int, path: str) -> int:
    """Return the HTTP status of a GET; 0 when nobody answers."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(f"GET {path} HTTP/1.1\r\nhost: {bracketed(host)}\r\nconnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
    except OSError:  # incl. TimeoutError
        return 0
    return int(words[1]) if len(words) > 1 else 0
