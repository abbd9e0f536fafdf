from __future__ import annotations

from pathlib import Path

import zmq

from diptych.engine.options.node_place import NodePlace
from diptych.engine.tensor_parallel.channels import BesideLeader, LeaderChannels, NodeChannels, keep_key, make_keys
from diptych.engine.tensor_parallel.company import NodesLead, reaching
from diptych.engine.tensor_parallel.meeting import StoreMeeting
from diptych.engine.tensor_parallel.rank_log import RankLog
from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker
from diptych.v1 import rank_pb2

WAIT_MS = 60_000  # only for what hangs
HERE = NodePlace(0, 2, "127.0.0.1", "lo")


def folder(path: Path, name: str) -> str:
    (path / name).mkdir()
    return f"ipc://{path}/{name}/scheduler"


def test_ranks_on_all_nodes_apply_one_log_and_learn_from_it_where_to_meet(tmp_path: Path) -> None:
    here, there = folder(tmp_path, "0"), folder(tmp_path, "1")
    make_keys(here)
    told: list[rank_pb2.RankDoors] = []
    lead = NodesLead(here, HERE, 3, told.append)
    (doors,) = told
    assert set(doors.ports) == {"1", "1-back", "2", "2-back", "events", "restores", "tasks"}
    keep_key(there, doors.key)
    log = lead.open_log(3)
    places = {1: (here, HERE), 2: (there, NodePlace(1, 2, "127.0.0.1", "lo", dict(doors.ports)))}
    broken: list[str] = []
    workers = [TpModelWorker(reaching(*places[rank], broken.append), rank) for rank in (1, 2)]
    meeting = lead.meeting(log)
    for worker in workers:
        joined = StoreMeeting.join(worker.meeting(), "lo", 2)
        assert joined.secret() == meeting.secret()
        worker.report_loaded_model()
    assert [answer.is_loaded for answer in log.answers()] == [True, True]
    for worker in workers:
        worker.close()
    log.close()


def test_who_has_another_key_gets_nothing_of_the_log(tmp_path: Path) -> None:
    ours, theirs = folder(tmp_path, "ours"), folder(tmp_path, "theirs")
    make_keys(ours)
    make_keys(theirs)
    channels = LeaderChannels(ours, "127.0.0.1")
    log = RankLog(channels, 2)
    stranger = NodeChannels(theirs, "127.0.0.1", channels.doors().ports, print).connect(zmq.PAIR, "1")
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    plain.connect(f"tcp://127.0.0.1:{channels.doors().ports['1']}")
    rank = BesideLeader(ours).connect(zmq.PAIR, "1")
    assert rank.poll(WAIT_MS, zmq.POLLOUT), "only now, when the others have been tried"
    log.append(rank_pb2.RankEntry(open_files=3))
    assert rank.poll(WAIT_MS), "the one with the key gets it"
    assert not stranger.poll(0)
    assert not plain.poll(0)
    for socket in (rank, stranger, plain):
        socket.close(linger=0)
    log.close()
