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
    __slots__ = ("instance_id", "model", "drain_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    model: str
    drain_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., model: _Optional[str] = ..., drain_ms: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("model_id", "previous_model_id", "previous_model")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    previous_model_id: str
    previous_model: str
    def __init__(self, model_id: _Optional[str] = ..., previous_model_id: _Optional[str] = ..., previous_model: _Optional[str] = ...) -> None: ...

class AdminCommand(_message.Message):
    __slots__ = ("query", "load_lora", "unload_lora", "prepare_weights", "switch_weights", "drop_weights", "flush_cache", "start_profile", "stop_profile")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    LOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_LORA_FIELD_NUMBER: _ClassVar[int]
    PREPARE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    query: int
    load_lora: LoadLoraRequest
    unload_lora: UnloadLoraRequest
    prepare_weights: PrepareWeights
    switch_weights: SwitchWeights
    drop_weights: DropWeights
    flush_cache: FlushCacheRequest
    start_profile: StartProfileRequest
    stop_profile: StopProfileRequest
    def __init__(self, query: _Optional[int] = ..., load_lora: _Optional[_Union[LoadLoraRequest, _Mapping]] = ..., unload_lora: _Optional[_Union[UnloadLoraRequest, _Mapping]] = ..., prepare_weights: _Optional[_Union[PrepareWeights, _Mapping]] = ..., switch_weights: _Optional[_Union[SwitchWeights, _Mapping]] = ..., drop_weights: _Optional[_Union[DropWeights, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCacheRequest, _Mapping]] = ..., start_profile: _Optional[_Union[StartProfileRequest, _Mapping]] = ..., stop_profile: _Optional[_Union[StopProfileRequest, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class SwitchWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchWeightsResult(_message.Message):
    __slots__ = ("model_id", "previous_model_id", "previous_model", "terms")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    previous_model_id: str
    previous_model: str
    terms: _bootstrap_pb2.Terms
    def __init__(self, model_id: _Optional[str] = ..., previous_model_id: _Optional[str] = ..., previous_model: _Optional[str] = ..., terms: _Optional[_Union[_bootstrap_pb2.Terms, _Mapping]] = ...) -> None: ...
