"""The paths of the APIs that want no text; `routes` serves them."""

from __future__ import annotations

from typing import Final

EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = ("/v1/rerank", "/v2/rerank", "/rerank")
VECTOR_PATHS: Final = (EMBEDDINGS, "/pooling", "/classify", "/v1/score", "/score", *RERANK)
