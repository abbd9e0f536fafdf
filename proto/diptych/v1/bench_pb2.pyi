from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class BenchPeer(_message.Message):
    __slots__ = ("instance_id", "engine_metadata", "num_pages")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_METADATA_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    engine_metadata: bytes
    num_pages: int
    def __init__(self, instance_id: _Optional[int] = ..., engine_metadata: _Optional[bytes] = ..., num_pages: _Optional[int] = ...) -> None: ...

class BenchPages(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class BenchDigest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: int
    def __init__(self, digest: _Optional[int] = ...) -> None: ...
