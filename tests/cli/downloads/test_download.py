"""Downloads over sockets: whole, cut off, killed, damaged, two at once, without room."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from files_server import COMMIT, MODEL, FilesServer, sums
from small_disk import small_disk

from diptych.cli.downloads import file_download
from diptych.cli.downloads.manifest import ROOM, read_manifest
from diptych.cli.main import main

LARGE = "model-1.safetensors"
TOTAL = sum(map(len, MODEL.values()))
SMALL = sum(len(data) for name, data in MODEL.items() if name.endswith(".json"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_download, "FIRST_PAUSE_S", 0.001)


def download(*words: str) -> int:
    return main(["download", *words])


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def begun(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "diptych.cli", "download", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})


def test_a_model_of_a_hub_is_there_proven_and_nothing_beside_it(hub: FilesServer, tmp_path: Path) -> None:
    assert download("acme/tiny@v1", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.revision == COMMIT
    assert sum(hub.sent.values()) == TOTAL
    assert {path.name for path in (tmp_path / ROOM).iterdir()} == {"complete.json"}


def test_done_again_nobody_is_asked(hub: FilesServer, tmp_path: Path) -> None:
    assert download("acme/tiny", str(tmp_path)) == 0
    hub.asked.clear()
    assert download("hf://acme/tiny", str(tmp_path)) == 0
    assert download("acme/tiny", str(tmp_path), "--files=tokenizer") == 0
    assert hub.asked == []


def test_routers_fetch_no_weights_and_all_may_follow(hub: FilesServer, tmp_path: Path) -> None:
    assert download("acme/tiny", str(tmp_path), "--files=tokenizer") == 0
    assert held(tmp_path) == {name: data for name, data in MODEL.items() if name.endswith(".json")}
    assert sum(hub.sent.values()) == SMALL
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
    assert sum(hub.sent.values()) == TOTAL, "what was there was not fetched again"


def test_a_folder_of_a_web_server_is_listed_by_its_checksums(web: FilesServer, tmp_path: Path) -> None:
    web.token = "secret"
    assert download(f"{web.url}/tiny", str(tmp_path), "--bearer-token=secret") == 0
    assert held(tmp_path) == MODEL


def test_one_gguf_file_of_a_web_server_needs_none(server: FilesServer, tmp_path: Path) -> None:
    server.files["/x/a.gguf"] = b"GGUF"
    assert download(f"{server.url}/x/a.gguf", str(tmp_path)) == 0
    assert held(tmp_path) == {"a.gguf": b"GGUF"}


@pytest.fixture
def bucket(server: FilesServer, monkeypatch: pytest.MonkeyPatch) -> FilesServer:
    pytest.importorskip("obstore", reason="comes with diptych[store]")
    for name, value in {
        "AWS_ENDPOINT": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "us",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "here",
    }.items():
        monkeypatch.setenv(name, value)
    server.files |= {f"/bucket/models/tiny/{name}": data for name, data in MODEL.items()}
    return server


def test_a_bucket_is_proven_by_its_checksums(
    bucket: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket.files["/bucket/models/tiny/SHA256SUMS"] = sums(MODEL)
    bucket.cut_after[f"/bucket/models/tiny/{LARGE}"], bucket.num_cuts = 1_000_000, 2
    assert download("s3://bucket/models/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
    assert "no checksum" not in capfd.readouterr().err


def test_a_bucket_without_checksums_is_told_of_and_may_be_proven_by_etags(
    bucket: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert download("s3://bucket/models/tiny", str(tmp_path / "a")) == 0
    assert "no checksum is known of 4 files" in capfd.readouterr().err
    bucket.damaged[f"/bucket/models/tiny/{LARGE}"] = bytes(len(MODEL[LARGE]))
    assert download("s3://bucket/models/tiny", str(tmp_path / "b"), "--etag-is-md5") == 1
    assert f"{LARGE} is not what it should be: md5" in capfd.readouterr().err


def test_a_bucket_that_refuses_is_told_of(
    bucket: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket.statuses["/bucket"] = 403
    assert download("s3://bucket/models/tiny", str(tmp_path)) == 1
    assert "not allowed (403): give credentials" in capfd.readouterr().err
    assert download("s3://bucket/none", str(tmp_path)) == 1
    bucket.statuses.clear()
    assert download("s3://bucket/none", str(tmp_path)) == 1
    assert "there is nothing in it" in capfd.readouterr().err


def test_a_folder_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    for name, data in MODEL.items():
        (source / name).write_bytes(data)
    (source / "SHA256SUMS").write_bytes(sums(MODEL))
    assert download(f"file://{source}", str(tmp_path / "to")) == 0
    assert held(tmp_path / "to") == MODEL


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_cut_connections_are_gone_on_with(hub: FilesServer, tmp_path: Path, takes_ranges: bool) -> None:
    path = f"/acme/tiny/resolve/{COMMIT}/{LARGE}"
    hub.takes_ranges, hub.cut_after[path], hub.num_cuts = takes_ranges, 1_200_000, 1
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
    again = 0 if takes_ranges else 1_200_000  # a server without ranges sends it from the beginning
    assert len(MODEL[LARGE]) <= hub.sent[path] - again <= len(MODEL[LARGE]) + (1 << 20)


def test_a_source_that_sends_nothing_any_more_is_given_up(
    hub: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.statuses[LARGE] = 503
    assert download("acme/tiny", str(tmp_path)) == 1
    assert "HTTP status 503; after 6 tries" in capfd.readouterr().err
    assert read_manifest(tmp_path) is None
    hub.statuses.clear()
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL


@pytest.mark.integration
def test_a_killed_download_goes_on_where_it_was(hub: FilesServer, tmp_path: Path) -> None:
    path = f"/acme/tiny/resolve/{COMMIT}/{LARGE}"
    hub.stalls_after[path] = 2_000_000
    part = tmp_path / ROOM / f"{LARGE}.part"
    process = begun("acme/tiny", str(tmp_path), "--lease-s=0.4")
    deadline_s = time.monotonic() + 200
    while not (part.exists() and part.stat().st_size >= 1 << 20 and len(held(tmp_path)) == 3):
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.goes_on.set()
    assert read_manifest(tmp_path) is None
    hub.sent.clear()
    assert download("acme/tiny", str(tmp_path), "--lease-s=0.4") == 0
    assert held(tmp_path) == MODEL
    assert hub.sent == {path: len(MODEL[LARGE]) - (1 << 20)}, "nothing that was on the disk came again"


def test_what_a_killed_process_left_damaged_is_fetched_anew(hub: FilesServer, tmp_path: Path) -> None:
    (tmp_path / ROOM).mkdir(parents=True)

    (tmp_path / ROOM / f"{LARGE}.part").write_bytes(bytes(500_000))
    (tmp_path / ROOM / f"{LARGE}.of").write_text(hashlib.sha256(MODEL[LARGE]).hexdigest())
    (tmp_path / ROOM / "model-2.safetensors.part").write_bytes(bytes(500_000))
    (tmp_path / ROOM / "model-2.safetensors.of").write_text("of other bytes")
    (tmp_path / "config.json").write_bytes(bytes(len(MODEL["config.json"])))
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
    assert hub.sent[f"/acme/tiny/resolve/{COMMIT}/{LARGE}"] == 2 * len(MODEL[LARGE]) - 500_000
    assert hub.sent[f"/acme/tiny/resolve/{COMMIT}/model-2.safetensors"] == len(MODEL["model-2.safetensors"])


def test_wrong_bytes_are_refused_and_not_kept(
    web: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    web.damaged[f"/tiny/{LARGE}"] = bytes(len(MODEL[LARGE]))
    assert download(f"{web.url}/tiny", str(tmp_path)) == 1
    assert f"{LARGE} is not what it should be: sha256" in capfd.readouterr().err
    assert LARGE not in held(tmp_path)
    assert not (tmp_path / ROOM / f"{LARGE}.part").exists()
    assert read_manifest(tmp_path) is None


def test_a_folder_of_another_model_is_left_alone(
    hub: FilesServer, web: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert download("acme/tiny", str(tmp_path)) == 0
    assert download(f"{web.url}/tiny", str(tmp_path)) == 1
    assert "it holds hf://acme/tiny@main, and workers may be reading it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "statuses", "words"),
    [
        ("acme/none", {}, "there is no model acme/none, or it is private: then give HF_TOKEN"),
        ("acme/tiny@none", {}, "acme/tiny has no revision none"),
        ("acme/tiny", {"/api": 403}, "the hub answers with status 403; is HF_TOKEN right"),
        ("acme/tiny", {LARGE: 404}, "HTTP status 404: there is no such thing"),
        ("URL/none", {}, "HTTP status 404: there is no such thing; a folder is listed by its SHA256SUMS"),
        ("URL/tiny", {LARGE: 403}, "HTTP status 403: this token, or none, is not allowed to read it"),
    ],
)
def test_what_cannot_be_had_is_told_in_words(
    hub: FilesServer,
    web: FilesServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    source: str,
    statuses: dict[str, int],
    words: str,
) -> None:
    web.statuses |= statuses
    assert download(source.replace("URL", web.url), str(tmp_path)) == 1
    assert words in capfd.readouterr().err


def test_two_at_once_are_one_download(hub: FilesServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        codes = [*pool.map(lambda _: download("acme/tiny", str(tmp_path)), range(3))]
    assert codes == [0, 0, 0]
    assert held(tmp_path) == MODEL
    assert sum(hub.sent.values()) == TOTAL


def test_who_only_waits_asks_nobody_and_sees_nothing_half(hub: FilesServer, tmp_path: Path) -> None:
    assert download("acme/tiny", str(tmp_path), "--await-s=0.01") == 1
    assert hub.asked == []
    seen: list[bool] = []

    def wait() -> None:
        assert download("acme/tiny", str(tmp_path), "--await-s=60") == 0
        seen.append(held(tmp_path) == MODEL)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert download("acme/tiny", str(tmp_path)) == 0
    waiter.join()
    assert seen == [True]


@pytest.mark.integration
def test_a_full_disk_is_told_of_before_a_byte_comes(
    hub: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", 4_000_000) as place:
        assert download("acme/tiny", str(place / "tiny")) == 1
        assert "no space left" in (told := capfd.readouterr().err)
        assert "GB free; make room, or name a larger volume" in told
        assert hub.sent == {}


@pytest.mark.integration
def test_a_disk_that_fills_meanwhile_is_told_of(
    hub: FilesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("diptych.cli.downloads.downloading._check_room", lambda folder, files: None)
    with small_disk(tmp_path / "small", 4_000_000) as place:
        assert download("acme/tiny", str(place / "tiny")) == 1
        assert f"no space left in {place / 'tiny'}; make room" in capfd.readouterr().err


@pytest.mark.integration
def test_a_file_that_must_be_replaced_stays_until_then_and_needs_its_room(
    hub: FilesServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", 7_000_000) as place:
        (place / LARGE).write_bytes(bytes(2_999_999))
        assert download("acme/tiny", str(place)) == 1
        assert "GB free; make room" in capfd.readouterr().err
        assert hub.sent == {}


@pytest.mark.integration
def test_parts_of_files_that_are_no_longer_listed_make_room(hub: FilesServer, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 7_000_000) as place:
        (place / ROOM).mkdir()
        (place / ROOM / "old.safetensors.part").write_bytes(bytes(3_000_000))
        (place / ROOM / "old.safetensors.of").write_text("of a model before")
        assert download("acme/tiny", str(place)) == 0
        assert held(place) == MODEL
        assert {path.name for path in (place / ROOM).iterdir()} == {"complete.json"}


def test_an_answer_from_another_place_of_the_file_is_not_taken(hub: FilesServer, tmp_path: Path) -> None:
    path = f"/acme/tiny/resolve/{COMMIT}/{LARGE}"
    hub.cut_after[path], hub.num_cuts, hub.num_misplaced = 1_200_000, 1, 1
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL


@pytest.mark.integration
def test_sigterm_gives_the_lock_back_at_once(hub: FilesServer, tmp_path: Path) -> None:
    hub.stalls_after[f"/acme/tiny/resolve/{COMMIT}/{LARGE}"] = 2_000_000
    lock, part = tmp_path / ROOM / "lock", tmp_path / ROOM / f"{LARGE}.part"
    process = begun("acme/tiny", str(tmp_path))
    deadline_s = time.monotonic() + 200
    while not (part.exists() and part.stat().st_size >= 1 << 20):
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    assert lock.exists()
    process.terminate()
    while lock.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    hub.goes_on.set()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert download("acme/tiny", str(tmp_path)) == 0
    assert held(tmp_path) == MODEL
