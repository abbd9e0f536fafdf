"""The version of the installed product, as it is written once, in `pyproject.toml`."""

from __future__ import annotations


def own_version() -> str:
    """Return it; the first call imports what reads packages, which takes as long as a dozen modules of ours."""
    from importlib.metadata import version

    return version("diptych")
