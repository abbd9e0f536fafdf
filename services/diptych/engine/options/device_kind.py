"""What `--device` names."""

from __future__ import annotations

from typing import Literal

DeviceKind = Literal["auto", "cpu", "cuda", "sim"]
