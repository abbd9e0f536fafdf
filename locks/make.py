"""Writes the locks: of each package its version, and the hashes of all files of that release. `make lock`.

Versions are those of constraints.txt; what that does not name, such as CUDA's libraries, is as new as what asks for it
allows. Each file holds what those before it in its row do not, so that installing a row reads them all:

    sim, cpu, torch             the images; cuda: on top of these. Torch is apart, as it comes in several builds
    build, sim, cpu, serve      `make serve`; dev: on top of these, `make test`
    pip, compiler               what images are built with
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ROOT / "locks"
PIP: Final = "pip==25.3"
TORCH: Final = re.compile(r"(torch|triton|cuda-[\w-]+|nvidia-[\w-]+)==")  # torch, and what only its CUDA build needs
# As uv spells the environment that pyproject.toml names, on every line: said once is enough.
EVERYWHERE: Final = " ; python_full_version < '3.15' and implementation_name == 'cpython' and sys_platform == 'linux'"
HEAD: Final = "# Made by `make lock`. Hashes of every file of each release, whatever the platform.\n"


def main() -> None:
    uv = sys.argv[1:] or ["uv"]
    sim, cpu = locked(uv, "ucx", "otel"), locked(uv, "ucx", "cpu", "otel", "store", "valkey")
    cuda = locked(uv, "ucx", "gpu", "nixl", "otel", "store", "valkey")
    serve = locked(uv, "demo", "otel")
    dev, build = locked(uv, "dev"), locked(uv, requirements=[*build_requirements(), "editables"])
    torch = {each for each in cpu | cuda if TORCH.match(each)}
    write("pip", locked(uv, requirements=[PIP]))
    write("compiler", locked(uv, requirements=["ziglang"]))
    write("torch", torch)
    write("sim", sim)
    write("cpu", cpu - sim - torch)
    write("cuda", cuda - sim - cpu - torch)
    write("build", build)
    write("serve", serve - build - sim - cpu - torch)
    write("dev", dev - build - sim - cpu - serve - {each for each in torch if not each.startswith("triton==")})


def locked(uv: list[str], *extras: str, requirements: list[str] | None = None) -> set[str]:
    """Return the lines of each package that the project with some extras needs, or that `requirements` need."""
    source = ["pyproject.toml", *(f"--extra={extra}" for extra in extras)] if requirements is None else ["-"]
    options = ["--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
    command = [*uv, "pip", "compile", *source, "-c", "constraints.txt", *options]
    given = "\n".join(requirements or ())
    printed = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = printed.replace(f"{EVERYWHERE} and ", " ; ").replace(EVERYWHERE, "")
    return set(re.findall(r"^\S.*(?:\n[ ].*)*", lines, re.MULTILINE))


def build_requirements() -> list[str]:
    requires: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return requires


def write(name: str, entries: set[str]) -> None:
    (LOCKS / f"{name}.lock").write_text(HEAD + "\n".join(sorted(entries)) + "\n")


if __name__ == "__main__":
    main()
