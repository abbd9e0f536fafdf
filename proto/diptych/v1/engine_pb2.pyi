from diptych.v1 import admin_pb2 as _admin_pb2
from diptych.v1 import bootstrap_pb2 as _bootstrap_pb2
from diptych.v1 import rank_pb2 as _rank_pb2
from diptych.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SchedulerCommands(_message.Message):
    __slots__ = ("start", "abort", "peers", "shutdown", "status_query", "admin", "ping", "hand_back", "role", "watch_s", "log_level", "watcher_came", "tool_called", "give_cache", "weight_givers")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    STATUS_QUERY_FIELD_NUMBER: _ClassVar[int]
    ADMIN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    HAND_BACK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WATCH_S_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    WATCHER_CAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLED_FIELD_NUMBER: _ClassVar[int]
    GIVE_CACHE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_GIVERS_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StartLeg]
    abort: _containers.RepeatedScalarFieldContainer[int]
    peers: PeerView
    shutdown: bool
    status_query: int
    admin: _containers.RepeatedCompositeFieldContainer[_admin_pb2.AdminCommand]
    ping: int
    hand_back: _containers.RepeatedScalarFieldContainer[int]
    role: _bootstrap_pb2.Role
    watch_s: float
    log_level: str
    watcher_came: bool
    tool_called: _containers.RepeatedCompositeFieldContainer[_worker_pb2.ToolCalled]
    give_cache: GiveCache
    weight_givers: WeightGivers
    def __init__(self, start: _Optional[_Iterable[_Union[_worker_pb2.StartLeg, _Mapping]]] = ..., abort: _Optional[_Iterable[int]] = ..., peers: _Optional[_Union[PeerView, _Mapping]] = ..., shutdown: _Optional[bool] = ..., status_query: _Optional[int] = ..., admin: _Optional[_Iterable[_Union[_admin_pb2.AdminCommand, _Mapping]]] = ..., ping: _Optional[int] = ..., hand_back: _Optional[_Iterable[int]] = ..., role: _Optional[_Union[_bootstrap_pb2.Role, str]] = ..., watch_s: _Optional[float] = ..., log_level: _Optional[str] = ..., watcher_came: _Optional[bool] = ..., tool_called: _Optional[_Iterable[_Union[_worker_pb2.ToolCalled, _Mapping]]] = ..., give_cache: _Optional[_Union[GiveCache, _Mapping]] = ..., weight_givers: _Optional[_Union[WeightGivers, _Mapping]] = ...) -> None: ...

class WeightGivers(_message.Message):
    __slots__ = ("givers",)
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    givers: _containers.RepeatedCompositeFieldContainer[WeightGiver]
    def __init__(self, givers: _Optional[_Iterable[_Union[WeightGiver, _Mapping]]] = ...) -> None: ...

class WeightGiver(_message.Message):
    __slots__ = ("host", "door")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    host: str
    door: _bootstrap_pb2.WeightsDoor
    def __init__(self, host: _Optional[str] = ..., door: _Optional[_Union[_bootstrap_pb2.WeightsDoor, _Mapping]] = ...) -> None: ...

class GiveCache(_message.Message):
    __slots__ = ("within_s",)
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    def __init__(self, within_s: _Optional[float] = ...) -> None: ...

class PeerView(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[_bootstrap_pb2.Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[_bootstrap_pb2.Instance, _Mapping]]] = ...) -> None: ...

class SchedulerEvents(_message.Message):
    __slots__ = ("outputs", "load", "kv_events", "ready", "status", "status_answers", "fatal", "admin_answers", "loras", "link_news", "pong", "context_len", "news", "tokens", "rank_doors")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATUS_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    LINK_NEWS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_DOORS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.LegOutput]
    load: _bootstrap_pb2.WorkerLoad
    kv_events: _worker_pb2.KvEvents
    ready: SchedulerReady
    status: _worker_pb2.WorkerStatus
    status_answers: _containers.RepeatedScalarFieldContainer[int]
    fatal: str
    admin_answers: _containers.RepeatedCompositeFieldContainer[_admin_pb2.AdminAnswer]
    loras: LoraSet
    link_news: LinkNews
    pong: int
    context_len: int
    news: _worker_pb2.WorkerNews
    tokens: NextTokens
    rank_doors: _rank_pb2.RankDoors
    def __init__(self, outputs: _Optional[_Iterable[_Union[_worker_pb2.LegOutput, _Mapping]]] = ..., load: _Optional[_Union[_bootstrap_pb2.WorkerLoad, _Mapping]] = ..., kv_events: _Optional[_Union[_worker_pb2.KvEvents, _Mapping]] = ..., ready: _Optional[_Union[SchedulerReady, _Mapping]] = ..., status: _Optional[_Union[_worker_pb2.WorkerStatus, _Mapping]] = ..., status_answers: _Optional[_Iterable[int]] = ..., fatal: _Optional[str] = ..., admin_answers: _Optional[_Iterable[_Union[_admin_pb2.AdminAnswer, _Mapping]]] = ..., loras: _Optional[_Union[LoraSet, _Mapping]] = ..., link_news: _Optional[_Union[LinkNews, _Mapping]] = ..., pong: _Optional[int] = ..., context_len: _Optional[int] = ..., news: _Optional[_Union[_worker_pb2.WorkerNews, _Mapping]] = ..., tokens: _Optional[_Union[NextTokens, _Mapping]] = ..., rank_doors: _Optional[_Union[_rank_pb2.RankDoors, _Mapping]] = ...) -> None: ...

class NextTokens(_message.Message):
    __slots__ = ("rooms", "indices", "token_ids")
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SchedulerReady(_message.Message):
    __slots__ = ("transfer", "context_len", "loras", "terms", "max_requests", "max_step_tokens", "computing", "makes_vectors")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    MAKES_VECTORS_FIELD_NUMBER: _ClassVar[int]
    transfer: _bootstrap_pb2.TransferInfo
    context_len: int
    loras: LoraSet
    terms: _bootstrap_pb2.Terms
    max_requests: int
    max_step_tokens: int
    computing: _worker_pb2.Computing
    makes_vectors: bool
    def __init__(self, transfer: _Optional[_Union[_bootstrap_pb2.TransferInfo, _Mapping]] = ..., context_len: _Optional[int] = ..., loras: _Optional[_Union[LoraSet, _Mapping]] = ..., terms: _Optional[_Union[_bootstrap_pb2.Terms, _Mapping]] = ..., max_requests: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., computing: _Optional[_Union[_worker_pb2.Computing, _Mapping]] = ..., makes_vectors: _Optional[bool] = ...) -> None: ...

class LinkNews(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: str
    def __init__(self, problem: _Optional[str] = ...) -> None: ...

class LoraSet(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_bootstrap_pb2.LoraAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_bootstrap_pb2.LoraAdapter, _Mapping]]] = ...) -> None: ...
