"""Files of a page: found by name alone, once compressed, and not sent again to who has them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from diptych.router.http.console.page_files import FOLDER, PageFile, file_answer, read_files

TEXT = b"export const one = 1;\n" * 40


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": raw})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "views").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "views" / "fleet.js").write_bytes(TEXT)
    (tmp_path / "notes.md").write_text("not for browsers")
    return tmp_path


@pytest.fixture
def script(folder: Path) -> PageFile:
    return read_files(folder)["views/fleet.js"]


def test_files_are_found_by_their_path_and_the_index_by_none(folder: Path) -> None:
    files = read_files(folder)
    assert sorted(files) == ["", "index.html", "views/fleet.js"]
    assert files[""] is files["index.html"]
    assert files["views/fleet.js"].content_type.startswith("text/javascript")


def test_a_folder_without_files_has_none(tmp_path: Path) -> None:
    assert read_files(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("", False), ("br", False), ("gzip;q=0, br", False), ("xgzip", False)],
)
def test_a_file_is_compressed_for_who_takes_it(script: PageFile, accepted: str, is_compressed: bool) -> None:
    answer = file_answer(script, request(accept_encoding=accepted))
    body: Any = answer.body
    assert (answer.headers.get("content-encoding") == "gzip") is is_compressed
    assert (gzip.decompress(body) if is_compressed else body) == TEXT
    assert (len(body) < len(TEXT)) is is_compressed


def test_who_has_the_file_gets_no_body(script: PageFile) -> None:
    answer = file_answer(script, request(if_none_match=f'"other", {script.etag}'))
    assert (answer.status_code, answer.body, answer.headers["etag"]) == (304, b"", script.etag)


def test_another_content_has_another_tag(folder: Path, script: PageFile) -> None:
    (folder / "views" / "fleet.js").write_bytes(TEXT + b"\n")
    changed = read_files(folder)["views/fleet.js"]
    assert changed.etag != script.etag
    assert file_answer(changed, request(if_none_match=script.etag)).status_code == 200


def test_every_file_of_the_page_is_served_and_all_are_small() -> None:
    files = read_files()
    paths = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert paths | {""} == files.keys()
    assert sum(len(files[path].compressed) for path in paths) <= 150_000
