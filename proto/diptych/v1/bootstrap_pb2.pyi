from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_READY: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_GONE: _ClassVar[InstanceState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ROUTER: Role
ROLE_UNIFIED: Role
ROLE_ENCODE: Role
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_READY: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_GONE: InstanceState

class KvLayout(_message.Message):
    __slots__ = ("num_pages", "page_size", "regions", "rank", "num_ranks", "state_nbytes", "state_stage")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_STAGE_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    page_size: int
    regions: _containers.RepeatedCompositeFieldContainer[KvRegion]
    rank: int
    num_ranks: int
    state_nbytes: int
    state_stage: KvStateStage
    def __init__(self, num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[KvRegion, _Mapping]]] = ..., rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., state_nbytes: _Optional[int] = ..., state_stage: _Optional[_Union[KvStateStage, _Mapping]] = ...) -> None: ...

class KvStateStage(_message.Message):
    __slots__ = ("num_units", "first_layer", "num_layers", "total_layers", "num_pages")
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_units: int
    first_layer: int
    num_layers: int
    total_layers: int
    num_pages: int
    def __init__(self, num_units: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., total_layers: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("layers", "num_planes", "num_heads", "head_dim", "dtype", "total_heads", "reach", "total_layers")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_HEADS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str
    total_heads: int
    reach: str
    total_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., num_planes: _Optional[int] = ..., num_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., total_heads: _Optional[int] = ..., reach: _Optional[str] = ..., total_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferInfo(_message.Message):
    __slots__ = ("engine_metadata", "layout", "weights_door")
    ENGINE_METADATA_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DOOR_FIELD_NUMBER: _ClassVar[int]
    engine_metadata: bytes
    layout: KvLayout
    weights_door: WeightsDoor
    def __init__(self, engine_metadata: _Optional[bytes] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., weights_door: _Optional[_Union[WeightsDoor, _Mapping]] = ...) -> None: ...

class WeightsDoor(_message.Message):
    __slots__ = ("port", "key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    key: bytes
    def __init__(self, port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_waiting", "num_running", "free_pages", "total_pages", "waiting_tokens", "linked_instances", "grantable_pages", "queued_transfer_bytes", "link_speeds", "num_waiting_prompts", "blocked_tokens", "num_ungranted", "prompt_budget", "output_tokens", "output_step_s", "context_token_s", "prompt_token_s", "silent_s", "window_pages", "next_beside_pages", "key_uses", "tiers")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKED_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    GRANTABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_SPEEDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNGRANTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_STEP_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BESIDE_PAGES_FIELD_NUMBER: _ClassVar[int]
    KEY_USES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    free_pages: int
    total_pages: int
    waiting_tokens: int
    linked_instances: _containers.RepeatedScalarFieldContainer[int]
    grantable_pages: int
    queued_transfer_bytes: int
    link_speeds: _containers.RepeatedCompositeFieldContainer[LinkSpeed]
    num_waiting_prompts: int
    blocked_tokens: int
    num_ungranted: int
    prompt_budget: int
    output_tokens: int
    output_step_s: float
    context_token_s: float
    prompt_token_s: float
    silent_s: int
    window_pages: int
    next_beside_pages: int
    key_uses: KeyUses
    tiers: _containers.RepeatedCompositeFieldContainer[TierPrice]
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., linked_instances: _Optional[_Iterable[int]] = ..., grantable_pages: _Optional[int] = ..., queued_transfer_bytes: _Optional[int] = ..., link_speeds: _Optional[_Iterable[_Union[LinkSpeed, _Mapping]]] = ..., num_waiting_prompts: _Optional[int] = ..., blocked_tokens: _Optional[int] = ..., num_ungranted: _Optional[int] = ..., prompt_budget: _Optional[int] = ..., output_tokens: _Optional[int] = ..., output_step_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., silent_s: _Optional[int] = ..., window_pages: _Optional[int] = ..., next_beside_pages: _Optional[int] = ..., key_uses: _Optional[_Union[KeyUses, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierPrice, _Mapping]]] = ...) -> None: ...

class TierPrice(_message.Message):
    __slots__ = ("name", "base_s", "page_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PAGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_s: float
    page_s: float
    def __init__(self, name: _Optional[str] = ..., base_s: _Optional[float] = ..., page_s: _Optional[float] = ...) -> None: ...

class KeyUses(_message.Message):
    __slots__ = ("ledger", "keys")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ledger: int
    keys: _containers.RepeatedCompositeFieldContainer[KeyUse]
    def __init__(self, ledger: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[KeyUse, _Mapping]]] = ...) -> None: ...

class KeyUse(_message.Message):
    __slots__ = ("key", "requests", "tokens", "places", "requests_debt_ms", "tokens_debt_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_DEBT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DEBT_MS_FIELD_NUMBER: _ClassVar[int]
    key: int
    requests: int
    tokens: int
    places: int
    requests_debt_ms: int
    tokens_debt_ms: int
    def __init__(self, key: _Optional[int] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., places: _Optional[int] = ..., requests_debt_ms: _Optional[int] = ..., tokens_debt_ms: _Optional[int] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("peer_instance_id", "bytes_per_s")
    PEER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer_instance_id: int
    bytes_per_s: float
    def __init__(self, peer_instance_id: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Terms(_message.Message):
    __slots__ = ("weights", "vocab_size", "kv_shape", "kv_backend", "oldest_protocol", "newest_protocol", "features", "required_features")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_SHAPE_FIELD_NUMBER: _ClassVar[int]
    KV_BACKEND_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    weights: str
    vocab_size: int
    kv_shape: str
    kv_backend: str
    oldest_protocol: int
    newest_protocol: int
    features: int
    required_features: int
    def __init__(self, weights: _Optional[str] = ..., vocab_size: _Optional[int] = ..., kv_shape: _Optional[str] = ..., kv_backend: _Optional[str] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., features: _Optional[int] = ..., required_features: _Optional[int] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("instance_id", "role", "address", "model_id", "compat", "state", "transfer", "load", "version", "context_len", "dp_rank", "loras", "started_as", "paused", "not_ready", "metrics_address", "terms", "sequence", "started_unix_ns", "pool", "pod", "weights_version", "declared", "declared_version", "nodes")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    COMPAT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    DECLARED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    role: Role
    address: str
    model_id: str
    compat: str
    state: InstanceState
    transfer: TransferInfo
    load: WorkerLoad
    version: str
    context_len: int
    dp_rank: int
    loras: _containers.RepeatedCompositeFieldContainer[LoraAdapter]
    started_as: str
    paused: bool
    not_ready: str
    metrics_address: str
    terms: Terms
    sequence: int
    started_unix_ns: int
    pool: str
    pod: str
    weights_version: str
    declared: str
    declared_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[GroupNode]
    def __init__(self, instance_id: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model_id: _Optional[str] = ..., compat: _Optional[str] = ..., state: _Optional[_Union[InstanceState, str]] = ..., transfer: _Optional[_Union[TransferInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., version: _Optional[str] = ..., context_len: _Optional[int] = ..., dp_rank: _Optional[int] = ..., loras: _Optional[_Iterable[_Union[LoraAdapter, _Mapping]]] = ..., started_as: _Optional[str] = ..., paused: _Optional[bool] = ..., not_ready: _Optional[str] = ..., metrics_address: _Optional[str] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., sequence: _Optional[int] = ..., started_unix_ns: _Optional[int] = ..., pool: _Optional[str] = ..., pod: _Optional[str] = ..., weights_version: _Optional[str] = ..., declared: _Optional[str] = ..., declared_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[GroupNode, _Mapping]]] = ...) -> None: ...

class GroupNode(_message.Message):
    __slots__ = ("node", "epoch", "host", "pod", "first_rank", "num_ranks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    node: int
    epoch: int
    host: str
    pod: str
    first_rank: int
    num_ranks: int
    def __init__(self, node: _Optional[int] = ..., epoch: _Optional[int] = ..., host: _Optional[str] = ..., pod: _Optional[str] = ..., first_rank: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "instance")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    instance: Instance
    def __init__(self, sequence: _Optional[int] = ..., instance: _Optional[_Union[Instance, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("interval_ms", "lease_ms", "evicted")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    lease_ms: int
    evicted: bool
    def __init__(self, interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., evicted: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("without_loads",)
    WITHOUT_LOADS_FIELD_NUMBER: _ClassVar[int]
    without_loads: bool
    def __init__(self, without_loads: _Optional[bool] = ...) -> None: ...

class WatchUpdate(_message.Message):
    __slots__ = ("revision", "snapshot", "upserts", "removed", "ended", "loads", "lease_ms", "max_silence_ms")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPSERTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    snapshot: bool
    upserts: _containers.RepeatedCompositeFieldContainer[Instance]
    removed: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[int]
    loads: _containers.RepeatedCompositeFieldContainer[LoadNews]
    lease_ms: int
    max_silence_ms: int
    def __init__(self, revision: _Optional[int] = ..., snapshot: _Optional[bool] = ..., upserts: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[int]] = ..., loads: _Optional[_Iterable[_Union[LoadNews, _Mapping]]] = ..., lease_ms: _Optional[int] = ..., max_silence_ms: _Optional[int] = ...) -> None: ...

class LoadNews(_message.Message):
    __slots__ = ("instance_id", "sequence", "load")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    sequence: int
    load: WorkerLoad
    def __init__(self, instance_id: _Optional[int] = ..., sequence: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...
