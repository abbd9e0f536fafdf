from __future__ import annotations

from diptych.kvtransfer.probe.choice import PathRule

PATHS = ("copy", "put", "message")


def test_without_wishes_every_path_is_allowed() -> None:
    assert PathRule().allowed(PATHS, "tcp/eth0") == PATHS


def test_a_pinned_path_is_the_only_one() -> None:
    assert PathRule("put").allowed(PATHS, "sysv/memory") == ("put",)
    assert PathRule("mover").allowed(PATHS, "sysv/memory") == ()
    words = "there is no path mover to this peer, as --kv-path asks for; there is: copy, put, message"
    assert PathRule("mover").refusal(PATHS, "sysv/memory") == words


def test_what_is_slower_than_required_is_not_allowed() -> None:
    rule = PathRule("auto", "shm")
    assert rule.allowed(("put", "message"), "tcp/eth0") == ()
    assert rule.allowed(PATHS, "tcp/eth0") == ("copy",)
    assert rule.allowed(PATHS, "sysv/memory") == PATHS
    words = "its pages go over tcp/eth0 (put), and --kv-require asks for shm"
    assert rule.refusal(("put", "message"), "tcp/eth0") == words
