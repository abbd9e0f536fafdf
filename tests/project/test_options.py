"""Options and variables that do something: each is read by a component, and what pages and chart name exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from option_reads import unread_options

from diptych.cli.main import COMMANDS
from diptych.common.config import described, env_name, flag_name

ROOT = Path(__file__).parents[2]
MODULES = [path.read_text() for path in sorted((ROOT / "services").rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "decisions"]  # which tell of what was, too
CHART = [path for path in sorted((ROOT / "helm" / "diptych").rglob("*")) if path.suffix in (".yaml", ".tpl", ".json")]

OF_OTHER_PROGRAMS = frozenset(
    {"--build-arg", "--from-file", "--help", "--no-hooks", "--require-hashes", "--wait", "--tls-"}
    | {"--logs", "--mooncake", "--nixl", "--quick"}  # benchmarks
)
GIVEN_TO_OTHERS = frozenset({"DIPTYCH_COMPONENT"})  # by the chart, to what brings a model


PLANTED = """
@dataclass(frozen=True, slots=True)
class PlantedConfig(LogConfig):
    used: int = option(1, help="read in another module")
    derived: int = option(1, help="read by a property that is read")
    forgotten: int = option(1, help="read by nobody")
    checked: int = option(1, help="only validated")
    hidden: int = option(1, help="read by a property that nobody reads")

    def validate(self) -> None:
        if self.checked < 0 or self.derived < 0:
            raise ConfigError("no")
        for name in ("forgotten", "used"):
            getattr(self, name)

    @property
    def twice(self) -> int:
        return self.inner()

    def inner(self) -> int:
        return 2 * self.derived

    @property
    def unused(self) -> int:
        return self.hidden
"""
READER = """
def run(config: PlantedConfig, other: Thing) -> int:
    config.forgotten = 5
    return config.used + config.twice + other.checked + Unknown.hidden
"""


MISSED = ("mixed_step_ms", "request_timeout_s", "explained_requests", "max_waiting")  # one of each kind of reader


def test_every_option_is_read_and_planted_ones_that_are_not_or_by_something_else_are_all_that_is_found() -> None:
    modules = [re.sub(rf"\.({'|'.join(MISSED)})\b", ".nothing", text) for text in MODULES]
    found = unread_options([*modules, PLANTED, READER])
    assert {name for kind, name in found if kind == "PlantedConfig"} == {"forgotten", "checked", "hidden"}
    assert {name for kind, name in found if kind != "PlantedConfig"} == set(MISSED), "or one that no component reads"


def _options() -> set[str]:
    configs = [getattr(importlib.import_module(command.module), command.config) for command in COMMANDS.values()]
    return {name for config in configs for name, _, _ in described(config)}


def _unknown(pages: Iterable[Path], pattern: str, known: Iterable[str]) -> dict[str, set[str]]:
    found = {str(page.relative_to(ROOT)): set(re.findall(pattern, page.read_text())) - set(known) for page in pages}
    return {page: names for page, names in found.items() if names}


def test_every_flag_that_pages_tell_of_exists() -> None:
    flags = {flag_name(f"{prefix}{name}") for name in _options() for prefix in ("", "no_")}
    assert _unknown(PAGES, r"`(--[a-z0-9-]+)", flags | OF_OTHER_PROGRAMS) == {}


def test_every_variable_that_pages_and_chart_tell_of_is_read() -> None:
    code = [path.read_text() for part in ("services", "kvtransfer", "tests") for path in (ROOT / part).rglob("*.py")]
    read = {name for text in code for name in re.findall(r'"(DIPTYCH_[A-Z0-9_]+)"', text)}
    known = {env_name(name) for name in _options()} | read | GIVEN_TO_OTHERS
    assert _unknown([*PAGES, *CHART], r"DIPTYCH_[A-Z0-9_]*[A-Z0-9]", known) == {}
