from diptych.v1 import bootstrap_pb2 as _bootstrap_pb2
from diptych.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LegKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_KIND_UNSPECIFIED: _ClassVar[LegKind]
    LEG_KIND_PREFILL: _ClassVar[LegKind]
    LEG_KIND_DECODE: _ClassVar[LegKind]
    LEG_KIND_LOCAL: _ClassVar[LegKind]
    LEG_KIND_POOL: _ClassVar[LegKind]
    LEG_KIND_ENCODE: _ClassVar[LegKind]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_PEER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_TRANSFER_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE: _ClassVar[ErrorCode]
    ERROR_CODE_ABORTED: _ClassVar[ErrorCode]
    ERROR_CODE_RETRACTED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_HANDED_BACK: _ClassVar[ErrorCode]
    ERROR_CODE_TOO_LONG: _ClassVar[ErrorCode]

class LinkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_STATE_UNSPECIFIED: _ClassVar[LinkState]
    LINK_STATE_DOWN: _ClassVar[LinkState]
    LINK_STATE_CONNECTING: _ClassVar[LinkState]
    LINK_STATE_TESTING: _ClassVar[LinkState]
    LINK_STATE_UP: _ClassVar[LinkState]
    LINK_STATE_REFUSED: _ClassVar[LinkState]
LEG_KIND_UNSPECIFIED: LegKind
LEG_KIND_PREFILL: LegKind
LEG_KIND_DECODE: LegKind
LEG_KIND_LOCAL: LegKind
LEG_KIND_POOL: LegKind
LEG_KIND_ENCODE: LegKind
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_PEER_LOST: ErrorCode
ERROR_CODE_TRANSFER_FAILED: ErrorCode
ERROR_CODE_DEADLINE: ErrorCode
ERROR_CODE_ABORTED: ErrorCode
ERROR_CODE_RETRACTED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_HANDED_BACK: ErrorCode
ERROR_CODE_TOO_LONG: ErrorCode
LINK_STATE_UNSPECIFIED: LinkState
LINK_STATE_DOWN: LinkState
LINK_STATE_CONNECTING: LinkState
LINK_STATE_TESTING: LinkState
LINK_STATE_UP: LinkState
LINK_STATE_REFUSED: LinkState

class ContentSegment(_message.Message):
    __slots__ = ("start", "num_tokens", "digest", "image", "encoder_instance_id", "rows")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_tokens: int
    digest: bytes
    image: Image
    encoder_instance_id: int
    rows: EmbedRows
    def __init__(self, start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., encoder_instance_id: _Optional[int] = ..., rows: _Optional[_Union[EmbedRows, _Mapping]] = ...) -> None: ...

class EmbedRows(_message.Message):
    __slots__ = ("width", "names", "data")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    width: int
    names: bytes
    data: bytes
    def __init__(self, width: _Optional[int] = ..., names: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("height", "width", "rgb")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    RGB_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    rgb: bytes
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., rgb: _Optional[bytes] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_ms", "tpot_ms", "weight", "sheddable")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHEDDABLE_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tpot_ms: float
    weight: float
    sheddable: bool
    def __init__(self, ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., weight: _Optional[float] = ..., sheddable: _Optional[bool] = ...) -> None: ...

class StartLeg(_message.Message):
    __slots__ = ("room", "request_id", "prompt_token_ids", "sampling", "peer_instance_id", "num_prior_output_tokens", "timeout_ms", "cache_salt", "priority", "tenant", "lora", "compat", "kind", "prompt_text", "add_special_tokens", "prompt_tokens", "contents", "slo", "speculate", "prediction", "moves_room", "expected_output_tokens", "label_token_ids", "holder", "computed_by_instance_id")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PEER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PRIOR_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    COMPAT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    MOVES_ROOM_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_BY_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    room: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    peer_instance_id: int
    num_prior_output_tokens: int
    timeout_ms: int
    cache_salt: bytes
    priority: int
    tenant: str
    lora: str
    compat: str
    kind: LegKind
    prompt_text: str
    add_special_tokens: bool
    prompt_tokens: bytes
    contents: _containers.RepeatedCompositeFieldContainer[ContentSegment]
    slo: Slo
    speculate: str
    prediction: bytes
    moves_room: int
    expected_output_tokens: int
    label_token_ids: _containers.RepeatedScalarFieldContainer[int]
    holder: PrefixHolder
    computed_by_instance_id: int
    def __init__(self, room: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., peer_instance_id: _Optional[int] = ..., num_prior_output_tokens: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., lora: _Optional[str] = ..., compat: _Optional[str] = ..., kind: _Optional[_Union[LegKind, str]] = ..., prompt_text: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., prompt_tokens: _Optional[bytes] = ..., contents: _Optional[_Iterable[_Union[ContentSegment, _Mapping]]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., speculate: _Optional[str] = ..., prediction: _Optional[bytes] = ..., moves_room: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., label_token_ids: _Optional[_Iterable[int]] = ..., holder: _Optional[_Union[PrefixHolder, _Mapping]] = ..., computed_by_instance_id: _Optional[int] = ...) -> None: ...

class ToolCalled(_message.Message):
    __slots__ = ("room", "tool")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    room: int
    tool: str
    def __init__(self, room: _Optional[int] = ..., tool: _Optional[str] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("instance_id", "num_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    num_tokens: int
    def __init__(self, instance_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RouterBatch(_message.Message):
    __slots__ = ("start", "abort", "resync_kv", "router_instance_id", "tool_called")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_KV_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLED_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedCompositeFieldContainer[StartLeg]
    abort: _containers.RepeatedScalarFieldContainer[int]
    resync_kv: bool
    router_instance_id: int
    tool_called: _containers.RepeatedCompositeFieldContainer[ToolCalled]
    def __init__(self, start: _Optional[_Iterable[_Union[StartLeg, _Mapping]]] = ..., abort: _Optional[_Iterable[int]] = ..., resync_kv: _Optional[bool] = ..., router_instance_id: _Optional[int] = ..., tool_called: _Optional[_Iterable[_Union[ToolCalled, _Mapping]]] = ...) -> None: ...

class LegError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class LegStats(_message.Message):
    __slots__ = ("cached_tokens", "pages_moved", "bytes_moved", "kv_digest", "queue_us", "compute_us", "transfer_us", "join_us", "verify_us", "prompt_tokens", "added_ttft_us", "grant_us", "tokenize_us", "chunk_us")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_US_FIELD_NUMBER: _ClassVar[int]
    JOIN_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADDED_TTFT_US_FIELD_NUMBER: _ClassVar[int]
    GRANT_US_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_US_FIELD_NUMBER: _ClassVar[int]
    CHUNK_US_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    pages_moved: int
    bytes_moved: int
    kv_digest: int
    queue_us: int
    compute_us: int
    transfer_us: int
    join_us: int
    verify_us: int
    prompt_tokens: int
    added_ttft_us: int
    grant_us: int
    tokenize_us: int
    chunk_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cached_tokens: _Optional[int] = ..., pages_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., kv_digest: _Optional[int] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., transfer_us: _Optional[int] = ..., join_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., added_ttft_us: _Optional[int] = ..., grant_us: _Optional[int] = ..., tokenize_us: _Optional[int] = ..., chunk_us: _Optional[_Iterable[int]] = ...) -> None: ...

class LegOutput(_message.Message):
    __slots__ = ("room", "first_index", "token_ids", "finish_reason", "error", "stats", "logprobs", "prompt_logprobs", "drafts", "accepted_drafts", "attention", "hidden_states", "vector")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    room: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    error: LegError
    stats: LegStats
    logprobs: _inference_pb2.TokenLogprobs
    prompt_logprobs: _inference_pb2.TokenLogprobs
    drafts: int
    accepted_drafts: int
    attention: _inference_pb2.TokenAttention
    hidden_states: _inference_pb2.HiddenStates
    vector: bytes
    def __init__(self, room: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., error: _Optional[_Union[LegError, _Mapping]] = ..., stats: _Optional[_Union[LegStats, _Mapping]] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., drafts: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., attention: _Optional[_Union[_inference_pb2.TokenAttention, _Mapping]] = ..., hidden_states: _Optional[_Union[_inference_pb2.HiddenStates, _Mapping]] = ..., vector: _Optional[bytes] = ...) -> None: ...

class WorkerBatch(_message.Message):
    __slots__ = ("outputs", "load", "kv_events", "instance")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[LegOutput]
    load: _bootstrap_pb2.WorkerLoad
    kv_events: KvEvents
    instance: _bootstrap_pb2.Instance
    def __init__(self, outputs: _Optional[_Iterable[_Union[LegOutput, _Mapping]]] = ..., load: _Optional[_Union[_bootstrap_pb2.WorkerLoad, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., instance: _Optional[_Union[_bootstrap_pb2.Instance, _Mapping]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("sequence", "stored", "removed", "cleared", "more", "below")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    BELOW_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    cleared: bool
    more: bool
    below: _containers.RepeatedCompositeFieldContainer[TierPages]
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., cleared: _Optional[bool] = ..., more: _Optional[bool] = ..., below: _Optional[_Iterable[_Union[TierPages, _Mapping]]] = ...) -> None: ...

class TierPages(_message.Message):
    __slots__ = ("level", "stored")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    level: int
    stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, level: _Optional[int] = ..., stored: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    def __init__(self, instance_id: _Optional[int] = ...) -> None: ...

class WatchWorkerRequest(_message.Message):
    __slots__ = ("instance_id", "interval_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    interval_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class WorkerNews(_message.Message):
    __slots__ = ("status", "steps", "has_links")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HAS_LINKS_FIELD_NUMBER: _ClassVar[int]
    status: WorkerStatus
    steps: StepRecords
    has_links: bool
    def __init__(self, status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., steps: _Optional[_Union[StepRecords, _Mapping]] = ..., has_links: _Optional[bool] = ...) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("began_s", "duration_s", "prompt_tokens", "output_tokens", "requests", "handed", "joined", "dropped", "context_tokens", "prompt_pairs", "prompts", "host_s")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PAIRS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    HOST_S_FIELD_NUMBER: _ClassVar[int]
    began_s: _containers.RepeatedScalarFieldContainer[float]
    duration_s: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    handed: _containers.RepeatedCompositeFieldContainer[StepMark]
    joined: _containers.RepeatedCompositeFieldContainer[StepMark]
    dropped: int
    context_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_pairs: _containers.RepeatedScalarFieldContainer[float]
    prompts: _containers.RepeatedScalarFieldContainer[int]
    host_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, began_s: _Optional[_Iterable[float]] = ..., duration_s: _Optional[_Iterable[float]] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., requests: _Optional[_Iterable[int]] = ..., handed: _Optional[_Iterable[_Union[StepMark, _Mapping]]] = ..., joined: _Optional[_Iterable[_Union[StepMark, _Mapping]]] = ..., dropped: _Optional[int] = ..., context_tokens: _Optional[_Iterable[int]] = ..., prompt_pairs: _Optional[_Iterable[float]] = ..., prompts: _Optional[_Iterable[int]] = ..., host_s: _Optional[_Iterable[float]] = ...) -> None: ...

class StepMark(_message.Message):
    __slots__ = ("step", "room")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    step: int
    room: int
    def __init__(self, step: _Optional[int] = ..., room: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("instance", "open_rooms", "pages_by_state", "pages_sent", "pages_received", "integrity_failures", "leaks_found", "problems", "host_pages", "host_pages_saved", "host_pages_restored", "links", "link_failures", "retractions", "drain", "quarantine_oldest_s", "unauthenticated_messages", "refused_page_writes", "graphs", "graph_bytes", "prefill_s", "prefill_busy", "prefill_tokens_per_s", "kv_port_open", "max_requests", "max_step_tokens", "step_model", "computing", "adapters_placed", "waiting_for_adapter", "drafting", "cache", "pages_pulled", "pages_lent", "pulls_refused", "pulls_missed", "pulls_wrong", "pull_saved_s", "pages_given", "pages_taken", "offers_declined", "weights_taken_bytes", "weights_givers_failed", "weights_given", "images_encoded", "image_places_encoded", "images_reused", "images_pulled", "files", "shared")
    class PagesByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_ROOMS_FIELD_NUMBER: _ClassVar[int]
    PAGES_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LEAKS_FOUND_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_SAVED_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LINK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    UNAUTHENTICATED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PAGE_WRITES_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BUSY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_PORT_OPEN_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MODEL_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_PLACED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PAGES_PULLED_FIELD_NUMBER: _ClassVar[int]
    PAGES_LENT_FIELD_NUMBER: _ClassVar[int]
    PULLS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PULLS_MISSED_FIELD_NUMBER: _ClassVar[int]
    PULLS_WRONG_FIELD_NUMBER: _ClassVar[int]
    PULL_SAVED_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_GIVEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_TAKEN_FIELD_NUMBER: _ClassVar[int]
    OFFERS_DECLINED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_TAKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_GIVERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PLACES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_REUSED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_PULLED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    instance: _bootstrap_pb2.Instance
    open_rooms: int
    pages_by_state: _containers.ScalarMap[str, int]
    pages_sent: int
    pages_received: int
    integrity_failures: int
    leaks_found: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    host_pages: int
    host_pages_saved: int
    host_pages_restored: int
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    link_failures: int
    retractions: int
    drain: Drain
    quarantine_oldest_s: float
    unauthenticated_messages: int
    refused_page_writes: int
    graphs: int
    graph_bytes: int
    prefill_s: float
    prefill_busy: float
    prefill_tokens_per_s: float
    kv_port_open: bool
    max_requests: int
    max_step_tokens: int
    step_model: StepModel
    computing: Computing
    adapters_placed: int
    waiting_for_adapter: int
    drafting: Drafting
    cache: CacheStatus
    pages_pulled: int
    pages_lent: int
    pulls_refused: int
    pulls_missed: int
    pulls_wrong: int
    pull_saved_s: float
    pages_given: int
    pages_taken: int
    offers_declined: int
    weights_taken_bytes: int
    weights_givers_failed: int
    weights_given: int
    images_encoded: int
    image_places_encoded: int
    images_reused: int
    images_pulled: int
    files: FileTierStatus
    shared: FileTierStatus
    def __init__(self, instance: _Optional[_Union[_bootstrap_pb2.Instance, _Mapping]] = ..., open_rooms: _Optional[int] = ..., pages_by_state: _Optional[_Mapping[str, int]] = ..., pages_sent: _Optional[int] = ..., pages_received: _Optional[int] = ..., integrity_failures: _Optional[int] = ..., leaks_found: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., host_pages: _Optional[int] = ..., host_pages_saved: _Optional[int] = ..., host_pages_restored: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., link_failures: _Optional[int] = ..., retractions: _Optional[int] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., quarantine_oldest_s: _Optional[float] = ..., unauthenticated_messages: _Optional[int] = ..., refused_page_writes: _Optional[int] = ..., graphs: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., prefill_s: _Optional[float] = ..., prefill_busy: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., kv_port_open: _Optional[bool] = ..., max_requests: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., step_model: _Optional[_Union[StepModel, _Mapping]] = ..., computing: _Optional[_Union[Computing, _Mapping]] = ..., adapters_placed: _Optional[int] = ..., waiting_for_adapter: _Optional[int] = ..., drafting: _Optional[_Union[Drafting, _Mapping]] = ..., cache: _Optional[_Union[CacheStatus, _Mapping]] = ..., pages_pulled: _Optional[int] = ..., pages_lent: _Optional[int] = ..., pulls_refused: _Optional[int] = ..., pulls_missed: _Optional[int] = ..., pulls_wrong: _Optional[int] = ..., pull_saved_s: _Optional[float] = ..., pages_given: _Optional[int] = ..., pages_taken: _Optional[int] = ..., offers_declined: _Optional[int] = ..., weights_taken_bytes: _Optional[int] = ..., weights_givers_failed: _Optional[int] = ..., weights_given: _Optional[int] = ..., images_encoded: _Optional[int] = ..., image_places_encoded: _Optional[int] = ..., images_reused: _Optional[int] = ..., images_pulled: _Optional[int] = ..., files: _Optional[_Union[FileTierStatus, _Mapping]] = ..., shared: _Optional[_Union[FileTierStatus, _Mapping]] = ...) -> None: ...

class CacheStatus(_message.Message):
    __slots__ = ("prompt_tokens", "tiers", "evicted_pages", "evicted_p50_s", "evicted_p90_s", "pins", "pinned_pages", "most_pinned_pages", "pins_given_up", "sessions_away", "tool_calls", "tool_returns", "kept_returns", "held_now", "held", "held_s")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_P50_S_FIELD_NUMBER: _ClassVar[int]
    EVICTED_P90_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MOST_PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_AWAY_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_RETURNS_FIELD_NUMBER: _ClassVar[int]
    KEPT_RETURNS_FIELD_NUMBER: _ClassVar[int]
    HELD_NOW_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    evicted_pages: int
    evicted_p50_s: float
    evicted_p90_s: float
    pins: int
    pinned_pages: int
    most_pinned_pages: int
    pins_given_up: int
    sessions_away: int
    tool_calls: int
    tool_returns: int
    kept_returns: int
    held_now: int
    held: int
    held_s: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ..., evicted_pages: _Optional[int] = ..., evicted_p50_s: _Optional[float] = ..., evicted_p90_s: _Optional[float] = ..., pins: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., most_pinned_pages: _Optional[int] = ..., pins_given_up: _Optional[int] = ..., sessions_away: _Optional[int] = ..., tool_calls: _Optional[int] = ..., tool_returns: _Optional[int] = ..., kept_returns: _Optional[int] = ..., held_now: _Optional[int] = ..., held: _Optional[int] = ..., held_s: _Optional[float] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("name", "pages", "capacity_pages", "found_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_PAGES_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pages: int
    capacity_pages: int
    found_tokens: int
    def __init__(self, name: _Optional[str] = ..., pages: _Optional[int] = ..., capacity_pages: _Optional[int] = ..., found_tokens: _Optional[int] = ...) -> None: ...

class FileTierStatus(_message.Message):
    __slots__ = ("pages", "bytes", "pages_written", "bytes_written", "pages_dropped", "pages_failed", "pages_read", "bytes_read", "pages_corrupt", "loads_failed", "pauses", "pages_not_loaded", "saved_s", "lookups", "lookups_failed", "runs_found")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FAILED_FIELD_NUMBER: _ClassVar[int]
    PAGES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    PAGES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    LOADS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    PAGES_NOT_LOADED_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FAILED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FOUND_FIELD_NUMBER: _ClassVar[int]
    pages: int
    bytes: int
    pages_written: int
    bytes_written: int
    pages_dropped: int
    pages_failed: int
    pages_read: int
    bytes_read: int
    pages_corrupt: int
    loads_failed: int
    pauses: int
    pages_not_loaded: int
    saved_s: float
    lookups: int
    lookups_failed: int
    runs_found: int
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ..., pages_written: _Optional[int] = ..., bytes_written: _Optional[int] = ..., pages_dropped: _Optional[int] = ..., pages_failed: _Optional[int] = ..., pages_read: _Optional[int] = ..., bytes_read: _Optional[int] = ..., pages_corrupt: _Optional[int] = ..., loads_failed: _Optional[int] = ..., pauses: _Optional[int] = ..., pages_not_loaded: _Optional[int] = ..., saved_s: _Optional[float] = ..., lookups: _Optional[int] = ..., lookups_failed: _Optional[int] = ..., runs_found: _Optional[int] = ...) -> None: ...

class Drafting(_message.Message):
    __slots__ = ("sources", "asked", "asking_s", "saved_s", "held_bytes")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ASKING_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[DraftCounts]
    asked: int
    asking_s: float
    saved_s: float
    held_bytes: int
    def __init__(self, sources: _Optional[_Iterable[_Union[DraftCounts, _Mapping]]] = ..., asked: _Optional[int] = ..., asking_s: _Optional[float] = ..., saved_s: _Optional[float] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("source", "verified", "accepted")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    source: str
    verified: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[str] = ..., verified: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Computing(_message.Message):
    __slots__ = ("device", "kv_dtype", "tp", "pp")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    device: str
    kv_dtype: str
    tp: int
    pp: int
    def __init__(self, device: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("step", "row", "context", "prompt_step", "prompt_token", "prompt_pair", "prompt", "steps", "median_error", "p90_error", "time_ratio", "unidentified", "largest", "launch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PAIR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_ERROR_FIELD_NUMBER: _ClassVar[int]
    P90_ERROR_FIELD_NUMBER: _ClassVar[int]
    TIME_RATIO_FIELD_NUMBER: _ClassVar[int]
    UNIDENTIFIED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    step: float
    row: float
    context: float
    prompt_step: float
    prompt_token: float
    prompt_pair: float
    prompt: float
    steps: int
    median_error: float
    p90_error: float
    time_ratio: float
    unidentified: _containers.RepeatedScalarFieldContainer[str]
    largest: _containers.RepeatedScalarFieldContainer[float]
    launch: float
    def __init__(self, step: _Optional[float] = ..., row: _Optional[float] = ..., context: _Optional[float] = ..., prompt_step: _Optional[float] = ..., prompt_token: _Optional[float] = ..., prompt_pair: _Optional[float] = ..., prompt: _Optional[float] = ..., steps: _Optional[int] = ..., median_error: _Optional[float] = ..., p90_error: _Optional[float] = ..., time_ratio: _Optional[float] = ..., unidentified: _Optional[_Iterable[str]] = ..., largest: _Optional[_Iterable[float]] = ..., launch: _Optional[float] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("phase", "requests_left", "oldest_s", "deadline_s")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[Drain.Phase]
        PHASE_DRAINING: _ClassVar[Drain.Phase]
        PHASE_EMPTY: _ClassVar[Drain.Phase]
    PHASE_UNSPECIFIED: Drain.Phase
    PHASE_DRAINING: Drain.Phase
    PHASE_EMPTY: Drain.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    phase: Drain.Phase
    requests_left: int
    oldest_s: float
    deadline_s: float
    def __init__(self, phase: _Optional[_Union[Drain.Phase, str]] = ..., requests_left: _Optional[int] = ..., oldest_s: _Optional[float] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer_instance_id", "state", "reason", "lanes", "library", "path", "bytes_per_s", "rtt_s", "bytes_sent", "in_flight_bytes", "queued_bytes", "last_heard_s", "tests")
    PEER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_S_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    peer_instance_id: int
    state: LinkState
    reason: str
    lanes: str
    library: str
    path: str
    bytes_per_s: float
    rtt_s: float
    bytes_sent: int
    in_flight_bytes: int
    queued_bytes: int
    last_heard_s: float
    tests: _containers.RepeatedCompositeFieldContainer[PathTest]
    def __init__(self, peer_instance_id: _Optional[int] = ..., state: _Optional[_Union[LinkState, str]] = ..., reason: _Optional[str] = ..., lanes: _Optional[str] = ..., library: _Optional[str] = ..., path: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., rtt_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., last_heard_s: _Optional[float] = ..., tests: _Optional[_Iterable[_Union[PathTest, _Mapping]]] = ...) -> None: ...

class PathTest(_message.Message):
    __slots__ = ("path", "bytes_per_s", "error")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes_per_s: float
    error: str
    def __init__(self, path: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...
