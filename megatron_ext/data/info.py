"""What a prepared dataset is: the contents of its ``dataset.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.errors import DataError

FORMAT = "megatron_ext.data"
FORMAT_VERSION = 1
INFO_FILE = "dataset.json"
DATA_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json")


@dataclass(frozen=True)
class SplitInfo:
    """One split in numbers."""

    documents: int
    tokens: int
    """End-of-document tokens included."""
    bytes: int
    """Bytes of the text in UTF-8, without the end-of-document tokens."""
    unigram_entropy: float
    """Nats a token of a model that knows the split's own token frequencies and nothing else."""

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss in nats a token, in bits a byte: comparable between vocabularies."""
        return loss / math.log(2) / self.bytes_per_token


@dataclass(frozen=True)
class DatasetInfo:
    """A prepared dataset on disk."""

    path: Path
    """The folder."""
    fingerprint: str
    """sha256 over format version, options and documents: equal means the same dataset."""
    sources: tuple[str, ...]
    """What it was made of, by name."""
    options: dict[str, int | float]
    """The options that decide the contents: vocab_size (asked for), held_out, seed."""
    files: dict[str, int]
    """How the files found were used: documents, binary, empty, duplicate, replaced."""
    vocab_size: int
    """Tokens in the vocabulary, the end of document included."""
    eod_id: int
    """Id of the end of document: the last one."""
    dtype: str
    """Type of a token in the ``.bin`` files: uint16 or int32."""
    splits: dict[str, SplitInfo]
    """``train`` and ``valid``."""
    sizes: dict[str, int]
    """Bytes of each file in the folder."""
    reused: bool = False
    """Whether ``prepare`` found it finished and left it as it was; not stored."""

    @property
    def train_prefix(self) -> str:
        """What Megatron's ``--train-data-path`` takes: the path without ``.bin`` or ``.idx``."""
        return str(self.path / "train")

    @property
    def valid_prefix(self) -> str:
        """What Megatron's ``--valid-data-path`` takes."""
        return str(self.path / "valid")

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    def write(self) -> None:
        """Write ``dataset.json`` into :attr:`path`."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "sources": list(self.sources),
            "options": self.options,
            "files": self.files,
            "vocab_size": self.vocab_size,
            "eod_id": self.eod_id,
            "dtype": self.dtype,
            "splits": {
                name: {
                    "documents": split.documents,
                    "tokens": split.tokens,
                    "bytes": split.bytes,
                    "bytes_per_token": split.bytes_per_token,
                    "unigram_entropy_nats": split.unigram_entropy,
                }
                for name, split in self.splits.items()
            },
            "sizes": self.sizes,
        }
        (self.path / INFO_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_info(path: str | Path) -> DatasetInfo:
    """Read a dataset's description, and check that its files are there in full.

    Raises:
        DataError: no dataset there, one of another format version, or files missing or cut off.
    """
    folder = Path(path)
    content = read_info_file(folder)
    if content is None:
        raise DataError(
            f"no dataset in {folder}: make one with python -m megatron_ext.data --output {folder}"
        )
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{folder} has format version {content.get('format_version')}, this is version"
            f" {FORMAT_VERSION}: rebuild it with --force"
        )
    try:
        info = DatasetInfo(
            path=folder,
            fingerprint=content["fingerprint"],
            sources=tuple(content["sources"]),
            options=content["options"],
            files=content["files"],
            vocab_size=content["vocab_size"],
            eod_id=content["eod_id"],
            dtype=content["dtype"],
            splits={
                name: SplitInfo(
                    documents=split["documents"],
                    tokens=split["tokens"],
                    bytes=split["bytes"],
                    unigram_entropy=split["unigram_entropy_nats"],
                )
                for name, split in content["splits"].items()
            },
            sizes=content["sizes"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / INFO_FILE} is damaged ({error}): rebuild it with --force"
        ) from error
    for name in DATA_FILES:
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != info.sizes.get(name):
            raise DataError(
                f"{file} has {found} bytes, not {info.sizes.get(name)}: rebuild it with --force"
            )
    return info


def read_info_file(folder: Path) -> dict[str, Any] | None:
    """The raw ``dataset.json`` of a folder, or None if this tool did not make the folder."""
    try:
        content = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
