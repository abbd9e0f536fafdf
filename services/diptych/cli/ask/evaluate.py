"""Judge what a server serves by its log-probabilities: `diptych eval tasks.jsonl --url http://host:8000`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diptych.cli.load.client import Server, ServerError, fetch
from diptych.cli.load.sending import served_model
from diptych.cli.load.tasks import Piece, Score, Task, difference, judged, score_of, tasks_of, words
from diptych.cli.measure.bench_serve import DEFAULT_URL, write
from diptych.cli.platform.local_platforms import PLATFORM_HELP, local_platform
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError

PATH: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Judge a model as it is served: perplexity of texts, and answers to multiple-choice questions.

    Log-probabilities come from /v1/completions with `echo`, as Diptych and vLLM have it. With --against two servers are
    compared on the same tasks: what a quantisation, another engine or other hardware changes is seen before users do.
    """

    tasks: Path = argument(
        REQUIRED, help='JSON lines: {"text": ...}, or {"question": ..., "choices": [...], "answer": 0}'
    )
    url: str = option("", help=f"address of the server; none: the platform here, else {DEFAULT_URL}")
    platform: str = option("", help=PLATFORM_HELP)
    against: str = option("", help="address of another server, to compare with")
    api_key: str = option("", help="key, where the servers want one; better by the variable")
    model: str = option("", help="model; none: the first that each server names")
    concurrency: int = option(8, help="texts that are scored at once")
    tolerance: float = option(
        0.0, help="with --against: fail when log-probabilities differ by more, by token of a text; 0: never"
    )
    json: Path | None = option(None, help="write all scores to this file, for programs")

    def validate(self) -> None:
        if self.concurrency < 1 or self.tolerance < 0:
            raise ConfigError("--concurrency must be at least 1, and --tolerance not negative")
        if self.tolerance and not self.against:
            raise ConfigError("--tolerance is of two servers: give the other one with --against")


def main(config: EvalConfig) -> int:
    """Judge; return 0 unless two servers differ by more than they may."""
    tasks = _tasks(config.tasks)
    found = {url: asyncio.run(_scores(config, url, tasks)) for url in _urls(config)}
    for url, scores in found.items():
        print(f"{url}\n{words(judged(tasks, scores))}")
    report: dict[str, Any] = {
        url: {**judged(tasks, scores)._asdict(), "scores": scores} for url, scores in found.items()
    }
    code = 0
    if config.against:
        apart = difference(*found.values())
        print(
            f"log-probabilities differ by {apart.mean:.6f} a token in the mean, {apart.largest:.6f} at most; "
            f"{apart.changed_answers} answers changed"
        )
        report["difference"] = apart._asdict()
        code = int(bool(config.tolerance) and apart.largest > config.tolerance)
    if config.json is not None:
        write(config.json, json.dumps(_known(report), indent=2, allow_nan=False) + "\n")
    return code


async def _scores(config: EvalConfig, url: str, tasks: Sequence[Task]) -> list[list[Score]]:
    """Return a score for each piece of each task. Raises `ServerError`, `ConfigError`."""
    server = Server(url, config.api_key)
    model = config.model or (await served_model(server))[0]
    places = asyncio.Semaphore(config.concurrency)

    async def score(piece: Piece, number: int) -> Score:
        body = {"model": model, "prompt": piece.context + piece.text, "max_tokens": 1, "temperature": 0}
        async with places:
            try:
                return score_of(await fetch(server, "POST", PATH, {**body, "echo": True, "logprobs": 1}), piece)
            except (ServerError, ConfigError) as error:
                raise type(error)(f"{url}, task {number}: {error}") from None

    wanted = [score(piece, number) for number, task in enumerate(tasks, 1) for piece in task.pieces]
    found = iter(await asyncio.gather(*wanted))
    return [[next(found) for _ in task.pieces] for task in tasks]


def _known(found: Any) -> Any:
    """Return it for programs: what is no number, or infinite, is null."""
    if isinstance(found, dict):
        return {name: _known(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [_known(each) for each in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _urls(config: EvalConfig) -> Sequence[str]:
    platform = None if config.url else local_platform(config.platform)
    first = config.url or (f"http://{platform.http}" if platform else DEFAULT_URL)
    if config.against == first:
        raise ConfigError("--url and --against are the same server")
    return [first, config.against] if config.against else [first]


def _tasks(path: Path) -> Sequence[Task]:
    try:
        return tasks_of(path.expanduser().read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
