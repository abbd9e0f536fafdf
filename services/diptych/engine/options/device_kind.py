"""What `--device` names. `diptych up --help` reads it, which loads nothing heavy."""

from __future__ import annotations

from typing import Literal

DeviceKind = Literal["auto", "cpu", "cuda", "sim"]
