"""Weights are taken from a worker that runs, or not at all; then they are read from disk."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diptych.checkpoints.source import BlankModel, ModelSource, open_model
from diptych.engine.models.matrices.gpu_experts import GroupedExperts
from diptych.engine.runner import loaded_model
from diptych.engine.runner.kv_pool import new_kv
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model, load_with_draft
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.weights import door as door_module
from diptych.engine.weights import taking as taking_module
from diptych.engine.weights import wire
from diptych.engine.weights.door import WeightsDoor
from diptych.engine.weights.memory import WeightMemory, weight_memory
from diptych.engine.weights.taking import Taking
from diptych.engine.weights.wire import Giver, Piece, pieces_of
from diptych.kernels.cpu import library
from diptych.kernels.gpu.layers.fp8_experts import Fp8Experts
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix
from diptych.kernels.gpu.layers.int4_experts import Int4Experts, Int4Matrix
from diptych.kernels.gpu.layers.moe import ExpertWeights
from diptych.kernels.gpu.layers.mxfp4_experts import Mxfp4Experts, Mxfp4Matrix

HOST = "127.0.0.1"
HUNG_S = 60.0  # that nothing takes on however busy a machine
OPTIONS = ModelOptions("float32", max_loras=2)


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


@pytest.fixture(scope="module")
def kv(source: ModelSource) -> torch.Tensor:
    layout = ModelRunner.pool_layout(source.config, num_pages=4, page_size=16, dtype="float32")
    return new_kv(layout, torch.device("cpu"))


@pytest.fixture(scope="module")
def served(source: ModelSource, kv: torch.Tensor) -> LoadedModel:
    return load_model(source, kv, OPTIONS)


@pytest.fixture
def door(served: LoadedModel) -> Iterator[WeightsDoor]:
    opened = WeightsDoor(HOST, served.memory)
    yield opened
    opened.close()


def soon_s() -> float:
    return time.monotonic() + HUNG_S


def giver_of(door: WeightsDoor) -> Giver:
    return Giver(HOST, door.port, door.key)


def blank(source: ModelSource, kv: torch.Tensor, options: ModelOptions = OPTIONS) -> WeightMemory:
    """Return memory of the same form with zeros."""
    return load_model(BlankModel(source), kv, options).memory()


def same(one: WeightMemory, other: WeightMemory) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


@pytest.fixture
def from_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of sources whose tensors were read."""
    read = list[str]()
    original = loaded_model.load_model

    def recording(source: ModelSource, *others: Any, **named: Any) -> LoadedModel:
        read.append(type(source).__name__)
        return original(source, *others, **named)

    monkeypatch.setattr(loaded_model, "load_model", recording)
    return read


def test_what_is_taken_is_every_byte_of_the_other_one_and_nothing_is_read(
    source: ModelSource, kv: torch.Tensor, served: LoadedModel, door: WeightsDoor, from_disk: list[str]
) -> None:
    taking = Taking([giver_of(door)])
    taken = load_with_draft(source, None, kv, OPTIONS, taking=taking)
    assert from_disk == ["BlankModel"]
    assert not same(blank(source, kv), served.memory())
    assert same(taken.memory(), served.memory())
    assert taken.memory().form == served.memory().form
    assert (taking.nbytes, taking.num_failed) == (served.memory().nbytes, 0)
    assert {part.data_ptr() for part in taken.memory().parts}.isdisjoint(
        part.data_ptr() for part in served.memory().parts
    )


@contextlib.contextmanager
def crowd(answer: Callable[[socket.socket, bytes], None]) -> Iterator[Giver]:
    """Listen as a giver that answers in its own way."""
    key = bytes(wire.KEY_NBYTES)
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError, wire.Refused):
                sock, _ = listener.accept()
                with sock:
                    answer(sock, key)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Giver(HOST, listener.getsockname()[1], key)
        thread.join()


def lies(sock: socket.socket, key: bytes, memory: WeightMemory, *, num_pieces: int, flip: bool) -> None:
    """Send the first pieces, with a bit that is another."""
    wire.prove(sock, key, b"giver", soon_s())
    wanted = wire.read_wanted(sock, soon_s())
    wire.answer(sock, memory.nbytes)
    sizes = [len(part) for part in memory.parts]
    for piece in pieces_of(sizes, wanted.stream, wanted.num_streams)[:num_pieces]:
        data = bytearray(memory.parts[piece.part][piece.begin : piece.end].numpy().tobytes())
        sock.sendall(wire.digest(memoryview(data)))
        data[-1] ^= flip
        sock.sendall(data)


WRONG: dict[str, Callable[[socket.socket, bytes, WeightMemory], None]] = {
    "a bit is another": lambda sock, key, memory: lies(sock, key, memory, num_pieces=99, flip=True),
    "it dies in the midst": lambda sock, key, memory: lies(sock, key, memory, num_pieces=2, flip=False),
    "it dies at once": lambda sock, key, memory: None,
    "it has another key": lambda sock, key, memory: wire.prove(sock, key[::-1] + b"other", b"giver", soon_s()),
    "it gives nothing": lambda sock, key, memory: lies(
        sock, key, WeightMemory(memory.form, ()), num_pieces=0, flip=False
    ),
    "it has less": lambda sock, key, memory: lies(
        sock, key, replace(memory, parts=memory.parts[1:]), num_pieces=0, flip=False
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_whatever_is_wrong_weights_come_from_disk(
    what: str, source: ModelSource, kv: torch.Tensor, served: LoadedModel, from_disk: list[str]
) -> None:
    with crowd(lambda sock, key: WRONG[what](sock, key, served.memory())) as giver:
        taking = Taking([giver])
        loaded = load_with_draft(source, None, kv, OPTIONS, taking=taking)
    assert from_disk == ["BlankModel", "HfFolder"]
    assert same(loaded.memory(), served.memory())
    assert (taking.nbytes, taking.num_failed) == (0, 1)


def test_who_is_asked_in_vain_is_followed_by_the_next(
    source: ModelSource, kv: torch.Tensor, served: LoadedModel, door: WeightsDoor
) -> None:
    taking = Taking([giver_of(door)._replace(key=bytes(wire.KEY_NBYTES)), giver_of(door)])
    assert taking.fill(memory := blank(source, kv))
    assert taking.num_failed == 1
    assert same(memory, served.memory())


def test_a_giver_that_says_nothing_is_left(
    source: ModelSource, kv: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_module, "PATIENCE_S", 0.05)
    done = threading.Event()

    def say_nothing(sock: socket.socket, key: bytes) -> None:
        done.wait(HUNG_S)

    with crowd(say_nothing) as giver:
        assert not Taking([giver]).fill(blank(source, kv))
        done.set()


def test_a_giver_that_is_slow_is_left(
    source: ModelSource, kv: torch.Tensor, door: WeightsDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_module, "FIRST_S", 0.0)
    monkeypatch.setattr(taking_module, "LEAST_BYTES_PER_S", 1e15)
    assert not Taking([giver_of(door)]).fill(blank(source, kv))


@pytest.mark.parametrize("error", [RuntimeError("no pinned memory"), torch.OutOfMemoryError("none left")])
def test_who_has_no_memory_to_take_them_reads_from_disk(
    error: Exception,
    source: ModelSource,
    kv: torch.Tensor,
    door: WeightsDoor,
    from_disk: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(parts: object) -> None:
        raise error

    monkeypatch.setattr(taking_module, "new_staging", refuse)
    taking = Taking([giver_of(door)])
    load_with_draft(source, None, kv, OPTIONS, taking=taking)
    assert (from_disk, taking.nbytes, taking.num_failed) == (["BlankModel", "HfFolder"], 0, 1)


# which weights


def test_forms_differ_where_weights_or_what_is_made_of_them_do(
    source: ModelSource, kv: torch.Tensor, served: LoadedModel
) -> None:
    form = served.memory().form
    assert blank(source, kv).form == form
    assert blank(source, kv, replace(OPTIONS, max_requests=9)).form == form, "that is no weight"
    assert replace(served, weights_id="another").memory().form != form
    assert blank(source, kv, replace(OPTIONS, quantization="none")).form != form


class Layer:
    """A part of a model, with a counter that its kernel writes."""

    __module__ = "diptych.engine.models.layers"
    SCRATCH = ("_arrived",)

    def __init__(self, scale: float = 1.0, columns: int = 4) -> None:
        self.weight = torch.zeros(2, columns)
        self.turned = self.weight.T
        self.scale = scale
        self._arrived = torch.zeros(7)


def test_memory_is_all_storages_once_without_what_kernels_count_in() -> None:
    memory = weight_memory([Layer(), {"other": Layer()}], "id")
    assert [len(part) for part in memory.parts] == [32, 32]
    forms = [weight_memory([layer], "id").form for layer in (Layer(), Layer(), Layer(0.5), Layer(columns=5))]
    assert forms[0] == forms[1]
    assert len(set(forms)) == 3, "numbers that are no tensors are part of it, and shapes"


def test_forms_differ_between_processors_that_pack_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = iter((8, 16, 32))
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(diptych_panel=lambda: next(panels)))
    assert len({weight_memory([Layer()], "id").form for _ in range(3)}) == 3


def few_bits(kind: type[Int4Matrix] | type[Mxfp4Matrix]) -> Any:
    return kind(torch.ones(2, 16, 32, dtype=torch.int16), torch.ones(4, 16, dtype=torch.int32), 256)


EXPERTS: dict[str, Callable[[], Any]] = {
    "as they are": lambda: ExpertWeights.of([torch.ones(16, 16) for _ in range(3)]),
    "fp8": lambda: Fp8Experts.of(
        [Fp8Matrix(torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1), 0) for _ in range(3)]
    ),
    "int4": lambda: Int4Experts.of([few_bits(Int4Matrix) for _ in range(3)]),
    "mxfp4": lambda: Mxfp4Experts.of([few_bits(Mxfp4Matrix) for _ in range(3)]),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_addresses_of_experts_are_no_weights_and_their_matrices_are(kind: str) -> None:
    experts = [EXPERTS[kind]() for _ in range(2)]
    both = [weight_memory(GroupedExperts(each, each, lambda gate_up, out: None), "id") for each in experts]
    assert both[0].form == both[1].form
    matrices = experts[0].tensors if kind == "as they are" else experts[0].matrices
    tensors = [each for matrix in matrices for each in tensors_of(matrix)]
    assert sorted(map(len, both[0].parts)) == sorted(each.nbytes for each in tensors)
    places = {part.data_ptr() for part in both[0].parts}
    for part in both[0].parts:
        assert places.isdisjoint(part.view(torch.int64).tolist())


def tensors_of(matrix: Any) -> list[torch.Tensor]:
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    return [each for name in matrix.__slots__ if isinstance(each := getattr(matrix, name), torch.Tensor)]


def test_nothing_is_given_that_is_not_served_any_more(
    source: ModelSource, kv: torch.Tensor, served: LoadedModel
) -> None:
    other = replace(served, weights_id="others that were loaded in their place")
    door = WeightsDoor(HOST, other.memory)
    assert not Taking([giver_of(door)]).fill(blank(source, kv))
    door.close()


# the door


def test_who_does_not_know_the_key_hears_nothing(door: WeightsDoor, served: LoadedModel) -> None:
    with socket.create_connection((HOST, door.port), HUNG_S) as sock:
        sock.sendall(bytes(32 + 32))
        sock.sendall(wire._WANTED.pack(served.memory().form.encode(), 0, 1))
        heard = b""
        while data := _read(sock):
            heard += data
    assert len(heard) <= 64, "random bytes and a proof"
    assert door.num_given == 0


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_proof_is_worth_nothing_for_the_other_side_or_the_next_connection() -> None:
    one, other = socket.socketpair()
    with one, other:

        def reflect() -> None:
            for _ in range(2):
                other.sendall(wire.received(other, 32, soon_s()))

        mirror = threading.Thread(target=reflect)
        mirror.start()
        with pytest.raises(wire.Refused):
            wire.prove(one, b"key", b"giver", soon_s())
        mirror.join()


@pytest.mark.parametrize("wanted", [wire.Wanted("f" * 32, 1, 1), wire.Wanted("f" * 32, 0, wire.MAX_STREAMS + 1)])
def test_streams_that_can_not_be_are_refused(wanted: wire.Wanted) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(wire._WANTED.pack(wanted.form.encode(), wanted.stream, wanted.num_streams))
        with pytest.raises(wire.Refused):
            wire.read_wanted(other, soon_s())


def test_no_more_are_let_in_than_are_served(
    served: LoadedModel, source: ModelSource, kv: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", HUNG_S)
    door = WeightsDoor(HOST, served.memory)
    idle = [socket.create_connection((HOST, door.port), HUNG_S) for _ in range(wire.MAX_STREAMS)]
    for sock in idle:
        wire.received(sock, 32, soon_s())  # each is served
    assert not Taking([giver_of(door)]).fill(blank(source, kv))
    for sock in idle:
        sock.close()
    door.close()


def test_who_brings_a_byte_now_and_then_is_let_out_in_time(
    served: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", 0.2)
    door = WeightsDoor(HOST, served.memory)
    with socket.create_connection((HOST, door.port), HUNG_S) as sock:
        wire.received(sock, 32, soon_s())
        began_s, is_open = time.monotonic(), True
        sock.settimeout(0.05)  # between two bytes
        while is_open and time.monotonic() < began_s + HUNG_S:
            try:
                sock.sendall(b"a")
                is_open = bool(sock.recv(1))
            except TimeoutError:
                continue
            except OSError:
                is_open = False
    assert not is_open
    door.close()


def test_closing_waits_for_nobody_who_says_or_takes_nothing(
    served: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE_S", 10 * HUNG_S)
    memory = WeightMemory(served.memory().form, [torch.zeros(wire.PIECE_NBYTES * 4, dtype=torch.uint8)])
    door = WeightsDoor(HOST, lambda: memory)
    with (
        socket.create_connection((HOST, door.port), HUNG_S) as silent,
        socket.create_connection((HOST, door.port)) as full,
    ):
        wire.received(silent, 32, soon_s())
        wire.prove(full, door.key, b"taker", soon_s())
        assert wire.ask(full, wire.Wanted(memory.form, 0, 1), soon_s()) == memory.nbytes  # and takes none of them
        closing = threading.Thread(target=door.close, daemon=True)
        closing.start()
        closing.join(HUNG_S)
        assert not closing.is_alive()


def test_a_door_without_descriptors_tries_again_after_a_rest(served: LoadedModel) -> None:
    door = WeightsDoor(HOST, served.memory)
    original, tries, again = door._listener, list[float](), threading.Event()

    class Exhausted:
        def accept(self) -> None:
            tries.append(time.monotonic())
            if len(tries) == 2:
                again.set()
            raise OSError(errno.EMFILE, "too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    door._listener = Exhausted()  # type: ignore[assignment]
    with socket.create_connection((HOST, door.port), HUNG_S):  # the accept that was waiting ends
        assert again.wait(HUNG_S)
    door.close()
    assert tries[1] - tries[0] > door_module.RETRY_S / 2


def test_pieces_of_all_streams_are_all_bytes_once() -> None:
    sizes = [3, wire.PIECE_NBYTES, 2 * wire.PIECE_NBYTES + 5]
    for num_streams in (1, 2, 4):
        covered = [np.zeros(size, np.int8) for size in sizes]
        for stream in range(num_streams):
            for piece in pieces_of(sizes, stream, num_streams):
                assert isinstance(piece, Piece)
                covered[piece.part][piece.begin : piece.end] += 1
        assert all((each == 1).all() for each in covered)
