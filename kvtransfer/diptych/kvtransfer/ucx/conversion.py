"""Values of the transport to and from the C shim's structures."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Final

from diptych.kernels.page_pack import PartsStruct, pack_struct, parts_struct
from diptych.kvtransfer.errors import NoteTooLong, PageOutOfRange, PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.metadata import EngineMetadata
from diptych.kvtransfer.plan import Parts
from diptych.kvtransfer.pool import num_pages_to_allocate
from diptych.kvtransfer.runs import Runs
from diptych.kvtransfer.transport import InstanceId, LinkInfo
from diptych.kvtransfer.ucx import binding
from diptych.kvtransfer.ucx.options import UcxOptions, offers_remote_access, ucx_settings

_KEY: Final = ctypes.c_uint8 * binding.KEY_NBYTES

_REFUSALS: Final[Mapping[int, tuple[type[TransferError], str]]] = {
    binding.NO_LINK: (PeerUnreachable, "no link: it is not up"),
    binding.FULL: (TransferQueueFull, "too much is in flight"),
    binding.OUT_OF_RANGE: (PageOutOfRange, "a page index is outside of the pool"),
    binding.TOO_LONG: (NoteTooLong, "this note is longer than any may be"),
    binding.NO_PATH: (TransferError, "pages can't travel by that path on this link"),
    binding.BUSY: (TransferError, "operations of this link are open"),
    binding.DEVICE: (TransferError, "the device failed"),
}


def peer_description(metadata: EngineMetadata, *, is_mappable: bool) -> binding.Peer:
    """Return what to connect to; valid as long as `metadata` is."""
    address, pool_key = metadata.worker_address, metadata.pool_key
    handle = metadata.device_handle if is_mappable and metadata.device_handle else None
    return binding.Peer(
        address=ctypes.cast(ctypes.c_char_p(address), ctypes.c_void_p),
        address_len=len(address),
        pool_key=ctypes.cast(ctypes.c_char_p(pool_key), ctypes.c_void_p),
        pool_key_len=len(pool_key),
        pool_base=metadata.pool_base,
        num_pages=num_pages_to_allocate(metadata.layout),
        page_nbytes=metadata.layout.page_nbytes,
        device_handle=ctypes.cast(ctypes.c_char_p(handle), ctypes.c_void_p),
        key=_KEY.from_buffer_copy(metadata.link_key),
    )


def device_handle(own: binding.Peer) -> bytes:
    """Return what maps our pool in other processes; nothing if it can't be mapped as a device's memory."""
    return ctypes.string_at(own.device_handle, binding.HANDLE_NBYTES) if own.device_handle else b""


def write_operation(all_runs: Sequence[Runs], note: bytes, flow: Flow) -> binding.Operation:
    """Return an operation that is valid as long as its arguments are."""
    copies = (binding.Copy * len(all_runs))(*map(_copy, all_runs))
    return binding.Operation(
        num_copies=len(copies),
        copies=copies,
        note=note,
        note_len=len(note),
        stream=flow.stream,
        priority=flow.priority,
        with_digest=flow.with_digest,
        timeout_s=flow.timeout_s or 0,
    )


def _copy(runs: Runs) -> binding.Copy:
    copy = binding.Copy(
        num_pages=len(runs.dst),
        src=runs.src.ctypes.data,
        dst=runs.dst.ctypes.data,
        src_offset=runs.window.src,
        dst_offset=runs.window.dst,
        nbytes=runs.window.nbytes,
    )
    if runs.pack is not None:
        copy.pack = ctypes.pointer(pack_struct(runs.pack))
        copy.first_tokens, copy.num_src = runs.first_tokens.ctypes.data, len(runs.src)
    return copy


def page_parts(regions: Sequence[Parts]) -> ctypes.Array[PartsStruct]:
    """Return how parts lie in regions of a page."""
    structs = (
        parts_struct(parts.heads, num_rows=parts.num_rows, head_nbytes=parts.head_nbytes, offset=parts.offset)
        for parts in regions
    )
    return (PartsStruct * len(regions))(*structs)


def note_operation(note: bytes, stream: int, digest: int | None) -> binding.Operation:
    return binding.Operation(
        note=note, note_len=len(note), stream=stream, has_digest=digest is not None, digest=digest or 0
    )


def link_info(status: binding.LinkStatus, library: str) -> LinkInfo:
    return LinkInfo(
        lanes=", ".join(dict.fromkeys(status.lanes.decode().split(", "))),
        version=library,
        bytes_sent=status.bytes_sent,
        last_heard_s=status.last_heard_s,
        path=binding.PATHS[status.path],
        rtt_s=status.rtt_s or None,
        in_flight_bytes=status.in_flight_bytes,
        queued_bytes=status.queued_bytes,
    )


def shim_options(instance_id: InstanceId, link_key: bytes, options: UcxOptions) -> binding.Options:
    settings = ucx_settings(options.transports, os.environ)
    words = [word.encode() for pair in settings.items() for word in pair]
    return binding.Options(
        instance_id=instance_id,
        heartbeat_s=options.heartbeat_s,
        heartbeat_misses=options.heartbeat_misses,
        connect_timeout_s=options.connect_s,
        max_operations=options.max_operations,
        max_waiting_notes=options.max_waiting_notes,
        with_remote_access=offers_remote_access(options),
        only_granted=options.only_granted,
        key=_KEY.from_buffer_copy(link_key),
        settings=(ctypes.c_char_p * (len(words) + 1))(*words, None),
    )


def digest_of(event: binding.Event) -> int | None:
    return event.digest if event.has_digest else None


def accepted(status: int) -> int:
    """Return what the shim returned, unless it refused."""
    if status >= 0:
        return status
    if status == binding.OUT_OF_MEMORY:
        raise MemoryError("no memory for a transfer")
    refusal, words = _REFUSALS[status]
    raise refusal(words)
