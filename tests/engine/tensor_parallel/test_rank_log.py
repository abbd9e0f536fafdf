from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from diptych.engine.tensor_parallel import rank_log
from diptych.engine.tensor_parallel.channels import HostChannels
from diptych.engine.tensor_parallel.rank_log import (
    RankLog,
    round_from_wire,
    round_to_wire,
    step_from_wire,
    step_to_wire,
)
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, StateMoves, WindowGroups
from diptych.engine.values.rounds import NOTHING as NO_PART
from diptych.engine.values.rounds import Part, Round
from diptych.v1 import rank_pb2

NOTHING = np.zeros(0, np.int64)


def batch(mode: ForwardMode, prompt_rows: PromptRows | None) -> ForwardBatch:
    return ForwardBatch(
        mode=mode,
        input_ids=np.array([5, 6, 7]),
        positions=np.array([0, 1, 9]),
        out_slots=np.array([64, 65, 2**40]),
        page_table=np.array([[4, 0], [3, 2]], np.int32),
        seq_lens=np.array([2, 10]),
        extend_lens=np.array([2, 1]),
        num_sampled=np.array([2, 0]),
        prompt_rows=prompt_rows,
        adapters=None if prompt_rows is None else np.array([3, -1]),
    )


def test_a_round_arrives_as_it_was_sent() -> None:
    common = Round((Part(5, 1, late_tokens=2, late_picked=1), Part(2, 2, is_plain=True), NO_PART))
    assert round_from_wire(round_to_wire(common, is_without_us=True)) == common


@pytest.mark.parametrize("mode", ForwardMode)
@pytest.mark.parametrize("prompt_rows", [None, PromptRows(np.array([0, 1]), np.array([0, 1]), 0)])
def test_a_step_arrives_as_it_was_sent(mode: ForwardMode, prompt_rows: PromptRows | None) -> None:
    sent = batch(mode, prompt_rows)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    np.testing.assert_equal(
        dataclasses.asdict(step_from_wire(rank_pb2.RankEntry.FromString(wire).step)), dataclasses.asdict(sent)
    )


def test_where_layers_with_a_window_have_their_pages_arrives_as_it_was_sent() -> None:
    windows = WindowGroups(
        np.arange(12, dtype=np.int32).reshape(3, 2, 2), np.array([[0, 1, 2], [3, 4, 5], [6, 7, 2**40]])
    )
    sent = dataclasses.replace(batch(ForwardMode.MIXED, None), window_groups=windows)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    found = step_from_wire(rank_pb2.RankEntry.FromString(wire).step)
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(sent))
    assert found.window_groups is not None
    assert found.window_groups.page_tables.flags.writeable, "torch takes no other"


@pytest.mark.parametrize("num_copies", [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_what_is_copied_of_states_arrives_as_it_was_sent(num_copies: tuple[int, int]) -> None:
    """It has as many pages a state as it had, even where there is nothing to copy."""
    num_read, num_written = num_copies
    moves = StateMoves(
        slots=np.array([3, 0]),
        cleared=np.array([0]),
        read_slots=np.arange(num_read),
        read_pages=np.arange(3 * num_read, dtype=np.int32).reshape(num_read, 3),
        written_slots=np.arange(num_written) + 1,
        written_pages=np.arange(3 * num_written, dtype=np.int32).reshape(num_written, 3) + 50,
        late_lens=np.array([2, 0]) if num_read else None,
    )
    sent = dataclasses.replace(batch(ForwardMode.MIXED, None), states=moves)
    wire = rank_pb2.RankEntry(step=step_to_wire(sent)).SerializeToString()
    found = step_from_wire(rank_pb2.RankEntry.FromString(wire).step).states
    assert found is not None
    assert (found.read_pages.shape, found.written_pages.shape) == ((num_read, 3), (num_written, 3))
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(moves))


class Copier:
    """Saves nothing."""

    def finish_saves(self) -> None:
        pass


class WatchedSocket:
    """A socket that notes which threads receive by it, and which send."""

    def __init__(self, socket: zmq.Socket[bytes], users: set[str]) -> None:
        self._socket = socket
        self._users = users

    def send(self, data: bytes, flags: int = 0) -> None:
        self._users.add("appends")
        self._socket.send(data, flags)

    def recv(self, flags: int = 0) -> bytes:
        self._users.add("receives")
        return self._socket.recv(flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class WatchedChannels(HostChannels):
    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.users: list[set[str]] = []

    def listen(self, kind: int, name: str) -> Any:
        self.users.append(set())
        return WatchedSocket(super().listen(kind, name), self.users[-1])


def test_no_thread_waits_for_answers_at_a_socket_to_which_another_appends(tmp_path: Path) -> None:
    channels = WatchedChannels(f"ipc://{tmp_path}/scheduler")
    log, worker, runner = RankLog(channels, 2), TpModelWorker(channels, 1), Any
    with ThreadPoolExecutor(1) as loop:
        asking = loop.submit(lambda: [log.ask(rank_pb2.RankEntry(finish_saves=True)), log.answers()])
        log.append(rank_pb2.RankEntry(finish_saves=True))
        while not asking.done():
            worker.apply_due(runner, None, Copier())  # type: ignore[arg-type]
    assert asking.result() == [[rank_pb2.RankAnswer(is_saved=True)]] * 2
    assert all(len(each) < 2 for each in channels.users)
    assert set().union(*channels.users) == {"appends", "receives"}
    worker.close()
    log.close()


def test_a_rank_is_ready_once_it_is_connected_by_all_its_channels(tmp_path: Path) -> None:
    """Their paths are removed then."""
    endpoint = f"ipc://{tmp_path}/scheduler"
    worker = TpModelWorker(HostChannels(endpoint), 1)
    ready = threading.Thread(target=worker.report_loaded_model)
    ready.start()
    log = RankLog(HostChannels(endpoint), 2)
    assert [answer.is_loaded for answer in log.answers()] == [True]
    ready.join()
    for path in tmp_path.iterdir():
        path.unlink()
    log.append(rank_pb2.RankEntry(open_files=3))
    assert worker.files_number() == 3
    worker.close()
    log.close()


def test_the_log_ends_only_when_a_rank_in_the_midst_of_a_step_has_read_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_log, "END_S", 60.0)
    channels = HostChannels(f"ipc://{tmp_path}/scheduler")
    log, worker = RankLog(channels, 2), TpModelWorker(channels, 1)
    log.append(rank_pb2.RankEntry(finish_saves=True))
    ending = threading.Thread(target=log.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    runner: Any = None
    while not worker.apply_due(runner, None, Copier()):  # type: ignore[arg-type]
        pass
    ending.join()
    worker.close()
