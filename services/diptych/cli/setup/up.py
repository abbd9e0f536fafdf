"""Run the whole platform on this machine: `diptych up`.

An option that it does not have, but its workers or its router do, is answered with advice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diptych.cli.plans.processes import (
    Component,
    ListenAddresses,
    Model,
    Workers,
    components,
    over_nodes,
    router_memory,
    threads_each,
    transport_environment,
)
from diptych.cli.platform.console_code import ConsoleCode, can_be_entered, console_code
from diptych.cli.platform.local_platforms import LocalPlatform, announced, running, runtime_folder
from diptych.cli.platform.log_view import LogView
from diptych.cli.platform.shared_trust import SharedTrust, shared_trust
from diptych.cli.platform.supervisor import ComponentFailed, Supervisor
from diptych.common.config import described, env_name, flag_name, option, parse
from diptych.common.errors import ConfigError
from diptych.common.event_loop import Stop, run_until_signal
from diptych.common.logging import colours_wanted, setup
from diptych.common.net.ports import claim, free_ports
from diptych.common.net.reachable import bracketed
from diptych.common.net.served import LoadFormat, check_max_model_len, check_names
from diptych.common.proc import machine_memory
from diptych.common.trust.trust import TrustConfig
from diptych.engine.options.device_kind import DeviceKind
from diptych.router.keys.config import KeyConfig

if TYPE_CHECKING:  # heavy; not for --help
    from diptych.architectures.pooling import Pooling
    from diptych.checkpoints.source import ModelSource

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
    served_model_name: tuple[str, ...] = option(
        (), help="what clients call the model, besides its id; answers and lists say the first"
    )
    max_model_len: int = option(0, help="tokens of prompt and output that a request may have; 0: what the model takes")
    chat_template: str = option("", help="Jinja file, or template, in place of the model's own chat template")
    device: DeviceKind = option("auto", help="what computes in all workers; sim: nothing, KV and time only")
    prefill: int = option(1, help="number of prefill workers")
    decode: int = option(1, help="number of decode workers; 0 for a model that makes vectors, as of embeddings")
    unified: int = option(0, help="number of workers that do both; with some, --prefill and --decode may be 0")
    encode: int = option(0, help="number of workers that encode images for those that compute prompts")
    prefill_options: str = option("", help="further options of prefill workers, as in '--tp 2 --page-size 64'")
    decode_options: str = option("", help="further options of decode workers")
    unified_options: str = option("", help="further options of unified workers")
    encode_options: str = option("", help="further options of encode workers")
    nodes: int = option(
        1, help="nodes that each worker is divided among, as processes on this machine: a try of --nnodes"
    )
    threads: int = option(0, help="CPU threads a worker; 0: an equal share of the cores")
    router_memory_mib: int = option(
        0, help="a router, or bootstrap, with more memory is restarted; 0: a quarter of the machine's, 2 to 16 GiB"
    )
    host: str = option("127.0.0.1", help="address that the APIs listen on", group="network")
    http_port: int = option(8000, help="port of the OpenAI-compatible HTTP API; 0: any free one", group="network")
    grpc_port: int = option(9000, help="port of the gRPC API; 0: any free one", group="network")
    bootstrap_port: int = option(0, help="port of the membership service; 0: any free one", group="network")

    def validate(self) -> None:
        if min(self.prefill, self.decode, self.unified, self.encode) < 0:
            raise ConfigError("--prefill, --decode, --unified and --encode must be 0 or more")
        if self.nodes < 1:
            raise ConfigError(f"--nodes must be at least 1, not {self.nodes}")
        if self.unified + self.prefill < 1:
            raise ConfigError("--prefill must be at least 1 without --unified: a request needs it")
        _ = self.workers  # raises for options that can't be read
        self.check_access(self.host, is_insecure=self.insecure)
        check_names(self.served_model_name)
        check_max_model_len(self.max_model_len)
        if self.router_memory_mib < 0:
            raise ConfigError("--router-memory-mib must be 0 or more")
        if self.threads < 0:
            raise ConfigError("--threads must be 0 or more")
        wanted = [port for port in (self.http_port, self.grpc_port, self.bootstrap_port) if port]
        if len(set(wanted)) < len(wanted):
            raise ConfigError("--http-port, --grpc-port and --bootstrap-port must differ")

    @staticmethod
    def advice(unknown: Sequence[str]) -> str:
        """Return how to give the first of these words, or nothing where no component knows it."""
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            return "; a model is named by --model"
        from diptych.engine.frontend.config import WorkerConfig  # heavy; for mistakes only
        from diptych.router.config import RouterConfig

        if word in (workers := _variables(WorkerConfig)):
            one_role = "or give it to those of one role, as by --prefill-options"
            return f"; {word} is an option of workers: set {workers[word]} for all of them, {one_role}"
        if word in (router := _variables(RouterConfig)):
            return f"; {word} is an option of the router: set {router[word]} for it"
        return ""

    @property
    def served(self) -> Model:
        """What to serve, and how."""
        return Model(self.model, self.load_format, self.max_model_len, self.served_model_name, self.chat_template)

    @property
    def workers(self) -> tuple[Workers, ...]:
        """What to run of each role. Raises `ConfigError`."""
        asked = (
            ("prefill", self.prefill, self.prefill_options),
            ("decode", self.decode, self.decode_options),
            ("unified", self.unified, self.unified_options),
            ("encode", self.encode, self.encode_options),
        )
        device = ("--device", self.device)
        return tuple(Workers(role, count, (*device, *_words(role, more))) for role, count, more in asked if count)


def _words(role: str, options: str) -> list[str]:
    """Return options as a shell reads them. Raises `ConfigError`."""
    try:
        return shlex.split(options)
    except ValueError:
        raise ConfigError(f"--{role}-options has a quotation mark too few: {options}") from None


def main(config: UpConfig) -> int:
    """Run until SIGINT or SIGTERM; return the exit code."""
    setup("up", "text")
    with shared_trust(config) as trust, console_code(trust.own) as code:
        return _run(config, trust, code)


def _run(config: UpConfig, trust: SharedTrust, code: ConsoleCode) -> int:
    listen = _claim_addresses(config)
    source = _fetch(config)
    _check_parts(config, source)
    num_processes = config.nodes * sum(each.count for each in config.workers)
    num_threads = threads_each(config.threads, num_processes, os.cpu_count() or 1)
    planned = _planned(config, trust, code, listen, num_threads)
    for component in planned:
        _check_pool(component, source)
    model_id = next(iter(config.served_model_name), source.config.model_id)
    view = LogView(sys.stdout, tuple(component.name for component in planned), colours_wanted(sys.stdout))
    view.log(f"starting {', '.join(component.name for component in planned)}; {num_threads} threads a worker")
    supervisor = Supervisor(planned, view, partial(_wait_until_ready, listen, view))
    here = LocalPlatform(listen.http, listen.grpc, listen.bootstrap, model_id, trust.of_commands)
    with found_by_commands(here, view) as found:
        commands = commands_here(listen, found) if found else commands_elsewhere(listen, trust.token_file)
        page = code.address(f"http://{listen.http}") if can_be_entered(trust.own, os.environ) else ""
        ready = partial(print, banner(config, listen, model_id, commands, page, source.config.pooling), flush=True)
        return _supervise(partial(supervisor.run, on_ready=ready), view)


def _check_parts(config: UpConfig, source: ModelSource) -> None:
    """Raise `ConfigError` where nobody would make output: only a model that makes vectors needs nobody to.

    And for workers that encode images of a model that sees none.
    """
    if config.encode and source.config.tower is None:
        raise ConfigError(f"--encode is for models that see images: {source.config.model_id} sees none")
    if source.config.pooling is None and config.unified + config.decode < 1:
        raise ConfigError("--prefill and --decode must be at least 1 without --unified: a request for text needs both")


def _planned(
    config: UpConfig, trust: SharedTrust, code: ConsoleCode, listen: ListenAddresses, num_threads: int
) -> list[Component]:
    memory_bytes = router_memory(config.router_memory_mib, machine_memory())
    transports = transport_environment(config.workers, os.environ, has_hardware=_has_hardware())
    shared = {**config.key_environment, **transports}
    own = {"router": code.environment}
    return [
        replace(
            component,
            environment={**trust.environment(name := component.arguments[0]), **shared, **own.get(name, {})},
        )
        for component in components(config.served, listen, _divided(config), num_threads, memory_bytes)
    ]


def _divided(config: UpConfig) -> tuple[Workers, ...]:
    """Return the workers, each over as many nodes as was asked for."""
    if config.nodes == 1:
        return config.workers
    given = {name: os.environ.get(env_name(name), "") for name in ("tp", "pp")}
    return tuple(over_nodes(each, config.nodes, free_ports("127.0.0.1", each.count), given) for each in config.workers)


def _supervise(run: Callable[[Stop], Awaitable[None]], view: LogView) -> int:
    try:
        asyncio.run(run_until_signal(run))
    except ComponentFailed as failed:
        view.log(str(failed), level="error")
        return 1
    except asyncio.CancelledError:  # a third Ctrl-C
        view.log("killed", level="warning")
    return 0


@contextlib.contextmanager
def found_by_commands(platform: LocalPlatform, view: LogView) -> Iterator[int]:
    """Have commands find a platform; yield how many they find now. Without such a folder it serves all the same."""
    folder = runtime_folder()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(announced(platform, folder))
            num_found = len(running(folder))
        except (ConfigError, OSError) as error:
            view.log(f"commands won't find this platform by themselves: {error}", level="warning")
            num_found = 0
        yield num_found


def commands_here(listen: ListenAddresses, num_platforms: int) -> str:
    """Return what to type in another terminal where commands find the platform."""
    which = f" --platform {listen.http_port}" if num_platforms > 1 else ""
    return f"In another terminal: `diptych chat{which}`, `diptych status{which}`, `diptych links{which}`."


def commands_elsewhere(listen: ListenAddresses, token_file: Path | None) -> str:
    """Return what to type in another terminal where they don't."""
    token = f"export DIPTYCH_AUTH_TOKEN_FILE={token_file}; " if token_file else ""
    return (
        f"In another terminal: `diptych chat --target {listen.grpc}`,\n"
        f"  `{token}diptych status --bootstrap {listen.bootstrap}`."
    )


def banner(
    config: UpConfig,
    listen: ListenAddresses,
    model_id: str,
    commands: str,
    page: str,
    pooling: Pooling | None = None,
) -> str:
    """Return what a newcomer needs next; `page` is the address of the console, empty where there is none."""
    workers = ", ".join(f"{each.count} {each.role}" for each in config.workers)
    workers += f", each over {config.nodes} nodes" if config.nodes > 1 else ""
    url, console = f"http://{listen.http}", f"  console    {page}\n" if page else ""
    return f"""
  Diptych is ready: {workers}. Ctrl-C stops it.

{console}  HTTP       {url}/v1
  gRPC       {listen.grpc}
  bootstrap  {listen.bootstrap}

  {commands}

  {_example(url, model_id, pooling, needs_key=config.api_keys_file is not None)}
"""


def _example(url: str, model_id: str, pooling: Pooling | None, *, needs_key: bool) -> str:
    """Return a request to type."""
    question = '"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]'
    path, asked = "/v1/chat/completions", question
    if pooling is not None:
        path = "/v1/embeddings" if pooling.purpose == "embed" else "/classify"
        asked = '"input": "What is the capital of France?"'
    body = f'{{"model": "{model_id}", {asked}}}'
    key = ' \\\n    -H "authorization: Bearer $DIPTYCH_API_KEY"' if needs_key else ""
    return f"curl {url}{path} -H 'content-type: application/json'{key} \\\n    -d '{body}'"


def _claim_addresses(config: UpConfig) -> ListenAddresses:
    return ListenAddresses(
        host=config.host,
        http_port=claim(config.host, config.http_port, flag="--http-port"),
        grpc_port=claim(config.host, config.grpc_port, flag="--grpc-port"),
        bootstrap_port=claim("127.0.0.1", config.bootstrap_port, flag="--bootstrap-port"),
    )


def _fetch(config: UpConfig) -> ModelSource:
    """Open the model before anything starts: downloaded by one process, a wrong name or template fails early."""
    from diptych.checkpoints.source import (
        bounded,  # heavy; not for --help
        open_model,
    )
    from diptych.tokens.chat_template import read_template

    source = bounded(open_model(config.model, config.load_format), config.max_model_len)
    if config.chat_template:
        source.tokenizer().with_chat_template(read_template(config.chat_template))
    return source


def _check_pool(component: Component, source: ModelSource) -> None:
    """Raise what a worker would raise, before a process starts. Its own options are read as it will read them."""
    from diptych.common.members.roles import WORKER_ROLES, Role  # likewise
    from diptych.engine.frontend.config import WorkerConfig
    from diptych.engine.options.pool_size import check_pool, likely_device
    from diptych.engine.options.served_model import as_served

    role, *arguments = component.arguments
    if role not in [each.value for each in WORKER_ROLES.values()]:
        return
    options = parse(WorkerConfig, arguments, prog=f"diptych {role}")
    try:
        served = as_served(source, options.engine_options)
        check_pool(served.config, options.engine_options, Role(role), likely_device(options.device))
    except ConfigError as error:
        raise ConfigError(f"{component.name}: {error}") from None


def _has_hardware() -> bool:
    """Whether KV may go by RDMA, or from GPU to GPU."""
    from diptych.kvtransfer.ucx.options import UcxOptions, offers_remote_access  # likewise

    return offers_remote_access(UcxOptions())


async def _wait_until_ready(listen: ListenAddresses, view: LogView) -> None:
    """Ask the router until it has a pair of workers to route to."""
    for attempt in range(1, sys.maxsize):
        if await _status(listen.client_host, listen.http_port, "/ready") == 200:
            return
        if attempt % round(_HINT_INTERVAL_S / _READY_INTERVAL_S) == 0:
            view.log("still waiting for the workers: loading a large model takes a while")
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


def _variables(config_class: type) -> dict[str, str]:
    """Return the variable of each flag."""
    return {flag_name(name): env_name(name) for name, _, _ in described(config_class)}
