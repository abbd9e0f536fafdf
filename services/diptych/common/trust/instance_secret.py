"""Lets an instance prove that it speaks for itself: its id is the beginning of the SHA-256 of a secret of its own.

Every replica of bootstrap can check this without having heard of the instance before, and no other process learns the
secret.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

METADATA_KEY: Final = "diptych-instance-secret-bin"  # metadata of a call to bootstrap, once for each instance
_NBYTES: Final = 32


@dataclass(frozen=True, slots=True)
class InstanceSecret:
    """New at every start."""

    value: bytes = field(repr=False)

    @classmethod
    def new(cls) -> InstanceSecret:
        return cls(secrets.token_bytes(_NBYTES))

    @property
    def instance_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self.value).digest()[:8], "big") or 1


def shown(instances: Iterable[InstanceSecret]) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that shows secrets."""
    return tuple((METADATA_KEY, each.value) for each in instances)


def proven(metadata: Iterable[tuple[str, str | bytes]]) -> frozenset[int]:
    """Return the ids of the instances whose secrets a call's metadata shows."""
    return frozenset(
        InstanceSecret(value).instance_id for key, value in metadata if key == METADATA_KEY and isinstance(value, bytes)
    )
