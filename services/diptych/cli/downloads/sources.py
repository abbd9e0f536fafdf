"""What the source of a download is called. Pure.

org/name, hf://org/name, either with @revision    a repository of a hub of Hugging Face's kind
s3://, gs://, az://                               a folder of a bucket
https://, http://                                 a folder with a SHA256SUMS, or one .gguf file
file://                                           a folder
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from diptych.common.errors import ConfigError

Kind = Literal["hub", "store", "web", "folder"]

KINDS: Final[dict[str, Kind]] = {
    "hf": "hub",
    "s3": "store",
    "gs": "store",
    "az": "store",
    "https": "web",
    "http": "web",
    "file": "folder",
}
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KNOWN: Final = "ORG/NAME of a hub, hf://, s3://, gs://, az://, https://, http:// or file://"


@dataclass(frozen=True, slots=True)
class Source:
    """Where files come from. `str(source)` is its one spelling, by which a folder knows what it holds."""

    kind: Kind
    place: str  # ORG/NAME, a URL without a slash at its end, or a path
    revision: str = ""  # of a hub: a branch, tag or commit

    def __str__(self) -> str:
        if self.kind == "hub":
            return f"hf://{self.place}@{self.revision}"
        return f"file://{self.place}" if self.kind == "folder" else self.place


def parse_source(text: str, revision: str = "") -> Source:
    """Read SOURCE and --revision. Raises `ConfigError` that says what would be one."""
    scheme, has_scheme, rest = text.partition("://")
    kind = KINDS.get(scheme) if has_scheme else "hub"
    if kind is None:
        raise ConfigError(f"no source {text!r}: give {KNOWN}")
    if kind == "hub":
        return _of_hub(rest if has_scheme else text, revision)
    if revision:
        raise ConfigError(f"--revision {revision} is of hubs: {text} has none")
    if kind == "folder":
        return Source(kind, unquote(urlsplit(text).path).rstrip("/"))
    _check_url(text)
    return Source(kind, text.rstrip("/"))


def _of_hub(text: str, revision: str) -> Source:
    name, _, in_name = text.partition("@")
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"no source {text!r}: give {KNOWN}")
    if in_name and revision not in ("", in_name):
        raise ConfigError(f"the source names revision {in_name} and --revision {revision}: give one of them")
    return Source("hub", name, in_name or revision or "main")


def _check_url(url: str) -> None:
    """Refuse what would be told by every log: secrets."""
    parts = urlsplit(url)
    if not parts.netloc:
        raise ConfigError(f"no source {url!r}: it names no host or bucket")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("a source holds no credentials and no query: give them by the environment, as a secret")
