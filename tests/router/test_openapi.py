"""The OpenAPI document is what the router does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fuzzing
import pytest
from api_conformance import operations, statuses
from schemathesis import GenerationMode

from diptych.architectures.pooling import Pooling
from diptych.router.http.vectors.routes import VECTOR_APIS

Cluster = Any
NUM_EXAMPLES = fuzzing.NUM_EXAMPLES // 10


VECTORS = frozenset(VECTOR_APIS) - {"/classify"}  # of an embedding model
TWINS = ("/score", "/rerank", "/v2/rerank")  # of paths that are asked


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return start_shared_cluster(batch_store=str(tmp_path_factory.mktemp("batches")))


@pytest.fixture(scope="module")
def embedding_cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(decode=0, pooling=Pooling("embed", "last"))


def test_every_operation_answers_as_documented(cluster: Cluster, embedding_cluster: Cluster) -> None:
    never_good = []
    of_text = (each for each in operations(cluster.url) if each.path not in VECTORS)
    of_vectors = (each for each in operations(embedding_cluster.url) if each.path in VECTORS.difference(TWINS))
    for operation in (*of_text, *of_vectors):
        seen = statuses(operation, GenerationMode.POSITIVE, NUM_EXAMPLES, "tiny")
        if not {200, 202} & seen.keys():
            never_good.append(operation.path)
    never_good = [path for path in never_good if path != "/console/api/acts/unload-adapter"]  # chance
    assert never_good == [  # whose names nobody guesses
        "/classify",  # neither is a classifier
        "/v1/batches",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/models/{model_id}",
        "/console/api/requests/{request_id}",
        "/console/api/sign-in",
        "/console/api/acts/drain",
        "/console/api/acts/role",
        "/console/api/acts/log-level",
        "/admin/explain/{request_id}",
    ]


def test_what_the_document_forbids_is_refused(cluster: Cluster) -> None:
    seen: Counter[int] = Counter()
    for operation in operations(cluster.url):
        if operation.body and operation.path not in TWINS:
            seen += statuses(operation, GenerationMode.NEGATIVE, NUM_EXAMPLES, "tiny")
    assert (set(seen), seen.total() >= 40) == ({400}, True)
