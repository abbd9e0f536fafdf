"""What workers tell of themselves, as values: made when it comes, not whenever a request asks for it."""

from __future__ import annotations

from diptych.kvtransfer.layout import DTYPE_NBYTES
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1 import bootstrap_pb2


def reported_load(load: bootstrap_pb2.WorkerLoad, page_size: int) -> WorkerLoad:
    return WorkerLoad(
        num_requests=load.num_waiting + load.num_running,
        queued_tokens=load.waiting_tokens,
        free_tokens=load.free_pages * page_size,
        has_credit=load.grantable_pages > 0,
        queued_transfer_bytes=load.queued_transfer_bytes,
        link_speeds={link.peer_instance_id: link.bytes_per_s for link in load.link_speeds},
        num_queued=load.num_waiting_prompts,
        context_tokens=(load.total_pages - load.free_pages) * page_size,
    )


def token_bytes(layout: bootstrap_pb2.KvLayout) -> int:
    """Return how much KV a token takes, of all ranks of a worker."""
    return sum(map(_region_token_bytes, layout.regions))


def _region_token_bytes(region: bootstrap_pb2.KvRegion) -> int:
    rows = len(region.layers) * region.num_planes * region.total_heads
    return rows * region.head_dim * DTYPE_NBYTES.get(region.dtype, 0)
