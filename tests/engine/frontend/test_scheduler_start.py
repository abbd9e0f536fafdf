"""Which roles a worker is not started in, and does not change to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from tiny_config import tiny_config

from diptych.common.errors import ConfigError
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.scheduler_start import check_role

CONFIG = WorkerConfig(model="tiny")
SEES = tiny_config(tower=cast(Any, object()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 2}, "give --tp 1"),
        ({"dp": 2, "dp_attention": True}, "start an encode worker without --dp-attention"),
        ({"kv_pull": "off"}, "an encode worker needs --kv-pull on"),
    ],
)
def test_a_worker_that_cannot_encode_images_for_others_serves_all_other_roles(
    given: dict[str, Any], words: str
) -> None:
    config = replace(CONFIG, **given)
    for role in set(WORKER_ROLES.values()) - {Role.ENCODE}:
        check_role(SEES, config, role)
    with pytest.raises(ConfigError, match=words):
        check_role(SEES, config, Role.ENCODE)


def test_images_are_encoded_by_a_model_that_sees_them() -> None:
    check_role(SEES, CONFIG, Role.ENCODE)
    with pytest.raises(ConfigError, match="a model that sees images"):
        check_role(tiny_config(), CONFIG, Role.ENCODE)
