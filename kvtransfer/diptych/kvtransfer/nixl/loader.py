"""Finds and loads NIXL's Python API."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.nixl.options import environment

PATH_VARIABLE: Final = "DIPTYCH_NIXL_PATH"  # a folder that packages were installed into, beside those of Python
PACKAGES: Final = {"nixl_cu13": "nixl-cu13", "nixl_cu12": "nixl-cu12", "nixl": "nixl"}  # module: distribution


def load(transports: Transports) -> tuple[Any, str]:
    """Return NIXL's API and its version. Raises `ConfigError` that says how to get it.

    Once a process, and not beside another UCX: NIXL brings its own.
    """
    os.environ.update(environment(transports, os.environ))
    folder = os.environ.get(PATH_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    tried = []
    for module, distribution in PACKAGES.items():
        try:
            api = importlib.import_module(f"{module}._api")
            return api, f"NIXL {metadata.version(distribution)}"
        except (ImportError, metadata.PackageNotFoundError) as error:
            tried.append(f"{module}: {error}")
    raise ConfigError(f"no usable NIXL ({'; '.join(tried)}): `pip install --no-deps nixl-cu13`, or --kv-backend ucx")
