"""What a worker's processes are started with: the same on every node of a group."""

from __future__ import annotations

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.roles import Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.options.node_place import NodePlace
from diptych.engine.options.pool_size import check_pool, likely_device
from diptych.engine.options.served_model import as_served
from diptych.engine.options.shared_experts import SharedExperts
from diptych.v1 import bootstrap_pb2


def open_served(config: WorkerConfig, role: Role) -> ModelSource:
    """Open the model, and see before any other process starts that it can be served."""
    source = open_model(config.model, config.load_format)
    options = config.engine_options
    check_pool(as_served(source, options).config, options, role, likely_device(config.device))
    return source


def scheduler_config(
    config: WorkerConfig,
    role: Role,
    instance: bootstrap_pb2.Instance,
    place: NodePlace | None = None,
    sharing: SharedExperts | None = None,
) -> SchedulerConfig:
    return SchedulerConfig(
        component=role.value,
        log_format=config.log_format,
        log_level=config.log_level,
        instance_id=instance.instance_id,
        transports=config.transports,
        kv_backend=config.kv_backend,
        kv_path=config.kv_path,
        kv_require=config.kv_require,
        weights_from=config.weights_from,
        transfer=config.transfer_rules,
        engine=config.engine_options.of_group(instance.dp_rank),
        role=role.value,
        host=config.host,
        place=place,
        sharing=sharing,
    )
