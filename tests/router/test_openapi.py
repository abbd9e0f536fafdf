"""The OpenAPI document is what the router does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fuzzing
import pytest
from api_conformance import operations, statuses
from schemathesis import GenerationMode

Cluster = Any
NUM_EXAMPLES = fuzzing.NUM_EXAMPLES // 5


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


def test_every_operation_answers_as_documented(cluster: Cluster) -> None:
    never_good = []
    for operation in operations(cluster.url):
        seen = statuses(operation, GenerationMode.POSITIVE, NUM_EXAMPLES, "tiny")
        if not {200, 202} & seen.keys():
            never_good.append(operation.path)
    never_good = [path for path in never_good if path != "/console/api/acts/unload-adapter"]  # chance
    assert never_good == [  # whose names nobody guesses
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
        if operation.body:
            seen += statuses(operation, GenerationMode.NEGATIVE, NUM_EXAMPLES, "tiny")
    assert (set(seen), seen.total() >= 40) == ({400}, True)
