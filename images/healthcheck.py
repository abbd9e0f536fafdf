"""Exits with 0 when the component of this container is alive."""

import os
import urllib.request

PORT = os.environ.get("DIPTYCH_HEALTH_PORT", "8081")

with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/live", timeout=4):
    pass
