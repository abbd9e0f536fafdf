from __future__ import annotations

from collections.abc import Iterator

import pytest
from files_server import COMMIT, MODEL, FilesServer, sums
from http_serving import serving


@pytest.fixture
def server() -> Iterator[FilesServer]:
    with serving(FilesServer()) as server:
        yield server


@pytest.fixture
def hub(server: FilesServer, monkeypatch: pytest.MonkeyPatch) -> FilesServer:
    """Has the model acme/tiny, beside files that no worker reads."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    others = {"pytorch_model.bin": b"again", "README.md": b"# Tiny", "onnx/model.onnx": b"again"}
    server.files |= {f"/acme/tiny/resolve/{COMMIT}/{name}": data for name, data in {**MODEL, **others}.items()}
    return server


@pytest.fixture
def web(server: FilesServer) -> FilesServer:
    """Has the model in /tiny, with its SHA256SUMS."""
    server.files |= {f"/tiny/{name}": data for name, data in MODEL.items()}
    server.files["/tiny/SHA256SUMS"] = sums(MODEL)
    return server
