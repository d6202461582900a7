"""Find text files and read them as documents, the same way on every run.

A document is named by a label: its path inside the folder the user gave. Labels, not places on
disk, decide order and split, so a corpus can move between machines and stay the same corpus.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.errors import DataError

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``, from any thread; ``total`` is 0 if nobody can know it."""


@dataclass(frozen=True)
class Document:
    """One text: a file, or the part of it between two character positions."""

    label: str
    """Path inside the folder it was found in, with forward slashes."""
    path: Path
    size: int
    """Bytes of the text in UTF-8."""
    digest: str
    """sha256 of the text in UTF-8."""
    start: int = 0
    """First character of the text in the decoded file."""
    stop: int | None = None
    """One past the last character; None: to the end."""

    def read(self) -> str:
        """The text again; :class:`DataError` if the file is no longer what was found."""
        text = decode(read_bytes(self.path))[0][self.start : self.stop]
        if sha256(text) != self.digest:
            raise DataError(f"{self.path} changed while it was being read: run again")
        return text


@dataclass(frozen=True)
class Corpus:
    """Distinct documents in order of label, and what was left out."""

    documents: tuple[Document, ...]
    sources: tuple[str, ...]
    """What the user asked for, by name: no machine paths."""
    files: dict[str, int]
    """How many files became ``documents``, how many were left out as ``binary`` (they hold NUL
    bytes), ``empty`` or ``duplicate`` (an earlier one holds the same text), and how many documents
    are not valid UTF-8 and had their wrong bytes ``replaced`` by U+FFFD."""


def read_corpus(text: Sequence[Path], exclude: Path, progress: Progress) -> Corpus:
    """Read every text once and keep what identifies it; the texts are read again when needed.

    Args:
        text: files and folders; none means the Python standard library of this interpreter.
        exclude: a folder never looked into (the output may lie inside the text).
        progress: told how many files are read.

    Raises:
        DataError: a path is missing, unreadable, or there is no text at all.
    """
    files = _listed(text, exclude) if text else _standard_library(exclude)
    documents: list[Document] = []
    binary = empty = replaced = 0
    for done, (label, path) in enumerate(files):
        progress("reading text", done, len(files))
        data = read_bytes(path)
        if not data:
            empty += 1
        elif b"\0" in data:
            binary += 1
        else:
            content, exact = decode(data)
            replaced += not exact
            documents.append(
                Document(label, path, size=len(content.encode()), digest=sha256(content))
            )
    distinct = _distinct(documents)
    counts = {
        "documents": len(distinct),
        "binary": binary,
        "empty": empty,
        "duplicate": len(documents) - len(distinct),
        "replaced": replaced,
    }
    if not distinct:
        asked = ", ".join(map(str, text)) or "the Python standard library (give --text PATH)"
        found = f"left out {left_out(counts)}" if files else "no files"
        raise DataError(f"no text in {asked}: {found}")
    return Corpus(distinct, _source_names(text), counts)


def left_out(files: dict[str, int]) -> str:
    """The files of :attr:`Corpus.files` that are not documents, in words; "" if there are none."""
    kinds = ("binary", "empty", "duplicate")
    return ", ".join(f"{files[kind]} {kind}" for kind in kinds if files[kind])


def decode(data: bytes) -> tuple[str, bool]:
    """The text of UTF-8 bytes, and whether it is exact: bytes that are not UTF-8 turn to U+FFFD.

    No newline is translated and no byte order mark dropped: encoding the text again gives the
    bytes back.
    """
    try:
        return data.decode("utf-8"), True
    except UnicodeDecodeError:
        return data.decode("utf-8", errors="replace"), False


def sha256(text: str) -> str:
    """Hexadecimal sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """A file's bytes; :class:`DataError` with the reason if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _distinct(documents: list[Document]) -> tuple[Document, ...]:
    """The first of each text by label: a copy would leak held-out text into training."""
    first: dict[str, Document] = {}
    for document in sorted(documents, key=lambda document: (document.label, document.digest)):
        first.setdefault(document.digest, document)
    return tuple(first.values())


def _source_names(text: Sequence[Path]) -> tuple[str, ...]:
    if not text:
        return (f"Python {platform.python_version()} standard library",)
    return tuple(sorted(path.resolve().name for path in text))


def _standard_library(exclude: Path) -> list[tuple[str, Path]]:
    # Inside a virtual environment this is still the base interpreter's library.
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError("this Python has no standard library on disk: give --text PATH")
    found = _walk(root, exclude, skip={"site-packages", "dist-packages"})
    return [(label, path) for label, path in found if path.suffix == ".py"]


def _listed(text: Sequence[Path], exclude: Path) -> list[tuple[str, Path]]:
    files: list[tuple[str, Path]] = []
    for path in text:
        if path.is_dir():
            files += _walk(path, exclude, skip=set())
        elif path.is_file():
            files.append((path.name, path))
        elif path.exists():
            raise DataError(f"{path} is neither a file nor a folder (text is read more than once)")
        else:
            raise DataError(f"no such file or folder: {path}")
    return files


def _walk(root: Path, exclude: Path, skip: set[str]) -> Iterator[tuple[str, Path]]:
    """Regular files below ``root``, without hidden ones, byte-code caches and ``skip`` folders."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in skip | {"__pycache__"}
            and (here / name).resolve() != exclude
        ]
        for name in names:
            path = here / name
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path
