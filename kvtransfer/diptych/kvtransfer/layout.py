"""How the KV pool of a worker is laid out: page-major, so that a page is one contiguous piece for all layers.

A page is a list of regions, one behind the other: what a token has of some layers, in one form. Keys and values of all
layers are one region; a latent, side keys or the keys of other layers would be another. Whoever moves, converts or
counts pages goes through the list; nothing else knows how many regions there are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Final, Literal, get_args

from diptych.common.errors import ConfigError
from diptych.kernels.image import PageShape
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.v1 import bootstrap_pb2

KEYS_AND_VALUES: Final = 2  # planes
LINE_NBYTES: Final = 128  # what devices copy in

Reach = Literal["all", "window", "slot"]
"""What a region keeps of a request: every token, those of the last window, or one state."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which KV heads of a model a pool holds: those of one of several ranks."""

    rank: int
    num_ranks: int
    total_kv_heads: int  # of the model


@dataclass(frozen=True, slots=True)
class Region:
    """`[num_layers, num_planes, page_size, num_heads, head_dim]` of each page, contiguous."""

    layers: tuple[int, ...]  # of the model, ascending; empty: only other pipeline stages have some
    num_planes: int  # 2: keys, then values; 1: a latent for both
    num_heads: int  # that this pool holds
    head_dim: int
    dtype: str  # a key of DTYPE_NBYTES
    total_heads: int  # of the model, on all ranks
    reach: Reach = "all"
    total_layers: tuple[int, ...] = ()  # of the model, on all pipeline stages; empty: there is one, and has `layers`

    @property
    def model_layers(self) -> tuple[int, ...]:
        """Those of the region in the whole model."""
        return self.total_layers or self.layers

    def shape(self, page_size: int) -> tuple[int, int, int, int, int]:
        return (len(self.layers), self.num_planes, page_size, self.num_heads, self.head_dim)

    def head_nbytes(self, page_size: int) -> int:
        """Return the bytes of one head in one layer of a page."""
        return self.num_planes * page_size * self.head_dim * DTYPE_NBYTES[self.dtype]

    def layer_nbytes(self, page_size: int) -> int:
        return self.num_heads * self.head_nbytes(page_size)

    def nbytes(self, page_size: int) -> int:
        return len(self.layers) * self.layer_nbytes(page_size)

    def validate(self, page_size: int) -> None:
        """Raise `ConfigError` for a region that can't hold anything."""
        if self.dtype not in DTYPE_NBYTES:
            raise ConfigError(f"KV dtype must be one of {', '.join(DTYPE_NBYTES)}, not {self.dtype!r}")
        if min(len(self.model_layers), *self.shape(page_size)[1:]) < 1:
            raise ConfigError(f"every dimension of a KV pool must be at least 1: {self.shape(page_size)}")
        if any(one < 0 for one in self.layers) or any(one >= other for one, other in pairwise(self.layers)):
            raise ConfigError(f"layers of a KV region must ascend: {self.layers}")
        if self.total_layers:
            self._validate_stage()
        if self.layer_nbytes(page_size) % 8:
            raise ConfigError(f"a layer of a KV page must be a multiple of 8 bytes, not {self.layer_nbytes(page_size)}")
        if self.reach != "all":
            known = "is not held by pages yet" if self.reach in get_args(Reach) else "is unknown"
            raise ConfigError(f"a KV region of reach {self.reach!r} {known}")

    def _validate_stage(self) -> None:
        """Raise `ConfigError` unless the layers are neighbours among those of the model."""
        every = self.total_layers
        if every[0] < 0 or any(one >= other for one, other in pairwise(every)) or not {*self.layers} <= {*every}:
            raise ConfigError(f"layers of a KV region are not those of a stage: {self.layers} of {every}")
        first = every.index(self.layers[0]) if self.layers else 0
        if every[first : first + len(self.layers)] != self.layers:
            raise ConfigError(f"layers of a stage must follow each other in the model: {self.layers} of {every}")


@dataclass(frozen=True, slots=True)
class StateStage:
    """Which part of a state a pool has that is of one of several pipeline stages.

    Of each unit of its rank it has the cells of its layers: `[num_units // num_ranks, num_layers, cell_nbytes]`.
    """

    num_units: int  # of the model, on all ranks
    first_layer: int  # of those of the model that keep a state
    num_layers: int
    total_layers: int
    num_pages: int  # that a state takes: as many in all stages of a worker

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def validate(self, state_nbytes: int, num_ranks: int) -> None:
        """Raise `ConfigError` unless these are cells of whole lines of a state of so many bytes."""
        has_layers = 0 <= self.first_layer < self.first_layer + self.num_layers <= self.total_layers
        cells = self.num_units * self.total_layers
        if min(self.num_units, self.num_pages) < 1 or not has_layers or self.num_units % num_ranks:
            raise ConfigError(f"a stage can't have such a part of a state on {num_ranks} ranks: {self}")
        if state_nbytes < 1 or state_nbytes % (cells * LINE_NBYTES):
            raise ConfigError(f"a state of {state_nbytes} bytes has no {cells} cells in whole lines")


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """`num_pages` pages of `page_nbytes` bytes, one after the other."""

    num_pages: int
    page_size: int  # tokens a page
    regions: tuple[Region, ...]  # in the order in which they lie in a page
    rank: int = 0
    num_ranks: int = 1  # that share the heads of each region; ranks with other layers are not counted
    state_nbytes: int = 0  # of a state on all ranks, each of which has an equal run of it; 0: pages hold none
    state_stage: StateStage | None = None  # what of its run a rank has; None: all

    @staticmethod
    def kv(
        num_pages: int,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        share: HeadShare | None = None,  # None: the pool has all heads
    ) -> PoolLayout:
        """Return that of keys and values alone, `[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`."""
        whole = share or HeadShare(0, 1, num_kv_heads)
        layers = tuple(range(num_layers))
        region = Region(layers, KEYS_AND_VALUES, num_kv_heads, head_dim, dtype, whole.total_kv_heads)
        return PoolLayout(num_pages, page_size, (region,), whole.rank, whole.num_ranks)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each region begins in a page, bytes."""
        return tuple(accumulate((region.nbytes(self.page_size) for region in self.regions[:-1]), initial=0))

    @property
    def page_nbytes(self) -> int:
        return sum(region.nbytes(self.page_size) for region in self.regions)

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_nbytes

    @property
    def share_nbytes(self) -> int:
        """Bytes of a state that this rank has: a run of the whole, behind those of the ranks before it.

        Of a stage: what it has of that run, one cell behind the other.
        """
        run, stage = self.state_nbytes // self.num_ranks, self.state_stage
        return run if stage is None else run // stage.total_layers * stage.num_layers

    @property
    def pages_per_state(self) -> int:
        """Pages that a state takes here; 0: there are none."""
        return -(-self.share_nbytes // self.page_nbytes) if self.state_stage is None else self.state_stage.num_pages

    @property
    def num_layers(self) -> int:
        """The layers of the model: windows of layers are cut from these."""
        return 1 + max(region.model_layers[-1] for region in self.regions)

    @property
    def layer_nbytes(self) -> int:
        """The bytes of the smallest layer of a region: what of a page is moved at least."""
        return min(region.layer_nbytes(self.page_size) for region in self.regions)

    @property
    def page_shape(self) -> PageShape:
        """What kernels of a device are compiled for."""
        return PageShape(
            window_nbytes=self.layer_nbytes,
            dtypes=tuple(dict.fromkeys(region.dtype for region in self.regions)),
            head_dim=math.gcd(*(region.head_dim for region in self.regions)),
            head_nbytes=math.gcd(*(region.head_dim * DTYPE_NBYTES[region.dtype] for region in self.regions)),
        )

    @property
    def sole_region(self) -> Region:
        """The region of a pool that has no other."""
        (region,) = self.regions
        return region

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the pool as a tensor: of its sole region; of several `[num_pages, num_cells]`, side by side."""
        if len(self.regions) > 1:
            return (self.num_pages, self.page_nbytes // DTYPE_NBYTES[self.dtype])
        return (self.num_pages, *self.sole_region.shape(self.page_size))

    @property
    def dtype(self) -> str:
        """The dtype of all regions, which models compute with only if it is the same."""
        (dtype,) = {region.dtype for region in self.regions}
        return dtype

    def validate(self) -> None:
        """Raise `ConfigError` for a layout that can't hold anything."""
        if self.num_pages < 1 or not self.regions:
            raise ConfigError(f"a KV pool must have pages and regions, not {self.num_pages} and {len(self.regions)}")
        if self.num_ranks < 1:
            raise ConfigError(f"the heads of a KV pool belong to at least 1 rank, not {self.num_ranks}")
        if self.state_nbytes < 0 or self.state_nbytes % (LINE_NBYTES * self.num_ranks):
            raise ConfigError(f"{self.num_ranks} ranks can't share a state of {self.state_nbytes} bytes in whole lines")
        if self.state_stage is not None:
            self.state_stage.validate(self.state_nbytes, self.num_ranks)
            if self.share_nbytes > self.pages_per_state * self.page_nbytes:
                raise ConfigError(f"{self.pages_per_state} pages hold no part of a state of {self.share_nbytes} bytes")
        for region in self.regions:
            region.validate(self.page_size)


def layout_to_wire(layout: PoolLayout) -> bootstrap_pb2.KvLayout:
    """Return the message, whose fields have the names of ours."""
    return bootstrap_pb2.KvLayout(**asdict(layout))


def layout_from_wire(wire: bootstrap_pb2.KvLayout) -> PoolLayout:
    """Return what it says, for the reader to validate."""
    regions = tuple(map(_region_from_wire, wire.regions))
    stage = _state_stage_from_wire(wire.state_stage) if wire.HasField("state_stage") else None
    return PoolLayout(wire.num_pages, wire.page_size, regions, wire.rank, wire.num_ranks, wire.state_nbytes, stage)


def _state_stage_from_wire(wire: bootstrap_pb2.KvStateStage) -> StateStage:
    return StateStage(**{field.name: getattr(wire, field.name) for field in fields(StateStage)})


def _region_from_wire(wire: bootstrap_pb2.KvRegion) -> Region:
    said = {field.name: getattr(wire, field.name) for field in fields(Region)}
    return Region(**said | {"layers": tuple(wire.layers), "total_layers": tuple(wire.total_layers)})
