"""Finds a command's module and gives it its configuration: `diptych COMMAND ...`.

A command is a module with a configuration dataclass and `main(config) -> int`. Only the module of the command that was
asked for is imported, so `diptych --help` needs neither torch nor gRPC.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from itertools import filterfalse
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.common import lifecycle
from diptych.common.config import parse
from diptych.common.errors import DiptychError
from diptych.common.garbage import garbage_postponed


class Command(NamedTuple):
    """Where a command lives."""

    summary: str
    module: str
    config: str  # name of the configuration class


FIRST: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "up": Command("run everything on this machine", "diptych.cli.setup.up", "UpConfig"),
        "chat": Command("talk with the model", "diptych.cli.ask.chat", "ChatConfig"),
        "generate": Command("continue one prompt", "diptych.cli.ask.generate", "GenerateConfig"),
        "status": Command("show all members and what is not well", "diptych.cli.observe.status", "StatusConfig"),
        "links": Command("show the KV links between running workers", "diptych.cli.observe.links", "LinksConfig"),
    }
)  # what a newcomer needs

OTHERS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "bootstrap": Command("run the membership service", "diptych.bootstrap.main", "BootstrapConfig"),
        "prefill": Command("run a worker that computes prompts", "diptych.unified.main", "PrefillConfig"),
        "decode": Command("run a worker that generates output", "diptych.unified.main", "DecodeConfig"),
        "unified": Command("run a worker that does both", "diptych.unified.main", "UnifiedConfig"),
        "encode": Command("run a worker that encodes images", "diptych.unified.main", "EncodeConfig"),
        "router": Command("run the HTTP and gRPC front door", "diptych.router.main", "RouterConfig"),
        "download": Command("bring a model's files to a folder", "diptych.cli.setup.download", "DownloadConfig"),
        "update-weights": Command(
            "give running workers other weights", "diptych.cli.operate.update_weights", "UpdateWeightsConfig"
        ),
        "apply": Command("declare adapters, weights of pools, log levels", "diptych.cli.operate.apply", "ApplyConfig"),
        "role": Command("change what a running worker serves", "diptych.cli.operate.role", "RoleConfig"),
        "keys": Command("make API keys for clients: diptych keys new NAME", "diptych.cli.setup.keys", "KeysConfig"),
        "tokens": Command("make tokens for members: diptych tokens FOLDER", "diptych.cli.setup.tokens", "TokensConfig"),
        "cache": Command("show what prefix caches are worth, and keep", "diptych.cli.observe.cache", "CacheConfig"),
        "drain": Command("have members leave without losing a request", "diptych.cli.operate.drain", "DrainConfig"),
        "values": Command("print a values file for the Helm chart", "diptych.cli.setup.values", "ValuesConfig"),
        "describe": Command(
            "say what a model needs, from its config.json", "diptych.cli.sizing.describe", "DescribeConfig"
        ),
        "simulate": Command(
            "see how a platform would serve a load, in virtual time", "diptych.cli.sizing.simulate", "SimulateConfig"
        ),
        "plan": Command(
            "say which workers a load needs, before any GPU is bought", "diptych.cli.sizing.plan", "PlanConfig"
        ),
        "planner": Command(
            "say what workers a running platform needs, or see to it", "diptych.cli.sizing.planner", "PlannerConfig"
        ),
        "picker": Command(
            "tell a gateway which router gets each request", "diptych.cli.picking.picker", "PickerConfig"
        ),
        "deletion-costs": Command(
            "have Kubernetes end the emptiest workers first",
            "diptych.cli.operate.deletion_costs",
            "DeletionCostsConfig",
        ),
        "fit": Command("learn how long steps of running workers take", "diptych.cli.sizing.fit", "FitConfig"),
        "profile": Command("trace steps of a running worker", "diptych.cli.observe.profile", "ProfileConfig"),
        "check": Command("see whether a running platform works", "diptych.cli.observe.check", "CheckConfig"),
        "doctor": Command("see whether this machine is fit for Diptych", "diptych.cli.setup.doctor", "DoctorConfig"),
        "bench": Command("measure KV transfers: diptych bench kv", "diptych.cli.measure.bench", "BenchConfig"),
        "bench serve": Command(
            "measure a server of OpenAI's API under a load", "diptych.cli.measure.bench_serve", "BenchServeConfig"
        ),
        "bench batch": Command(
            "measure throughput offline, without a server", "diptych.cli.measure.bench_batch", "BenchBatchConfig"
        ),
        "bench step": Command(
            "measure what a step costs by batch and context", "diptych.cli.measure.bench_step", "BenchStepConfig"
        ),
        "replay": Command("ask a server again what a request log says", "diptych.cli.ask.replay", "ReplayConfig"),
        "eval": Command(
            "judge what a server serves by its log-probabilities", "diptych.cli.ask.evaluate", "EvalConfig"
        ),
        "build": Command("compile the C parts now, not at their first use", "diptych.cli.setup.build", "BuildConfig"),
        "version": Command("print the version", "diptych.cli.version", "VersionConfig"),
    }
)

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType({**FIRST, **OTHERS})


def main(argv: Sequence[str] | None = None) -> int:
    """Run `diptych` with `argv`, or with the process's own arguments; return the exit code."""
    lifecycle.die_with_supervisor()
    lifecycle.end_on_sigterm()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if (unreadable := next(filterfalse(_is_utf8, (name, *rest)), None)) is not None:
        print(f"diptych: {unreadable!r} is no UTF-8: convert it, as with `iconv -t utf-8`", file=sys.stderr)
        return 2
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "serve":
        name, rest = "up", _like_vllm(rest)
    if name == "apply":
        rest = _like_kubectl(rest)
    name, rest = named(name, rest)
    command = COMMANDS.get("version" if name == "--version" else name)
    if command is None:
        print(_unknown(name), file=sys.stderr)
        return 2
    return _run(name, command, rest)


def _is_utf8(argument: str) -> bool:
    """Whether it can be sent and written: Python keeps other bytes of an argument as halves of surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def named(name: str, rest: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a command, which may have a second word, and what is given to it."""
    if rest and f"{name} {rest[0]}" in COMMANDS:
        return f"{name} {rest[0]}", [*rest[1:]]
    return name, [*rest]


def usage() -> str:
    """Return what `diptych --help` prints."""
    return (
        "usage: diptych COMMAND [OPTIONS]\n\n"
        "Serve large language models with prefill and decode on separate workers.\n\n"
        f"to begin with, on this machine and without options:\n{_listing(FIRST)}\n\n"
        f"all others:\n{_listing(OTHERS)}\n\n"
        "`diptych COMMAND --help` lists its options. Each may also be given as an environment variable:\n"
        "DIPTYCH_HTTP_PORT=8080 is --http-port 8080."
    )


def _like_vllm(rest: Sequence[str]) -> list[str]:
    """Who writes `serve` may write the model behind it, as for other servers."""
    return ["--model", *rest] if rest and not rest[0].startswith("-") else list(rest)


def _like_kubectl(rest: Sequence[str]) -> list[str]:
    """Who writes `apply -f FILE` means FILE."""
    return list(rest[1:] if rest and rest[0] == "-f" else rest)


def _listing(commands: Mapping[str, Command]) -> str:
    return "\n".join(f"  {name:<14} {command.summary}" for name, command in commands.items())


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"diptych: {name} belongs behind a command, as in `diptych up {name} ...`; `diptych --help` lists them."
    import difflib  # seldom needed

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean `diptych {close[0]}`?" if close else "`diptych --help` lists the commands."
    return f"diptych: there is no command {name!r}; {hint}"


def _run(name: str, command: Command, argv: Sequence[str]) -> int:
    with garbage_postponed():
        module = importlib.import_module(command.module)
    config = parse(getattr(module, command.config), argv, prog=f"diptych {name}")
    try:
        return int(module.main(config))
    except DiptychError as error:
        print(f"diptych {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
