"""Which files become documents, and what of them is kept."""

import hashlib
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.corpus import Corpus, decode, read_corpus
from megatron_ext.data.errors import DataError


def read(*paths: Path, exclude: Path = Path("/nowhere")) -> Corpus:
    return read_corpus(paths, exclude, lambda stage, done, total: None)


@given(st.binary())
def test_decoding_is_exact_for_utf8_and_says_when_it_is_not(data: bytes) -> None:
    text, exact = decode(data)
    assert (text.encode() == data) == exact or "\ufffd" in text
    assert exact or "\ufffd" in text


def test_newlines_and_byte_order_marks_are_kept() -> None:
    data = b"\xef\xbb\xbfa\r\nb\rc\n"
    assert decode(data)[0].encode() == data


def test_documents_are_sorted_and_read_back(folder: Path, texts: dict[str, str]) -> None:
    corpus = read(folder)
    assert [document.label for document in corpus.documents] == sorted(texts)
    for document in corpus.documents:
        text = texts[document.label]
        assert document.read() == text
        assert document.size == len(text.encode())
        assert document.digest == hashlib.sha256(text.encode()).hexdigest()
    assert corpus.sources == ("corpus",)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    (root / ".git").mkdir(parents=True)
    (root / "__pycache__").mkdir()
    (root / "out").mkdir()
    for name, data in {
        "b.txt": b"kept",
        "z.txt": b"kept",
        "latin.txt": b"caf\xe9",
        "image.png": b"\x89PNG\0\0",
        "empty.txt": b"",
        ".hidden": b"hidden",
        ".git/config": b"hidden too",
        "__pycache__/x.txt": b"cache",
        "out/text.txt": b"output",
    }.items():
        (root / name).write_bytes(data)
    (root / "dangling").symlink_to(root / "missing")
    os.mkfifo(root / "pipe")

    corpus = read(root, exclude=root / "out")

    assert [document.label for document in corpus.documents] == ["b.txt", "latin.txt"]
    assert corpus.documents[1].read() == "caf\ufffd"
    assert corpus.files == {
        "documents": 2,
        "binary": 1,
        "empty": 1,
        "duplicate": 1,
        "replaced": 1,
    }


def test_place_on_disk_and_order_do_not_matter(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    identity = [(d.label, d.digest) for d in read(folder / "a", folder / "b").documents]
    folder.rename(moved)
    assert identity == [(d.label, d.digest) for d in read(moved / "b", moved / "a").documents]


def test_the_default_is_the_standard_library() -> None:
    corpus = read()
    labels = {document.label for document in corpus.documents}
    root = Path(sysconfig.get_paths()["stdlib"])
    assert {"argparse.py", "json/decoder.py"} <= labels
    assert not any("site-packages" in label or "__pycache__" in label for label in labels)
    assert (root / "argparse.py").stat().st_size == next(
        document.size for document in corpus.documents if document.label == "argparse.py"
    )
    assert "standard library" in corpus.sources[0] and "/" not in corpus.sources[0]


def test_a_file_that_changes_is_noticed(folder: Path) -> None:
    document = read(folder).documents[0]
    document.path.write_text("something else")
    with pytest.raises(DataError, match="changed while"):
        document.read()


def test_unusable_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "missing": "no such file or folder",
        "empty": "no text in .*: no files",
        "binary": "no text in .*: left out 1 binary",
        "pipe": "neither a file nor a folder",
    }.items():
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)


def test_an_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permission bits do not stop root, so the refusal is made here.
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*\.txt: Permission denied"):
        read(folder)
