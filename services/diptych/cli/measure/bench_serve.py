"""Measure a server of OpenAI's API under a load: `diptych bench serve --trace chat --rate 2 --plot load.svg`."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

from diptych.cli.load.asked import Asked, asked_of, conversations, random_calls, within
from diptych.cli.load.charts import chart
from diptych.cli.load.client import Server
from diptych.cli.load.sending import Target, context_of, send_all, served_model
from diptych.cli.load.served import Served, as_json, result_of, table
from diptych.cli.platform.local_platforms import PLATFORM_HELP, local_platform
from diptych.common.config import option, to_flags
from diptych.common.errors import ConfigError
from diptych.generation.slo import Slo
from diptych.simulator.traces.closed_loop import closed_loop
from diptych.simulator.traces.generators.named import GENERATORS, generate
from diptych.simulator.traces.reading import at_rate, read_calls

DEFAULT_URL: Final = "http://127.0.0.1:8000"
RANDOM: Final = "random"
GENERATED_CALLS: Final = 100
GENERATED_RATE: Final = 1.0  # of named generators, whose sessions need a rate
WARM_UP_LEN: Final = 16
NOT_NEGATIVE: Final = (
    *("calls", "rate", "concurrency", "vocab", "max_len", "warm_up", "seed", "ttft_slo_ms", "tpot_slo_ms"),
)


@dataclass(frozen=True, slots=True)
class BenchServeConfig:
    """Measure a server of OpenAI's API: Diptych, vLLM, SGLang or any other, under a load of your choice.

    Loads are random prompts, conversations of a ShareGPT file, traces (Mooncake's, Azure's, a request log), or what is
    generated after published figures. Prompts of equal blocks are equal, so a prefix cache finds what it would find.
    """

    url: str = option("", help=f"address of the server; none: the platform here, else {DEFAULT_URL}", group="server")
    platform: str = option("", help=PLATFORM_HELP, group="server")
    api_key: str = option("", help="key, where the server wants one; better by the variable", group="server")
    model: str = option("", help="model; none: the first that the server names", group="server")
    api: Literal["completions", "chat"] = option("completions", help="what is asked: /v1/...", group="server")
    ignore_eos: bool = option(
        True, help="have outputs as long as the load says; OpenAI's own servers refuse it", group="server"
    )
    extra_body: str = option("", help='JSON object of more fields of each request: {"top_p": 0.9}', group="server")
    timeout_s: float = option(600.0, help="that a call may take", group="server")
    trace: str = option(
        RANDOM, help=f"{RANDOM}, {', '.join(GENERATORS)}, or a file: a trace, ShareGPT's JSON", group="load"
    )
    calls: int = option(0, help=f"calls; 0: {GENERATED_CALLS}, or all of a file", group="load")
    rate: float = option(0.0, help="calls a second; 0: as the trace has them, random ones all at once", group="load")
    concurrency: int = option(0, help="calls at once at most; 0: no bound", group="load")
    input_len: int = option(512, help="tokens of a random prompt", group="load")
    output_len: int = option(128, help="tokens of its output", group="load")
    spread: float = option(0.0, help="by which share random lengths differ, 0 to 1", group="load")
    closed_loop: bool = option(False, help="each call of a session waits for the answer before it", group="load")
    vocab: int = option(0, help="send prompts as tokens of a vocabulary of this size; 0: as words", group="load")
    max_len: int = option(0, help="leave out calls of more tokens; 0: than the server's context has", group="load")
    warm_up: int = option(1, help="calls before the load, which are not counted", group="load")
    seed: int = option(0, help="of all that is drawn", group="load")
    ttft_slo_ms: float = option(0.0, help="a call is served well with its first token within so long", group="slo")
    tpot_slo_ms: float = option(0.0, help="and with each token after it within so long, in the mean", group="slo")
    json: Path | None = option(None, help="write all results, and those of each call, to this file", group="results")
    plot: Path | None = option(None, help="draw latencies and load to this file, as SVG", group="results")

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Raises `ConfigError`."""
        try:
            found = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("--extra-body must be an object")
        return ({"ignore_eos": True} if self.ignore_eos else {}) | found

    def validate(self) -> None:
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, as {getattr(self, name)} is")
        if self.input_len < 1 or self.output_len < 1 or not 0 <= self.spread <= 1 or self.timeout_s <= 0:
            raise ConfigError("--input-len, --output-len and --timeout-s must be positive, --spread from 0 to 1")
        if self.vocab == 1:
            raise ConfigError("--vocab is the number of tokens that the model knows, not 1")
        if self.vocab and self.api == "chat":
            raise ConfigError("a chat has no tokens as its prompt: leave --vocab out, or give --api completions")
        _ = self.extra


def main(config: BenchServeConfig) -> int:
    """Measure; return 0 if every call was served."""
    server = Server(_url(config), config.api_key, config.timeout_s)
    calls = asyncio.run(_measured(config, server))
    result = result_of(calls, config.slo)
    print(table(result, config.slo), flush=True)
    if config.json is not None:
        found = {"command": command_of(config), "version": version("diptych"), "server": server.root}
        write(config.json, json.dumps({**found, **as_json(result, calls)}, indent=2) + "\n")
    if config.plot is not None:
        write(config.plot, chart(calls, f"{config.trace} on {server.root}"))
    return 0 if result.served == result.offered else 1


async def _measured(config: BenchServeConfig, server: Server) -> Sequence[Served]:
    model, context_len = config.model, 0
    if not model:
        model, context_len = await served_model(server)
    elif not config.max_len:
        context_len = await context_of(server, model)
    target = Target(server, model, config.api, config.extra)
    load = load_of(config, config.max_len or context_len)
    first = Asked(0.0, load[0].prompt[:WARM_UP_LEN], WARM_UP_LEN, 2)
    await send_all(target, [first] * config.warm_up, concurrency=1)
    print(f"{len(load)} calls to {target.model} at {server.root}{_words(load)}", flush=True)
    return await send_all(target, load, config.concurrency)


def load_of(config: BenchServeConfig, context_len: int = 0) -> Sequence[Asked]:
    """Return what is asked; what a context has no room for is left out. Raises `ConfigError`."""
    try:
        load = _load(config)
    except ConfigError as error:
        raise ConfigError(f"--trace: {config.trace}: {error}") from None
    fitting = within(load, context_len) if context_len else load
    if not fitting:
        raise ConfigError(f"no call has room in a context of {context_len} tokens: give shorter ones")
    if len(fitting) < len(load):
        print(f"{len(load) - len(fitting)} calls are longer than {context_len} tokens, and left out", flush=True)
    return fitting


def _load(config: BenchServeConfig) -> Sequence[Asked]:
    num = config.calls or GENERATED_CALLS
    if config.trace == RANDOM:
        lengths = (config.input_len, config.output_len, config.spread)
        return asked_of(random_calls(num, *lengths, config.rate, config.seed), config.vocab)
    if config.trace in GENERATORS:
        calls = generate(config.trace, num, config.rate or GENERATED_RATE, config.seed)
    else:
        text = _text(config.trace)
        if text.lstrip().startswith("["):
            return conversations(text, config.calls, config.rate, config.seed)
        calls = read_calls(text.splitlines(keepends=True))[: config.calls or None]
        calls = at_rate(calls, config.rate) if config.rate else calls
    return asked_of(closed_loop(calls) if config.closed_loop else calls, config.vocab)


def _text(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        known = f"{RANDOM}, {', '.join(GENERATORS)}"
        raise ConfigError(f"there is no such file, and what can be generated is {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it can't be read: {error}") from None


def _url(config: BenchServeConfig) -> str:
    if config.url:
        return config.url
    platform = local_platform(config.platform)
    return f"http://{platform.http}" if platform else DEFAULT_URL


def command_of(config: BenchServeConfig) -> str:
    """Return the command line that asks the same again; it has no key, and writes no files."""
    usual = {*to_flags(BenchServeConfig())}
    hidden = ("--api-key=", "--json=", "--plot=")
    flags = (flag for flag in to_flags(config) if flag not in usual and not flag.startswith(hidden))
    return shlex.join(["diptych", "bench", "serve", *flags])


def _words(load: Sequence[Asked]) -> str:
    span_s = max(each.due_s for each in load)
    return f" within {span_s:.0f} s" if span_s else ", all at once"


def write(path: Path, text: str) -> None:
    """Raises `ConfigError`."""
    try:
        path.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; give another file") from None
