"""`python -m diptych.cli` is `diptych`."""

from __future__ import annotations

from diptych.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
