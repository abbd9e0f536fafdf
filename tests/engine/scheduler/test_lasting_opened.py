"""What outlives a scheduler is opened for those whose pages it keeps, and refused in words for others."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.cache.host_tier import NO_COPIER
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import rank_share
from diptych.engine.scheduler import lasting_opened as lasting
from diptych.engine.scheduler.lasting_opened import open_lasting_tiers
from diptych.engine.scheduler.terms import file_terms, store_terms
from diptych.engine.tensor_parallel.group import SingleRank
from diptych.engine.tiers.page_format import terms_digest
from diptych.kvtransfer.layout import PoolLayout

LAYOUT = PoolLayout.kv(8, 2, 8, 2, 16, "float32")
STORE = EngineOptions(device="cpu", shared_cache="s3://bucket/kv", dtype="float32")


def opened(folder: Path, **changes: Any) -> None:
    options = EngineOptions(**{"device": "cpu", "shared_cache": "s3://bucket/kv", "dtype": "float32", **changes})
    hardware: Any = SimpleNamespace(options=options, device_name="CPU")
    open_lasting_tiers(open_model(str(folder)), LAYOUT, hardware, NO_COPIER, SingleRank())


def test_gpus_and_what_is_too_large_for_an_object_are_refused(
    tiny_folder: Path, tiny_recurrent_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--shared-cache keeps pages of CPUs only"):
        opened(tiny_folder, device="cuda")
    with pytest.raises(ConfigError, match="--file-cache-dir keeps pages of CPUs only"):
        opened(tiny_folder, device="cuda", file_cache_dir="kv", file_cache_mib=1)
    monkeypatch.setattr(lasting, "END_NBYTES", 1)
    with pytest.raises(ConfigError, match="--shared-cache keeps at most 0 MiB behind a text"):
        opened(tiny_recurrent_folder)


def test_copies_of_weights_share_a_store_and_edited_ones_do_not(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    weights = copy / "model.safetensors"

    def terms(folder: Path, of: Any) -> Any:
        return of(open_model(str(folder)), LAYOUT, STORE, "CPU")

    os.utime(weights, (1, 1))
    assert terms(copy, file_terms) != terms(tiny_folder, file_terms), "files are one machine's"
    assert terms(copy, store_terms) == terms(tiny_folder, store_terms)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 + 301] ^= 1  # between two samples
    weights.write_bytes(data)
    os.utime(weights, (1, 1))
    assert open_model(str(copy)).weights_id == open_model(str(tiny_folder)).weights_id
    assert terms(copy, store_terms) != terms(tiny_folder, store_terms)


def test_stages_share_a_store_and_a_files_room_by_the_bytes_of_their_pages(tiny_folder: Path) -> None:
    """Names of what other ranks keep follow from rank 0's terms, which say where all stages begin."""
    config = replace(open_model(str(tiny_folder)).config, num_layers=7)
    source: Any = SimpleNamespace(config=config, weights_id="weights", weight_files=[])
    every, region = tuple(range(7)), LAYOUT.sole_region
    stages = [replace(region, layers=layers, total_layers=every) for layers in (every[:4], every[4:])]
    layouts = [replace(LAYOUT, regions=(each,), num_ranks=2) for each in stages]
    assert [rank_share(each, 7 << 20) for each in layouts] == [2 << 20, 3 << 19]
    assert rank_share(LAYOUT, 7 << 20) == 7 << 20
    found = [terms_digest(file_terms(source, layouts[0], replace(STORE, pp=pp), "CPU")) for pp in (1, 2, 3)]
    assert len({*found}) == 3


def test_pages_without_states_are_those_of_the_version_that_knew_no_units_of_states(tiny_folder: Path) -> None:
    source: Any = SimpleNamespace(config=open_model(str(tiny_folder)).config, weights_id="weights", weight_files=[])
    found = terms_digest(file_terms(source, LAYOUT, STORE, "CPU"))
    assert found.hex() == "7b9f633a4f7fd8b7a855e218c74d8a45", "what lies in files and stores is begun anew: say so"
    with_states = replace(LAYOUT, state_nbytes=256)
    assert terms_digest(file_terms(source, with_states, STORE, "CPU")) != found
