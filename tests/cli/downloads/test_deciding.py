"""What is meant by a source, which of its files are fetched, and whose folder it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.cli.downloads.manifest import Entry, Manifest, Wanted, read_manifest, write_manifest
from diptych.cli.downloads.remote_files import Digest, read_sums
from diptych.cli.downloads.selection import select
from diptych.cli.downloads.sources import Source, parse_source
from diptych.common.errors import ConfigError

FOLDER = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "1_Pooling/config.json"]
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = [
    *("README.md", ".gitattributes", "consolidated.safetensors", "pytorch_model.bin", "original/params.json"),
    *("onnx/model.onnx", "a/../../b.json", "/etc/passwd.json", "figure.png"),
]


@pytest.mark.parametrize(
    ("text", "revision", "source"),
    [
        ("acme/tiny", "", Source("hub", "acme/tiny", "main")),
        ("hf://acme/tiny@v1", "", Source("hub", "acme/tiny", "v1")),
        ("acme/tiny", "abc", Source("hub", "acme/tiny", "abc")),
        ("s3://bucket/a/b/", "", Source("store", "s3://bucket/a/b")),
        ("https://host/x.gguf", "", Source("web", "https://host/x.gguf")),
        ("file:///mnt/a%20b/", "", Source("folder", "/mnt/a b")),
    ],
)
def test_a_source_has_one_spelling(text: str, revision: str, source: Source) -> None:
    assert parse_source(text, revision) == source
    assert parse_source(str(source)).place == source.place


@pytest.mark.parametrize(
    ("text", "revision", "words"),
    [
        ("tiny", "", "give ORG/NAME"),
        ("ftp://host/x", "", "give ORG/NAME"),
        ("acme/tiny@v1", "v2", "give one of them"),
        ("s3://bucket/a", "v1", "is of hubs"),
        ("https://me:secret@host/x", "", "as a secret"),
        ("https://host/x?token=secret", "", "as a secret"),
        ("https:///x", "", "names no host"),
    ],
)
def test_what_is_no_source_is_refused_with_words_and_no_secret(text: str, revision: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_source(text, revision)
    assert "secret@" not in str(refused.value)
    assert "token=" not in str(refused.value)


def test_a_folder_is_fetched_without_what_no_worker_reads() -> None:
    names = [*FOLDER, *WEIGHTS, *OTHERS]
    assert select(names, "all", ()) == sorted([*FOLDER, *WEIGHTS])
    assert select(names, "tokenizer", ()) == sorted(FOLDER)


def test_weights_are_of_one_format() -> None:
    assert select(["params.json", "consolidated.safetensors"], "all", ()) == ["consolidated.safetensors", "params.json"]
    assert select(["a.gguf", "README.md"], "all", ()) == ["a.gguf"]
    assert select(["a.gguf"], "tokenizer", ()) == ["a.gguf"], "its tokenizer is inside"
    two = ["x-Q4.gguf", "x-Q8.gguf"]
    with pytest.raises(ConfigError, match=r"say by --include which, as x-Q4\.gguf"):
        select(two, "all", ())
    assert select(two, "all", ("*Q8.gguf",)) == ["x-Q8.gguf"]
    with pytest.raises(ConfigError, match=r"--include \*Q2\* is no file of the source: it has x-Q4.gguf, x-Q8.gguf"):
        select(two, "all", ("*Q2*",))
    with pytest.raises(ConfigError, match="nothing of it could be served"):
        select(["config.json", "pytorch_model.bin"], "all", ())


def test_checksums_are_read_as_the_tool_writes_them() -> None:
    one, two = "a" * 64, "B" * 64
    assert read_sums(f"{one}  a b.json\n{two} *./x/y.gguf\nnonsense\n") == {"a b.json": one, "x/y.gguf": "b" * 64}


def test_a_folder_knows_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / ".diptych-download").mkdir()
    all_of_it = Wanted("hf://acme/tiny@main")
    manifest = Manifest(all_of_it, "abc", (Entry("a.json", 2, Digest("sha256", "0")),))
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert not manifest.is_whole(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    assert manifest.is_whole(tmp_path)
    assert manifest.covers(all_of_it)
    assert manifest.covers(Wanted("hf://acme/tiny@main", "tokenizer"))
    assert not manifest.covers(Wanted("hf://acme/tiny@main", "all", ("*Q4*",)))
    with pytest.raises(ConfigError, match="it holds hf://acme/tiny@main, and workers may be reading it"):
        manifest.covers(Wanted("hf://acme/other@main"))
    (tmp_path / ".diptych-download" / "complete.json").write_text('{"format": 1}')
    assert read_manifest(tmp_path) is None
