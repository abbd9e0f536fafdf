"""Opens stores of objects by `obstore`: S3, GCS, Azure or a directory. What it raises of its own becomes `OSError`.

Credentials, endpoints and regions are read from the environment, as the library documents.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from diptych.common.errors import ConfigError

LIBRARY: Final = "obstore"  # comes with an extra
NO_CERTIFICATES: Final = "No CA certificates"  # what it calls a "builder error", whatever it is to connect to


def library() -> Any:
    """Import the library. Raises `ImportError`."""
    return import_module(LIBRARY)


def open_objects(asked_by: str, url: str, options: Mapping[str, Any]) -> Any:
    """Return the library's store of a URL; nothing is asked of it yet. Raises `ConfigError` in the asker's words."""
    try:
        from_url = import_module(f"{LIBRARY}.store").from_url
    except ImportError:
        raise ConfigError(f"{asked_by} needs obstore: install diptych[store]") from None
    try:
        return from_url(url, **options)
    except Exception as error:  # of the library, which has its own
        raise ConfigError(f"{asked_by} can't be used: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if NO_CERTIFICATES in str(error):
        return "there are no CA certificates here; install them, or name a file of them by SSL_CERT_FILE"
    return first_line(error)


def over_network(connect_s: int, call_s: int, retry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a store behind a network: seconds until connecting and a whole call have failed."""
    may_be_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")  # as the library reads it
    bounds = {"connect_timeout": f"{connect_s}s", "timeout": f"{call_s}s", "allow_http": may_be_plain}
    return {"client_options": bounds, "retry_config": dict(retry)}


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise the library's errors as `OSError`, and `FileExistsError` for what exists; those of arguments are ours."""
    try:
        yield
    except OSError:
        raise
    except library().exceptions.AlreadyExistsError as error:
        raise FileExistsError(first_line(error)) from None
    except library().exceptions.BaseError as error:
        raise OSError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """Return what the library says first; stacks of its own follow."""
    return str(error).split("\n", 1)[0]
