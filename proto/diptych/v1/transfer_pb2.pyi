from diptych.v1 import bootstrap_pb2 as _bootstrap_pb2
from diptych.v1 import inference_pb2 as _inference_pb2
from diptych.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferNote(_message.Message):
    __slots__ = ("version", "sender", "target", "room", "pages_ready", "hand_off", "ack", "abort", "abort_ack", "probe_ask", "probe_offer", "probe_check", "probe_found", "probe_end", "probe_greeting", "pull", "pulled", "stop_pull", "offer", "offer_ended")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PAGES_READY_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    PROBE_ASK_FIELD_NUMBER: _ClassVar[int]
    PROBE_OFFER_FIELD_NUMBER: _ClassVar[int]
    PROBE_CHECK_FIELD_NUMBER: _ClassVar[int]
    PROBE_FOUND_FIELD_NUMBER: _ClassVar[int]
    PROBE_END_FIELD_NUMBER: _ClassVar[int]
    PROBE_GREETING_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    STOP_PULL_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    OFFER_ENDED_FIELD_NUMBER: _ClassVar[int]
    version: int
    sender: int
    target: int
    room: int
    pages_ready: PagesReady
    hand_off: HandOff
    ack: Ack
    abort: Abort
    abort_ack: AbortAck
    probe_ask: ProbeAsk
    probe_offer: ProbeOffer
    probe_check: ProbeCheck
    probe_found: ProbeFound
    probe_end: ProbeEnd
    probe_greeting: ProbeGreeting
    pull: Pull
    pulled: Pulled
    stop_pull: StopPull
    offer: Offer
    offer_ended: OfferEnded
    def __init__(self, version: _Optional[int] = ..., sender: _Optional[int] = ..., target: _Optional[int] = ..., room: _Optional[int] = ..., pages_ready: _Optional[_Union[PagesReady, _Mapping]] = ..., hand_off: _Optional[_Union[HandOff, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., probe_ask: _Optional[_Union[ProbeAsk, _Mapping]] = ..., probe_offer: _Optional[_Union[ProbeOffer, _Mapping]] = ..., probe_check: _Optional[_Union[ProbeCheck, _Mapping]] = ..., probe_found: _Optional[_Union[ProbeFound, _Mapping]] = ..., probe_end: _Optional[_Union[ProbeEnd, _Mapping]] = ..., probe_greeting: _Optional[_Union[ProbeGreeting, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., pulled: _Optional[_Union[Pulled, _Mapping]] = ..., stop_pull: _Optional[_Union[StopPull, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., offer_ended: _Optional[_Union[OfferEnded, _Mapping]] = ...) -> None: ...

class PagesReady(_message.Message):
    __slots__ = ("pages", "generations", "cached_prefix_len", "num_prompt_tokens", "page_size", "prompt_hash")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    cached_prefix_len: int
    num_prompt_tokens: int
    page_size: int
    prompt_hash: int
    def __init__(self, pages: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., cached_prefix_len: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., prompt_hash: _Optional[int] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("first_token", "finish_reason", "num_pages", "generations", "cached_tokens", "groups", "row")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    finish_reason: _inference_pb2.FinishReason
    num_pages: int
    generations: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[HandedGroup]
    row: bytes
    def __init__(self, first_token: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., num_pages: _Optional[int] = ..., generations: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[HandedGroup, _Mapping]]] = ..., row: _Optional[bytes] = ...) -> None: ...

class HandedGroup(_message.Message):
    __slots__ = ("kind", "first_token", "end_token", "num_pages")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[HandedGroup.Kind]
        KIND_TOKENS: _ClassVar[HandedGroup.Kind]
        KIND_WINDOW: _ClassVar[HandedGroup.Kind]
        KIND_STATE: _ClassVar[HandedGroup.Kind]
    KIND_UNSPECIFIED: HandedGroup.Kind
    KIND_TOKENS: HandedGroup.Kind
    KIND_WINDOW: HandedGroup.Kind
    KIND_STATE: HandedGroup.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    kind: HandedGroup.Kind
    first_token: int
    end_token: int
    num_pages: int
    def __init__(self, kind: _Optional[_Union[HandedGroup.Kind, str]] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _worker_pb2.LegError
    def __init__(self, reason: _Optional[_Union[_worker_pb2.LegError, _Mapping]] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pull(_message.Message):
    __slots__ = ("kv", "namespace", "tokens", "first_token", "page_size", "pages", "generations", "timeout_s")
    KV_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    kv: str
    namespace: bytes
    tokens: bytes
    first_token: int
    page_size: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, kv: _Optional[str] = ..., namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., first_token: _Optional[int] = ..., page_size: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("num_pages", "generations", "refusal")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    generations: _containers.RepeatedScalarFieldContainer[int]
    refusal: str
    def __init__(self, num_pages: _Optional[int] = ..., generations: _Optional[_Iterable[int]] = ..., refusal: _Optional[str] = ...) -> None: ...

class StopPull(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offer(_message.Message):
    __slots__ = ("kv", "namespace", "tokens", "page_size", "idle_s", "num_uses", "within_s")
    KV_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_USES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    kv: str
    namespace: bytes
    tokens: bytes
    page_size: int
    idle_s: float
    num_uses: int
    within_s: float
    def __init__(self, kv: _Optional[str] = ..., namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., page_size: _Optional[int] = ..., idle_s: _Optional[float] = ..., num_uses: _Optional[int] = ..., within_s: _Optional[float] = ...) -> None: ...

class OfferEnded(_message.Message):
    __slots__ = ("outcome", "num_pages")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[OfferEnded.Outcome]
        OUTCOME_TAKEN: _ClassVar[OfferEnded.Outcome]
        OUTCOME_KNOWN: _ClassVar[OfferEnded.Outcome]
        OUTCOME_FULL: _ClassVar[OfferEnded.Outcome]
        OUTCOME_REFUSED: _ClassVar[OfferEnded.Outcome]
        OUTCOME_FAILED: _ClassVar[OfferEnded.Outcome]
    OUTCOME_UNSPECIFIED: OfferEnded.Outcome
    OUTCOME_TAKEN: OfferEnded.Outcome
    OUTCOME_KNOWN: OfferEnded.Outcome
    OUTCOME_FULL: OfferEnded.Outcome
    OUTCOME_REFUSED: OfferEnded.Outcome
    OUTCOME_FAILED: OfferEnded.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    outcome: OfferEnded.Outcome
    num_pages: int
    def __init__(self, outcome: _Optional[_Union[OfferEnded.Outcome, str]] = ..., num_pages: _Optional[int] = ...) -> None: ...

class ProbeGreeting(_message.Message):
    __slots__ = ("out", "into")
    OUT_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    out: bool
    into: bool
    def __init__(self, out: _Optional[bool] = ..., into: _Optional[bool] = ...) -> None: ...

class ProbeAsk(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeOffer(_message.Message):
    __slots__ = ("pages", "page_size")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    page_size: int
    def __init__(self, pages: _Optional[_Iterable[int]] = ..., page_size: _Optional[int] = ...) -> None: ...

class ProbeCheck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeFound(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: int
    def __init__(self, digest: _Optional[int] = ...) -> None: ...

class ProbeEnd(_message.Message):
    __slots__ = ("path", "bytes_per_s", "reason")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes_per_s: float
    reason: str
    def __init__(self, path: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineMetadata(_message.Message):
    __slots__ = ("version", "worker_address", "pool_key", "pool_base", "layout", "process_scope", "pid", "process_started", "ucx_version", "device_kind", "device_handle", "backend", "link_key", "addresses")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_KEY_FIELD_NUMBER: _ClassVar[int]
    POOL_BASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STARTED_FIELD_NUMBER: _ClassVar[int]
    UCX_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LINK_KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    version: int
    worker_address: bytes
    pool_key: bytes
    pool_base: int
    layout: _bootstrap_pb2.KvLayout
    process_scope: str
    pid: int
    process_started: int
    ucx_version: str
    device_kind: str
    device_handle: bytes
    backend: str
    link_key: bytes
    addresses: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[int] = ..., worker_address: _Optional[bytes] = ..., pool_key: _Optional[bytes] = ..., pool_base: _Optional[int] = ..., layout: _Optional[_Union[_bootstrap_pb2.KvLayout, _Mapping]] = ..., process_scope: _Optional[str] = ..., pid: _Optional[int] = ..., process_started: _Optional[int] = ..., ucx_version: _Optional[str] = ..., device_kind: _Optional[str] = ..., device_handle: _Optional[bytes] = ..., backend: _Optional[str] = ..., link_key: _Optional[bytes] = ..., addresses: _Optional[_Iterable[bytes]] = ...) -> None: ...
