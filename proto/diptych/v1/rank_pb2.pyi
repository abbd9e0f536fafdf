from diptych.v1 import admin_pb2 as _admin_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeSays(_message.Message):
    __slots__ = ("hello", "beat", "died", "leaving", "is_stopped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    beat: bool
    died: str
    leaving: bool
    is_stopped: bool
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., beat: _Optional[bool] = ..., died: _Optional[str] = ..., leaving: _Optional[bool] = ..., is_stopped: _Optional[bool] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("protocol", "node", "num_nodes", "epoch", "host", "pod", "version", "model", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: int
    num_nodes: int
    epoch: int
    host: str
    pod: str
    version: str
    model: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[int] = ..., num_nodes: _Optional[int] = ..., epoch: _Optional[int] = ..., host: _Optional[str] = ..., pod: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LeaderSays(_message.Message):
    __slots__ = ("beat", "start", "is_loaded", "stop", "died")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IS_LOADED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    beat: bool
    start: GroupStart
    is_loaded: bool
    stop: bool
    died: str
    def __init__(self, beat: _Optional[bool] = ..., start: _Optional[_Union[GroupStart, _Mapping]] = ..., is_loaded: _Optional[bool] = ..., stop: _Optional[bool] = ..., died: _Optional[str] = ...) -> None: ...

class GroupStart(_message.Message):
    __slots__ = ("instance_id", "host", "doors")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DOORS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    host: str
    doors: RankDoors
    def __init__(self, instance_id: _Optional[int] = ..., host: _Optional[str] = ..., doors: _Optional[_Union[RankDoors, _Mapping]] = ...) -> None: ...

class RankDoors(_message.Message):
    __slots__ = ("key", "ports")
    class PortsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    ports: _containers.ScalarMap[str, int]
    def __init__(self, key: _Optional[bytes] = ..., ports: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("host", "port", "secret")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    secret: bytes
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class RankEntry(_message.Message):
    __slots__ = ("step", "connect", "disconnect", "copy", "is_writer_gone", "shutdown", "save", "restore", "digest_pages", "use_path", "fill_probe", "unpack", "finish_saves", "draft", "prepare", "forget", "place_adapter", "remove_adapter", "switch_weights", "switch_back", "drop_weights", "release_weights", "put_row", "open_files", "keep", "load", "forget_pages", "meet", "round", "open_store", "offer", "load_runs", "forget_runs", "finish_steps", "get_row")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    IS_WRITER_GONE_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PAGES_FIELD_NUMBER: _ClassVar[int]
    USE_PATH_FIELD_NUMBER: _ClassVar[int]
    FILL_PROBE_FIELD_NUMBER: _ClassVar[int]
    UNPACK_FIELD_NUMBER: _ClassVar[int]
    FINISH_SAVES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    PLACE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REMOVE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SWITCH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_BACK_FIELD_NUMBER: _ClassVar[int]
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PUT_ROW_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FORGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OPEN_STORE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    LOAD_RUNS_FIELD_NUMBER: _ClassVar[int]
    FORGET_RUNS_FIELD_NUMBER: _ClassVar[int]
    FINISH_STEPS_FIELD_NUMBER: _ClassVar[int]
    GET_ROW_FIELD_NUMBER: _ClassVar[int]
    step: Step
    connect: ConnectPeer
    disconnect: int
    copy: CopyPages
    is_writer_gone: int
    shutdown: bool
    save: HostCopy
    restore: HostCopy
    digest_pages: DigestOwnPages
    use_path: UsePath
    fill_probe: int
    unpack: UnpackPages
    finish_saves: bool
    draft: DraftStep
    prepare: RankTask
    forget: int
    place_adapter: PlaceAdapter
    remove_adapter: int
    switch_weights: bool
    switch_back: bool
    drop_weights: bool
    release_weights: bool
    put_row: HiddenRow
    open_files: int
    keep: KeepPages
    load: LoadPages
    forget_pages: bytes
    meet: Meeting
    round: CommonRound
    open_store: OpenStore
    offer: KeepPages
    load_runs: LoadRuns
    forget_runs: ForgetRuns
    finish_steps: int
    get_row: int
    def __init__(self, step: _Optional[_Union[Step, _Mapping]] = ..., connect: _Optional[_Union[ConnectPeer, _Mapping]] = ..., disconnect: _Optional[int] = ..., copy: _Optional[_Union[CopyPages, _Mapping]] = ..., is_writer_gone: _Optional[int] = ..., shutdown: _Optional[bool] = ..., save: _Optional[_Union[HostCopy, _Mapping]] = ..., restore: _Optional[_Union[HostCopy, _Mapping]] = ..., digest_pages: _Optional[_Union[DigestOwnPages, _Mapping]] = ..., use_path: _Optional[_Union[UsePath, _Mapping]] = ..., fill_probe: _Optional[int] = ..., unpack: _Optional[_Union[UnpackPages, _Mapping]] = ..., finish_saves: _Optional[bool] = ..., draft: _Optional[_Union[DraftStep, _Mapping]] = ..., prepare: _Optional[_Union[RankTask, _Mapping]] = ..., forget: _Optional[int] = ..., place_adapter: _Optional[_Union[PlaceAdapter, _Mapping]] = ..., remove_adapter: _Optional[int] = ..., switch_weights: _Optional[bool] = ..., switch_back: _Optional[bool] = ..., drop_weights: _Optional[bool] = ..., release_weights: _Optional[bool] = ..., put_row: _Optional[_Union[HiddenRow, _Mapping]] = ..., open_files: _Optional[int] = ..., keep: _Optional[_Union[KeepPages, _Mapping]] = ..., load: _Optional[_Union[LoadPages, _Mapping]] = ..., forget_pages: _Optional[bytes] = ..., meet: _Optional[_Union[Meeting, _Mapping]] = ..., round: _Optional[_Union[CommonRound, _Mapping]] = ..., open_store: _Optional[_Union[OpenStore, _Mapping]] = ..., offer: _Optional[_Union[KeepPages, _Mapping]] = ..., load_runs: _Optional[_Union[LoadRuns, _Mapping]] = ..., forget_runs: _Optional[_Union[ForgetRuns, _Mapping]] = ..., finish_steps: _Optional[int] = ..., get_row: _Optional[int] = ...) -> None: ...

class CommonRound(_message.Message):
    __slots__ = ("num_tokens", "num_picked", "is_without_us", "is_plain", "late_tokens", "late_picked")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PICKED_FIELD_NUMBER: _ClassVar[int]
    IS_WITHOUT_US_FIELD_NUMBER: _ClassVar[int]
    IS_PLAIN_FIELD_NUMBER: _ClassVar[int]
    LATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_PICKED_FIELD_NUMBER: _ClassVar[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_picked: _containers.RepeatedScalarFieldContainer[int]
    is_without_us: bool
    is_plain: _containers.RepeatedScalarFieldContainer[bool]
    late_tokens: _containers.RepeatedScalarFieldContainer[int]
    late_picked: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[_Iterable[int]] = ..., num_picked: _Optional[_Iterable[int]] = ..., is_without_us: _Optional[bool] = ..., is_plain: _Optional[_Iterable[bool]] = ..., late_tokens: _Optional[_Iterable[int]] = ..., late_picked: _Optional[_Iterable[int]] = ...) -> None: ...

class HiddenRow(_message.Message):
    __slots__ = ("slot", "row")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    slot: int
    row: bytes
    def __init__(self, slot: _Optional[int] = ..., row: _Optional[bytes] = ...) -> None: ...

class RankTask(_message.Message):
    __slots__ = ("task", "adapter", "load_weights", "replace_weights", "join_group", "leave_group", "settle_weights")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LOAD_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    SETTLE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    task: int
    adapter: str
    load_weights: _admin_pb2.WeightsChange
    replace_weights: _admin_pb2.WeightsChange
    join_group: _admin_pb2.JoinGroup
    leave_group: str
    settle_weights: bool
    def __init__(self, task: _Optional[int] = ..., adapter: _Optional[str] = ..., load_weights: _Optional[_Union[_admin_pb2.WeightsChange, _Mapping]] = ..., replace_weights: _Optional[_Union[_admin_pb2.WeightsChange, _Mapping]] = ..., join_group: _Optional[_Union[_admin_pb2.JoinGroup, _Mapping]] = ..., leave_group: _Optional[str] = ..., settle_weights: _Optional[bool] = ...) -> None: ...

class PlaceAdapter(_message.Message):
    __slots__ = ("task", "slot")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    task: int
    slot: int
    def __init__(self, task: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("mode", "input_ids", "positions", "out_slots", "page_table", "seq_lens", "extend_lens", "prompt_rows", "num_sampled", "states", "windows", "is_unfollowed", "adapters", "rope_positions", "images", "embeds")
    MODE_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    OUT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLE_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENS_FIELD_NUMBER: _ClassVar[int]
    EXTEND_LENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    IS_UNFOLLOWED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ROPE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    input_ids: bytes
    positions: bytes
    out_slots: bytes
    page_table: bytes
    seq_lens: bytes
    extend_lens: bytes
    prompt_rows: bytes
    num_sampled: bytes
    states: StateMoves
    windows: WindowGroups
    is_unfollowed: bool
    adapters: bytes
    rope_positions: bytes
    images: _containers.RepeatedCompositeFieldContainer[ImageRows]
    embeds: StepRows
    def __init__(self, mode: _Optional[str] = ..., input_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., out_slots: _Optional[bytes] = ..., page_table: _Optional[bytes] = ..., seq_lens: _Optional[bytes] = ..., extend_lens: _Optional[bytes] = ..., prompt_rows: _Optional[bytes] = ..., num_sampled: _Optional[bytes] = ..., states: _Optional[_Union[StateMoves, _Mapping]] = ..., windows: _Optional[_Union[WindowGroups, _Mapping]] = ..., is_unfollowed: _Optional[bool] = ..., adapters: _Optional[bytes] = ..., rope_positions: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[ImageRows, _Mapping]]] = ..., embeds: _Optional[_Union[StepRows, _Mapping]] = ...) -> None: ...

class StepRows(_message.Message):
    __slots__ = ("tokens", "values")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    values: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class ImageRows(_message.Message):
    __slots__ = ("key", "height", "width", "rgb", "first", "num_rows", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    RGB_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    height: int
    width: int
    rgb: bytes
    first: int
    num_rows: int
    token: int
    def __init__(self, key: _Optional[bytes] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., rgb: _Optional[bytes] = ..., first: _Optional[int] = ..., num_rows: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class DraftStep(_message.Message):
    __slots__ = ("token_ids", "positions", "page_table", "num_drafts", "page_size", "missed")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    positions: bytes
    page_table: bytes
    num_drafts: bytes
    page_size: int
    missed: _containers.RepeatedCompositeFieldContainer[MissedTokens]
    def __init__(self, token_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., page_table: _Optional[bytes] = ..., num_drafts: _Optional[bytes] = ..., page_size: _Optional[int] = ..., missed: _Optional[_Iterable[_Union[MissedTokens, _Mapping]]] = ...) -> None: ...

class MissedTokens(_message.Message):
    __slots__ = ("row", "start", "token_ids", "shared_len")
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_LEN_FIELD_NUMBER: _ClassVar[int]
    row: int
    start: int
    token_ids: bytes
    shared_len: int
    def __init__(self, row: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., shared_len: _Optional[int] = ...) -> None: ...

class WindowGroups(_message.Message):
    __slots__ = ("num_groups", "page_tables", "out_slots")
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLES_FIELD_NUMBER: _ClassVar[int]
    OUT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_groups: int
    page_tables: bytes
    out_slots: bytes
    def __init__(self, num_groups: _Optional[int] = ..., page_tables: _Optional[bytes] = ..., out_slots: _Optional[bytes] = ...) -> None: ...

class StateMoves(_message.Message):
    __slots__ = ("slots", "cleared", "read_slots", "read_pages", "written_slots", "written_pages", "pages_per_state", "late_lens")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    READ_SLOTS_FIELD_NUMBER: _ClassVar[int]
    READ_PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_PER_STATE_FIELD_NUMBER: _ClassVar[int]
    LATE_LENS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    cleared: bytes
    read_slots: bytes
    read_pages: bytes
    written_slots: bytes
    written_pages: bytes
    pages_per_state: int
    late_lens: bytes
    def __init__(self, slots: _Optional[bytes] = ..., cleared: _Optional[bytes] = ..., read_slots: _Optional[bytes] = ..., read_pages: _Optional[bytes] = ..., written_slots: _Optional[bytes] = ..., written_pages: _Optional[bytes] = ..., pages_per_state: _Optional[int] = ..., late_lens: _Optional[bytes] = ...) -> None: ...

class ConnectPeer(_message.Message):
    __slots__ = ("peer", "metadata")
    PEER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    peer: int
    metadata: bytes
    def __init__(self, peer: _Optional[int] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class CopyPages(_message.Message):
    __slots__ = ("operation", "peer", "src", "dst", "first_layer", "end_layer", "skip_tokens", "stream", "priority", "timeout_s", "with_digest", "as_bytes")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WITH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    AS_BYTES_FIELD_NUMBER: _ClassVar[int]
    operation: int
    peer: int
    src: bytes
    dst: bytes
    first_layer: int
    end_layer: int
    skip_tokens: int
    stream: int
    priority: int
    timeout_s: float
    with_digest: bool
    as_bytes: bool
    def __init__(self, operation: _Optional[int] = ..., peer: _Optional[int] = ..., src: _Optional[bytes] = ..., dst: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., skip_tokens: _Optional[int] = ..., stream: _Optional[int] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., with_digest: _Optional[bool] = ..., as_bytes: _Optional[bool] = ...) -> None: ...

class DigestOwnPages(_message.Message):
    __slots__ = ("operation", "pages")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    operation: int
    pages: bytes
    def __init__(self, operation: _Optional[int] = ..., pages: _Optional[bytes] = ...) -> None: ...

class UnpackPages(_message.Message):
    __slots__ = ("operation", "peer", "pages")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    operation: int
    peer: int
    pages: bytes
    def __init__(self, operation: _Optional[int] = ..., peer: _Optional[int] = ..., pages: _Optional[bytes] = ...) -> None: ...

class UsePath(_message.Message):
    __slots__ = ("peer", "path")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    peer: int
    path: str
    def __init__(self, peer: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class HostCopy(_message.Message):
    __slots__ = ("pages", "slots", "number")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    pages: bytes
    slots: bytes
    number: int
    def __init__(self, pages: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class KeepPages(_message.Message):
    __slots__ = ("places", "ids")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    places: bytes
    ids: bytes
    def __init__(self, places: _Optional[bytes] = ..., ids: _Optional[bytes] = ...) -> None: ...

class LoadPages(_message.Message):
    __slots__ = ("number", "ids", "pages")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    ids: bytes
    pages: bytes
    def __init__(self, number: _Optional[int] = ..., ids: _Optional[bytes] = ..., pages: _Optional[bytes] = ...) -> None: ...

class OpenStore(_message.Message):
    __slots__ = ("terms", "run_pages")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    RUN_PAGES_FIELD_NUMBER: _ClassVar[int]
    terms: bytes
    run_pages: int
    def __init__(self, terms: _Optional[bytes] = ..., run_pages: _Optional[int] = ...) -> None: ...

class LoadRuns(_message.Message):
    __slots__ = ("number", "ids", "pages", "runs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    number: int
    ids: bytes
    pages: bytes
    runs: _containers.RepeatedCompositeFieldContainer[KnownRun]
    def __init__(self, number: _Optional[int] = ..., ids: _Optional[bytes] = ..., pages: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[KnownRun, _Mapping]]] = ...) -> None: ...

class KnownRun(_message.Message):
    __slots__ = ("first", "ids")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    ids: bytes
    def __init__(self, first: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class ForgetRuns(_message.Message):
    __slots__ = ("ids", "last")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    last: bytes
    def __init__(self, ids: _Optional[bytes] = ..., last: _Optional[bytes] = ...) -> None: ...

class RankAnswer(_message.Message):
    __slots__ = ("engine_metadata", "is_loaded", "is_writer_gone", "is_saved", "has_finished", "has_ended")
    ENGINE_METADATA_FIELD_NUMBER: _ClassVar[int]
    IS_LOADED_FIELD_NUMBER: _ClassVar[int]
    IS_WRITER_GONE_FIELD_NUMBER: _ClassVar[int]
    IS_SAVED_FIELD_NUMBER: _ClassVar[int]
    HAS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    engine_metadata: bytes
    is_loaded: bool
    is_writer_gone: bool
    is_saved: bool
    has_finished: bool
    has_ended: bool
    def __init__(self, engine_metadata: _Optional[bytes] = ..., is_loaded: _Optional[bool] = ..., is_writer_gone: _Optional[bool] = ..., is_saved: _Optional[bool] = ..., has_finished: _Optional[bool] = ..., has_ended: _Optional[bool] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("rank", "link_up", "link_down", "operation_done", "restored", "loaded")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LINK_UP_FIELD_NUMBER: _ClassVar[int]
    LINK_DOWN_FIELD_NUMBER: _ClassVar[int]
    OPERATION_DONE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    link_up: int
    link_down: LinkEnd
    operation_done: OperationEnd
    restored: int
    loaded: LoadEnd
    def __init__(self, rank: _Optional[int] = ..., link_up: _Optional[int] = ..., link_down: _Optional[_Union[LinkEnd, _Mapping]] = ..., operation_done: _Optional[_Union[OperationEnd, _Mapping]] = ..., restored: _Optional[int] = ..., loaded: _Optional[_Union[LoadEnd, _Mapping]] = ...) -> None: ...

class TaskEnd(_message.Message):
    __slots__ = ("rank", "task", "grpc_status", "message", "fingerprint")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GRPC_STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    task: int
    grpc_status: str
    message: str
    fingerprint: str
    def __init__(self, rank: _Optional[int] = ..., task: _Optional[int] = ..., grpc_status: _Optional[str] = ..., message: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class LinkEnd(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: int
    reason: str
    def __init__(self, peer: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LoadEnd(_message.Message):
    __slots__ = ("number", "error", "missing", "corrupt", "is_of_store")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    IS_OF_STORE_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    missing: bytes
    corrupt: int
    is_of_store: bool
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ..., missing: _Optional[bytes] = ..., corrupt: _Optional[int] = ..., is_of_store: _Optional[bool] = ...) -> None: ...

class OperationEnd(_message.Message):
    __slots__ = ("operation", "error", "digest")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    operation: int
    error: str
    digest: int
    def __init__(self, operation: _Optional[int] = ..., error: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class RankedEngineMetadata(_message.Message):
    __slots__ = ("version", "ranks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    ranks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[int] = ..., ranks: _Optional[_Iterable[bytes]] = ...) -> None: ...
