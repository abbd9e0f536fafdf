"""Opens the tiers of a scheduler that outlive it, where the options name some; only then is this imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.engine.cache.beside import Beside
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import MIB, largest_page_nbytes, rank_share
from diptych.engine.options.store_url import directory_of, is_valkey
from diptych.engine.scheduler.lasting import LastingTiers
from diptych.engine.scheduler.terms import file_terms, store_terms
from diptych.engine.tensor_parallel.group import RankGroup
from diptych.engine.tensor_parallel.parts.ranked_files import RankFiles
from diptych.engine.tensor_parallel.parts.ranked_objects import RankObjects
from diptych.engine.tensor_parallel.tp_model_worker import RankMedium, TpModelWorker
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import PageFormat, rank_terms, terms_digest
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.runs import run_pages
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.tiers.stores.directory_store import open_directory
from diptych.engine.tiers.stores.object_room import Room
from diptych.engine.tiers.stores.object_store import open_bucket
from diptych.engine.tiers.stores.valkey_store import open_valkey
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.kvtransfer.layout import PoolLayout

END_NBYTES: Final = 64 * MIB  # of what is kept behind a text in one object, at most


class PoolInHostMemory(Protocol):
    """What is needed of a `Hardware`."""

    @property
    def options(self) -> EngineOptions: ...

    @property
    def device_name(self) -> str: ...

    def pool_bytes(self) -> memoryview: ...


def open_lasting_tiers(
    source: ModelSource, layout: PoolLayout, hardware: PoolInHostMemory, copier: PageCopier, ranks: RankGroup
) -> LastingTiers:
    """Return those that the options name, of all ranks, below the pool, or below host memory if there is some.

    `copier` is that of rank 0 alone. Raises `ConfigError`.
    """
    options = hardware.options
    files = None
    if options.file_cache_dir:
        files = FileTier(ranks.lead_files(open_files(source, layout, hardware, copier, None)))
    return LastingTiers(files, _shared(source, layout, hardware, ranks) if options.shared_cache else None)


def open_rank_tiers(
    source: ModelSource,
    layout: PoolLayout,
    hardware: PoolInHostMemory,
    copier: PageCopier,
    worker: TpModelWorker,
    rank: int,
) -> Sequence[RankMedium]:
    """Return another rank's parts of those that the options name, as rank 0 says. Raises `ConfigError`."""
    options, lasting = hardware.options, list[RankMedium]()
    if options.file_cache_dir:
        lasting.append(RankFiles(open_files(source, layout, hardware, copier, worker.files_number())))
    if options.shared_cache:
        said = worker.store()
        terms = rank_terms(said.terms, rank)
        record, beside = PageFormat(terms, layout.page_nbytes), _beside(source, layout, options)
        lasting.append(RankObjects(_objects(hardware, layout, Objects(record, said.run_pages, terms.hex(), beside))))
    return lasting


def open_files(
    source: ModelSource, layout: PoolLayout, hardware: PoolInHostMemory, copier: PageCopier, number: int | None
) -> PageFiles:
    """Return the files of one rank, in the folder of this number or the first that is free. Raises `ConfigError`."""
    options = hardware.options
    if options.device == "cuda":
        raise ConfigError(
            "--file-cache-dir keeps pages of CPUs only: leave it out on GPUs (--host-cache-mib keeps theirs)"
        )
    record = SegmentFormat(terms_digest(file_terms(source, layout, options, hardware.device_name)), layout.page_nbytes)
    pool = _pages(hardware, layout)
    above = copier.slots if isinstance(copier, HostPages) else pool
    folder, nbytes = Path(options.file_cache_dir).expanduser(), rank_share(layout, options.file_cache_mib * MIB)
    return PageFiles(folder, record, nbytes, above, pool, number=number)


def _shared(source: ModelSource, layout: PoolLayout, hardware: PoolInHostMemory, ranks: RankGroup) -> SharedTier:
    options = hardware.options
    if options.device == "cuda":
        raise ConfigError("--shared-cache keeps pages of CPUs only: leave it out on GPUs")
    beside = _beside(source, layout, options)
    terms = terms_digest(store_terms(source, layout, options, hardware.device_name))
    record = PageFormat(terms, layout.page_nbytes)
    others = [rank_terms(terms, rank).hex() for rank in range(1, options.num_ranks)]
    largest = PageFormat(terms, largest_page_nbytes(layout, source.config, options)).record_nbytes
    objects = Objects(record, run_pages(layout.page_size, largest), terms.hex(), beside, others)
    return SharedTier(ranks.lead_objects(_objects(hardware, layout, objects)))


def _objects(hardware: PoolInHostMemory, layout: PoolLayout, objects: Objects) -> PageObjects:
    """Return the objects of one rank. Raises `ConfigError`."""
    options, pool = hardware.options, _pages(hardware, layout)
    url = options.shared_cache
    if (folder := directory_of(url)) is not None:
        directory = open_directory(url, folder)
        return PageObjects(directory, objects, pool, Room(directory, options.shared_cache_mib * MIB))
    return PageObjects(open_valkey(url) if is_valkey(url) else open_bucket(url), objects, pool)


def _beside(source: ModelSource, layout: PoolLayout, options: EngineOptions) -> Beside:
    """Return what is kept beside pages of tokens. Raises `ConfigError` where that is too large for an object."""
    states = pages_per_state(source.config, options.tp, options.dtype, layout)
    beside = Beside(window_pages(source.config, 1), states, layout.page_size)
    mib = beside.most_places * largest_page_nbytes(layout, source.config, options) / MIB
    if mib * MIB > END_NBYTES:
        raise ConfigError(
            f"--shared-cache keeps at most {END_NBYTES // MIB} MiB behind a text, and windows and states of this model"
            f" take up to {mib:.0f} MiB there: leave it out" + (", or give --kv-windows keep" if not states else "")
        )
    return beside


def _pages(hardware: PoolInHostMemory, layout: PoolLayout) -> Any:
    """Return the pool: bytes `[num_pages, page_nbytes]`."""
    return np.frombuffer(hardware.pool_bytes(), np.uint8, layout.nbytes).reshape(layout.num_pages, -1)
