"""What a worker's processes are started with: the same on every node of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.options.pool_size import check_pool, likely_device
from diptych.engine.options.served_model import as_served

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.engine.frontend.config import WorkerConfig
    from diptych.engine.options.node_place import NodePlace
    from diptych.engine.options.shared_experts import SharedExperts
    from diptych.v1 import bootstrap_pb2


def open_served(config: WorkerConfig, role: Role) -> ModelSource:
    """Open the model, and see before any other process starts that it can be served."""
    source = open_model(config.model, config.load_format)
    options = config.engine_options
    model = as_served(source, options).config
    check_pool(model, options, role, likely_device(config.device))
    check_role(model, config, role)
    return source


def check_role(model: ModelConfig, config: WorkerConfig, role: Role) -> None:
    """Raise `ConfigError` where a worker of this model can't serve a role."""
    if role is Role.ENCODE:
        check_encodes(model, config.engine_options, pulls=config.transfer_rules.pulls)


def check_encodes(model: ModelConfig, options: EngineOptions, *, pulls: bool) -> None:
    """Raise `ConfigError` where a worker can't encode images for others."""
    if model.tower is None:
        raise ConfigError(f"an encode worker needs a model that sees images: {model.model_id} sees none")
    if options.num_ranks > 1:
        words = "because each rank has a part of every page"
        raise ConfigError(f"an encode worker has one rank, {words}: give --tp 1 and --pp 1")
    if options.dp_attention:
        words = "schedulers that share experts step together, and a step that encodes images has nothing for experts"
        raise ConfigError(f"{words}: start an encode worker without --dp-attention")
    if not pulls:
        raise ConfigError("rows of images are pulled as cached prefixes are: an encode worker needs --kv-pull on")


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
