"""The last steps of a build stage: installs Diptych, compiles the C parts, lists the packages, removes what is not run.

python images/finish.py EXTRAS: what Diptych needs with these extras must be there already, by hash; nothing is fetched.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path("/opt/diptych")
BACKEND: Final = "/opt/backend"  # what builds our wheel
LIBC: Final = "linux-gnu.2.28"  # the oldest that the wheels beside ours run on
# The UCX wheel has static libraries, programs, and each shared library by three names; modules are opened as *.so.0.
NOT_RUN: Final = ("bin", "include", "share", "lib/cmake", "lib/pkgconfig", "lib/**/libucx_perftest*")
NOT_OPENED: Final = ("lib/**/*.a", "lib/**/*.la", "lib/**/*.so", "lib/**/*.so.*.*")


def main() -> None:
    install(sys.argv[1])
    packages = Path(sysconfig.get_path("purelib"))
    compiler = f"{sys.executable} -m ziglang cc -target {platform.machine()}-{LIBC}"
    subprocess.run([sys.executable, "-m", "diptych.cli", "build"], check=True, env={**os.environ, "CC": compiler})
    with (ROOT / "sbom.cdx.json").open("w") as out:
        subprocess.run([sys.executable, Path(__file__).with_name("sbom.py"), packages], check=True, stdout=out)
    prune(packages / "libucx")


def install(extras: str) -> None:
    """Install Diptych. Fails where a lock lacks something that an extra asks for."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index"]
    tools = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{BACKEND}"}
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "."], check=True, env=tools)
    subprocess.run([*pip, "--no-build-isolation", f"diptych[{extras}]"], check=True)


def prune(ucx: Path) -> None:
    """Take away what is never opened."""
    for pattern in (*NOT_RUN, *NOT_OPENED):
        for path in sorted(ucx.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
