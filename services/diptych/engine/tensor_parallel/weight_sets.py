"""The weights that one rank serves, and how others take their place: the same on every rank, at the same step.

*Beside*: others are loaded while these serve (`prepare`), and `switch` changes places between two steps; `back` undoes
it. *In place*: while nothing runs, parts are replaced one after the other (`replace`), and need no room for two sets.
What has begun in place can't be undone: who replaces is told what is lacking, and until it has come no step may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from diptych.checkpoints.given_tensors import GivenTensors, RenamedWeights, weights_id_of
from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine.tensor_parallel.trainer_groups import GroupAddress, NoGroups, TrainerGroups
from diptych.engine.tensor_parallel.weight_change import Change, change_to_wire, group_to_wire
from diptych.v1 import rank_pb2

if TYPE_CHECKING:
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.tensor_parallel.rank_tasks import LeadTasks
    from diptych.kernels.quantized import Array

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Served(Generic[R_co]):
    """A model that can run."""

    model: str  # as for --model; empty: it is in no files
    source: ModelSource
    runner: R_co
    version: str


class InPlace(Protocol[R_co]):
    """A model whose parts are being replaced."""

    def release(self) -> None:
        """Free the memory of the weights, all of which are to come then."""
        ...

    def take(self, source: ModelSource) -> None:
        """Take what there is of a checkpoint. Raises `ConfigError`; then the model is neither old nor new."""
        ...

    def want_all(self) -> None:
        """Have nothing of the weights stay: what is left of them is of several sets."""
        ...

    def lacking(self) -> list[str]:
        """Return the tensors that are lacking, as checkpoints name them."""
        ...

    def settle(self) -> None:
        """Complete the model: nothing is lacking."""
        ...

    def runner(self) -> R_co:
        """Return what runs the model from now on."""
        ...


@dataclass(frozen=True, slots=True)
class WeightLoader(Generic[R]):
    """How weights get into this process."""

    open: Callable[[str], ModelSource]
    load: Callable[[ModelSource], R]
    in_place: Callable[[R], InPlace[R]]
    misfit: Callable[[ModelSource, ModelSource], str | None]  # why one can't take the place of the other, in words
    groups: TrainerGroups = field(default_factory=NoGroups)


class WeightSets(Protocol[R_co]):
    """`check`, `prepare` and `replace` run in a thread, one at a time; the rest between two steps."""

    @property
    def served(self) -> Served[R_co]: ...

    def check(self, change: Change) -> None:
        """Raise `InvalidRequest` unless it can be put in place of what is served. Changes nothing.

        Raises what `check_in_place` does, too.
        """
        ...

    def check_in_place(self) -> None:
        """Raise `ConfigError` for a model whose weights can't be replaced in place, nor released. Changes nothing."""
        ...

    def prepare(self, change: Change) -> None:
        """Load a model beside the one that is served, in place of any that was loaded so. Raises `InvalidRequest`."""
        ...

    def replace(self, change: Change) -> Sequence[str]:
        """Put weights in place of those that are served; return what is lacking. Nothing may run.

        Whatever it raises, no rank has weights then: all of them are to come.
        """
        ...

    def join(self, address: GroupAddress) -> None:
        """Meet a trainer, in a thread, as all ranks do."""
        ...

    def leave(self, group: str) -> None: ...

    def switch(self) -> None:
        """Serve what is loaded; what was served is kept until `back` or `drop`."""
        ...

    def back(self) -> None: ...

    def drop(self) -> None:
        """Forget what is not served."""
        ...

    def release(self) -> None:
        """Free the memory of what is served; `replace` brings weights again. Nothing may run."""
        ...


class RankWeights(Generic[R]):
    """Implements `WeightSets` for the rank that it is on."""

    def __init__(self, model: str, source: ModelSource, loader: WeightLoader[R]) -> None:
        self._loader = loader
        self.served = Served(model, source, loader.load(source), "")
        self._other: Served[R] | None = None  # loaded, or served before
        self._in_place: InPlace[R] | None = None  # it is being changed
        self._is_mixed = False  # something has come for the change
        self._complete: tuple[Change, ModelSource] | None = None  # all of which has come
        self._digests: dict[str, str] = {}  # of the tensors that have come
        self._base = ""  # the weights that they change

    def check(self, change: Change) -> None:
        self.check_in_place()
        self._check_fits(change)

    def check_in_place(self) -> None:
        if self._in_place is None:
            self._loader.in_place(self.served.runner)

    def _check_fits(self, change: Change) -> None:
        if change.group:
            self._loader.groups.check(change.group)
        try:
            named = ((each.name, each.blank()) for each in change.tensors)
            self._misfit(self._source_of(change, named))
        except ConfigError as error:
            raise _refused(change, str(error)) from None

    def prepare(self, change: Change) -> None:
        self._other = None  # at most two sets in memory
        self._check_fits(change)
        try:
            source = self._loader.open(change.model)
            self._other = Served(change.model, source, self._loader.load(source), change.version)
        except ConfigError as error:
            raise _refused(change, str(error)) from None

    def replace(self, change: Change) -> Sequence[str]:
        lacking = self.take(change)
        if change.is_last and not lacking:
            self.settle()
        return lacking

    def take(self, change: Change) -> Sequence[str]:
        """The first half of `replace`; `settle` follows the last change when no rank lacks anything."""
        self._other = None
        try:
            return self._take(change)
        except BaseException:
            self.release()  # nobody shall take what is left for the half of something
            raise

    def _take(self, change: Change) -> Sequence[str]:
        if self._in_place is None or change.model:
            self._begin()
        assert self._in_place is not None
        source = self._source_of(change)
        self._is_mixed = True
        for part in self._portions(change, source):
            self._in_place.take(part)
            if isinstance(part, GivenTensors):
                self._digests |= part.digests()
        if not change.is_last:
            return ()
        self._complete = change, source
        return self._in_place.lacking()

    def settle(self) -> None:
        """Serve what has come. Raises as `replace` does."""
        assert self._in_place is not None, "something has come"
        assert self._complete is not None, "and all of it"
        try:
            self._in_place.settle()
            change, source = self._complete
            self.served = Served(change.model, self._named(source), self._in_place.runner(), change.version)
        except BaseException:
            self.release()
            raise
        self._in_place, self._complete, self._is_mixed = None, None, False

    def _begin(self) -> None:
        """Begin a change. Of one that never ended nothing stays, and what it left must not stay."""
        self._in_place, self._complete = self._loader.in_place(self.served.runner), None
        if self._is_mixed:
            self._in_place.want_all()
        self._digests, self._base = {}, self.served.source.weights_id

    def switch(self) -> None:
        if self._other is None:
            raise ConfigError("no weights are loaded for a switch")
        self.served, self._other = self._other, self.served

    def back(self) -> None:
        assert self._other is not None
        self.served, self._other = self._other, None

    def drop(self) -> None:
        self._other = None

    def release(self) -> None:
        self._other = None
        self._begin()
        assert self._in_place is not None
        self._in_place.release()

    def join(self, address: GroupAddress) -> None:
        self._loader.groups.join(address)

    def leave(self, group: str) -> None:
        self._loader.groups.leave(group)

    def _source_of(self, change: Change, named: Iterable[tuple[str, Array]] = ()) -> ModelSource:
        if change.model:
            return self._loader.open(change.model)
        if not change.files and not change.tensors:
            raise ConfigError("neither a model nor tensors are named")
        return GivenTensors(self.served.source, tuple(map(Path, change.files)), named)

    def _portions(self, change: Change, source: ModelSource) -> Iterator[ModelSource]:
        """Yield the source; what is broadcast a tensor at a time, as it comes."""
        if not change.group:
            yield source
            return
        for named in self._loader.groups.receive(change.group, change.tensors):
            yield GivenTensors(self.served.source, (), [named])

    def _misfit(self, source: ModelSource) -> None:
        """Raises `ConfigError`."""
        is_given = isinstance(source, GivenTensors)
        if not is_given and (problem := self._loader.misfit(source, self.served.source)):
            raise ConfigError(problem)
        lacking = check_places(source)
        if lacking and not is_given:
            raise ConfigError(f"the checkpoint lacks {', '.join(lacking[:5])}")

    def _named(self, source: ModelSource) -> ModelSource:
        """Return the source under the name of its weights: tensors that were given may be all or some."""
        if not isinstance(source, GivenTensors):
            return source
        from diptych.architectures.registry import placement_of

        is_all = {name for name, _ in placement_of(source.config)} <= self._digests.keys()
        weights_id = weights_id_of(self._digests, "" if is_all else self._base)
        self._digests = {}
        return RenamedWeights(self.served.source, weights_id)


class TensorParallelWeights(Generic[R]):
    """Implements `WeightSets` on rank 0, over its own and those of the other ranks."""

    def __init__(self, own: RankWeights[R], tasks: LeadTasks) -> None:
        self._own = own
        self._tasks = tasks

    @property
    def served(self) -> Served[R]:
        return self._own.served

    def check(self, change: Change) -> None:
        """On rank 0: the others read the same files."""
        self._own.check(change)

    def check_in_place(self) -> None:
        self._own.check_in_place()

    def prepare(self, change: Change) -> None:
        wanted = rank_pb2.RankTask(load_weights=change_to_wire(change))
        try:
            self._tasks.run(wanted, lambda: self._own.prepare(change))
        except BaseException:
            self.drop()
            raise

    def replace(self, change: Change) -> Sequence[str]:
        try:
            lacking = self._lacking(change)
            if change.is_last and not lacking:
                self._tasks.run(rank_pb2.RankTask(settle_weights=True), self._own.settle)
            return lacking
        except BaseException:
            self.release()  # of the ranks that have not failed, too
            raise

    def _lacking(self, change: Change) -> Sequence[str]:
        """Have every rank take its part; return what any rank lacks: another may have no part of it."""
        done = self._tasks.run(
            rank_pb2.RankTask(replace_weights=change_to_wire(change)), lambda: self._own.take(change)
        )
        return sorted({*done.own, *(name for end in done.ends for name in end.fingerprint.splitlines())})

    def join(self, address: GroupAddress) -> None:
        self._tasks.run(rank_pb2.RankTask(join_group=group_to_wire(address)), lambda: self._own.join(address))

    def leave(self, group: str) -> None:
        self._tasks.run(rank_pb2.RankTask(leave_group=group), lambda: self._own.leave(group))

    def switch(self) -> None:
        self._own.switch()
        self._tasks.log.append(rank_pb2.RankEntry(switch_weights=True))

    def back(self) -> None:
        self._own.back()
        self._tasks.log.append(rank_pb2.RankEntry(switch_back=True))

    def drop(self) -> None:
        self._own.drop()
        self._tasks.log.append(rank_pb2.RankEntry(drop_weights=True))

    def release(self) -> None:
        self._own.release()
        self._tasks.log.append(rank_pb2.RankEntry(release_weights=True))


def check_places(source: ModelSource) -> list[str]:
    """Look at the shape of every tensor; return the names of those that the model has and `source` has not.

    Raises `ConfigError` for one that has no place in the model.
    """
    from diptych.architectures.registry import placement_of

    config = source.config
    places = dict(placement_of(config))
    for name, array in source.tensors():
        pieces = places.pop(name, None)
        if pieces is None:
            raise ConfigError(f"{config.model_id}: tensor {name!r} has no place in this model, or comes twice")
        expected = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        if array.shape != expected:
            raise ConfigError(f"{config.model_id}: {name} is {array.shape}, the configuration says {expected}")
    return sorted(places)


def _refused(change: Change, problem: str) -> InvalidRequest:
    what = repr(change.model) if change.model else "these tensors"
    return InvalidRequest(f"cannot serve {what} here: {problem}", param="model" if change.model else "files")
