from diptych.v1 import bootstrap_pb2 as _bootstrap_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadLoraRequest(_message.Message):
    __slots__ = ("instance_id", "name", "path")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    name: str
    path: str
    def __init__(self, instance_id: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("adapter", "was_loaded")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WAS_LOADED_FIELD_NUMBER: _ClassVar[int]
    adapter: _bootstrap_pb2.LoraAdapter
    was_loaded: bool
    def __init__(self, adapter: _Optional[_Union[_bootstrap_pb2.LoraAdapter, _Mapping]] = ..., was_loaded: _Optional[bool] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("instance_id", "name")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    name: str
    def __init__(self, instance_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    def __init__(self, instance_id: _Optional[int] = ...) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_bootstrap_pb2.LoraAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_bootstrap_pb2.LoraAdapter, _Mapping]]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("instance_id", "model", "drain_ms", "in_place", "files", "version", "more_comes", "group", "tensors")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MORE_COMES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    model: str
    drain_ms: int
    in_place: bool
    files: _containers.RepeatedScalarFieldContainer[str]
    version: str
    more_comes: bool
    group: str
    tensors: _containers.RepeatedCompositeFieldContainer[AnnouncedTensor]
    def __init__(self, instance_id: _Optional[int] = ..., model: _Optional[str] = ..., drain_ms: _Optional[int] = ..., in_place: _Optional[bool] = ..., files: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., more_comes: _Optional[bool] = ..., group: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[AnnouncedTensor, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("instance_id", "deadline_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    deadline_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("instance_id", "role", "drain_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    role: _bootstrap_pb2.Role
    drain_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., role: _Optional[_Union[_bootstrap_pb2.Role, str]] = ..., drain_ms: _Optional[int] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("previous_role", "not_ready")
    PREVIOUS_ROLE_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    previous_role: _bootstrap_pb2.Role
    not_ready: str
    def __init__(self, previous_role: _Optional[_Union[_bootstrap_pb2.Role, str]] = ..., not_ready: _Optional[str] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("instance_id", "level")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    level: str
    def __init__(self, instance_id: _Optional[int] = ..., level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous_level",)
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: str
    def __init__(self, previous_level: _Optional[str] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    def __init__(self, instance_id: _Optional[int] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("instance_id", "skip_steps", "num_steps", "max_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SKIP_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    skip_steps: int
    num_steps: int
    max_s: float
    def __init__(self, instance_id: _Optional[int] = ..., skip_steps: _Optional[int] = ..., num_steps: _Optional[int] = ..., max_s: _Optional[float] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("instance_id", "wait_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    wait_s: float
    def __init__(self, instance_id: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path", "bytes", "num_steps", "duration_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    num_steps: int
    duration_s: float
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., num_steps: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("model_id", "previous_model_id", "previous_model", "version", "lacking")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    previous_model_id: str
    previous_model: str
    version: str
    lacking: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., previous_model_id: _Optional[str] = ..., previous_model: _Optional[str] = ..., version: _Optional[str] = ..., lacking: _Optional[_Iterable[str]] = ...) -> None: ...

class AdminCommand(_message.Message):
    __slots__ = ("query", "load_lora", "unload_lora", "prepare_weights", "switch_weights", "drop_weights", "check_weights", "close_weights", "replace_weights", "open_weights", "join_group", "leave_group", "release_weights", "flush_cache", "start_profile", "stop_profile")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    LOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    PREPARE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    query: int
    load_lora: LoadLoraRequest
    unload_lora: UnloadLoraRequest
    prepare_weights: PrepareWeights
    switch_weights: SwitchWeights
    drop_weights: DropWeights
    check_weights: WeightsChange
    close_weights: CloseWeights
    replace_weights: WeightsChange
    open_weights: OpenWeights
    join_group: JoinGroup
    leave_group: str
    release_weights: ReleaseWeights
    flush_cache: FlushCacheRequest
    start_profile: StartProfileRequest
    stop_profile: StopProfileRequest
    def __init__(self, query: _Optional[int] = ..., load_lora: _Optional[_Union[LoadLoraRequest, _Mapping]] = ..., unload_lora: _Optional[_Union[UnloadLoraRequest, _Mapping]] = ..., prepare_weights: _Optional[_Union[PrepareWeights, _Mapping]] = ..., switch_weights: _Optional[_Union[SwitchWeights, _Mapping]] = ..., drop_weights: _Optional[_Union[DropWeights, _Mapping]] = ..., check_weights: _Optional[_Union[WeightsChange, _Mapping]] = ..., close_weights: _Optional[_Union[CloseWeights, _Mapping]] = ..., replace_weights: _Optional[_Union[WeightsChange, _Mapping]] = ..., open_weights: _Optional[_Union[OpenWeights, _Mapping]] = ..., join_group: _Optional[_Union[JoinGroup, _Mapping]] = ..., leave_group: _Optional[str] = ..., release_weights: _Optional[_Union[ReleaseWeights, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCacheRequest, _Mapping]] = ..., start_profile: _Optional[_Union[StartProfileRequest, _Mapping]] = ..., stop_profile: _Optional[_Union[StopProfileRequest, _Mapping]] = ...) -> None: ...

class AdminAnswer(_message.Message):
    __slots__ = ("query", "grpc_status", "message", "load_lora", "unload_lora", "switch_weights", "flush_cache", "start_profile", "stop_profile")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    GRPC_STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    SWITCH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    query: int
    grpc_status: str
    message: str
    load_lora: LoadLoraResponse
    unload_lora: UnloadLoraResponse
    switch_weights: SwitchWeightsResult
    flush_cache: FlushCacheResponse
    start_profile: StartProfileResponse
    stop_profile: StopProfileResponse
    def __init__(self, query: _Optional[int] = ..., grpc_status: _Optional[str] = ..., message: _Optional[str] = ..., load_lora: _Optional[_Union[LoadLoraResponse, _Mapping]] = ..., unload_lora: _Optional[_Union[UnloadLoraResponse, _Mapping]] = ..., switch_weights: _Optional[_Union[SwitchWeightsResult, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCacheResponse, _Mapping]] = ..., start_profile: _Optional[_Union[StartProfileResponse, _Mapping]] = ..., stop_profile: _Optional[_Union[StopProfileResponse, _Mapping]] = ...) -> None: ...

class PrepareWeights(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SwitchWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsChange(_message.Message):
    __slots__ = ("model", "files", "version", "more_comes", "group", "tensors")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MORE_COMES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    model: str
    files: _containers.RepeatedScalarFieldContainer[str]
    version: str
    more_comes: bool
    group: str
    tensors: _containers.RepeatedCompositeFieldContainer[AnnouncedTensor]
    def __init__(self, model: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., more_comes: _Optional[bool] = ..., group: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[AnnouncedTensor, _Mapping]]] = ...) -> None: ...

class AnnouncedTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinGroup(_message.Message):
    __slots__ = ("name", "host", "port", "first_rank", "world_size", "backend")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    name: str
    host: str
    port: int
    first_rank: int
    world_size: int
    backend: str
    def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., first_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class CloseWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchWeightsResult(_message.Message):
    __slots__ = ("model_id", "previous_model_id", "previous_model", "terms", "version", "lacking")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    previous_model_id: str
    previous_model: str
    terms: _bootstrap_pb2.Terms
    version: str
    lacking: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., previous_model_id: _Optional[str] = ..., previous_model: _Optional[str] = ..., terms: _Optional[_Union[_bootstrap_pb2.Terms, _Mapping]] = ..., version: _Optional[str] = ..., lacking: _Optional[_Iterable[str]] = ...) -> None: ...
