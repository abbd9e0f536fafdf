"""A change of weights as a worker is asked for it, and the group of a trainer who sends them: to and from protobuf."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from diptych.engine.tensor_parallel.trainer_groups import Announced, GroupAddress
from diptych.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be served: all weights of a model, or tensors that are given for the one that is served."""

    model: str = ""  # as for --model
    files: tuple[str, ...] = ()  # safetensors, on this machine
    version: str = ""  # what the caller calls the result; empty: by its content
    is_last: bool = True  # nothing more comes that belongs to these tensors
    group: str = ""  # in which a trainer broadcasts
    tensors: tuple[Announced, ...] = ()  # in this order


def change_from_wire(wire: admin_pb2.WeightsChange) -> Change:
    tensors = tuple(Announced(each.name, each.dtype, tuple(each.shape)) for each in wire.tensors)
    return Change(wire.model, tuple(wire.files), wire.version, not wire.more_comes, wire.group, tensors)


def group_from_wire(wire: admin_pb2.JoinGroup) -> GroupAddress:
    return GroupAddress(wire.name, wire.host, wire.port, wire.first_rank, wire.world_size, wire.backend)


def group_to_wire(address: GroupAddress) -> admin_pb2.JoinGroup:
    return admin_pb2.JoinGroup(**asdict(address))


def change_to_wire(change: Change) -> admin_pb2.WeightsChange:
    return admin_pb2.WeightsChange(
        model=change.model,
        files=change.files,
        version=change.version,
        more_comes=not change.is_last,
        group=change.group,
        tensors=[
            admin_pb2.AnnouncedTensor(name=each.name, dtype=each.dtype, shape=each.shape) for each in change.tensors
        ],
    )
